"""``python -m sweep probe``: measures a cluster's devices and links, and stores the figures for later plans.

A probe is a sweep of two points, run by the same launchers as any other; one point also does the tests of
`workloads.probe`. `results.tables.probes` stores what the ranks have measured.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from results.tables import probes
from results.tables.probes import Probe
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import default_launcher, this_machine
from sweep.composing.planned_only import refuse_planned_only
from sweep.running.run import Prepared, prepare
from workloads.contract import protocol
from workloads.contract.protocol import RankResult

_DEADLINE_S = 900.0
_ON_CPU = ("cluster=cpu", "model=tiny", "grid.axes.seq_len=64", "+grid.axes.precision=fp32")
_CPU_RANKS = 2
_LARGEST_TP = 8
_BETWEEN = {"between_nodes": " between nodes"}
_FORBIDDEN = ("grid", "name", "measure.profile")
_PROVENANCE = (
    "device_name",
    "torch_version",
    "cuda_version",
    "nccl_version",
    "driver_version",
    "engine_version",
    "git_commit",
    "command",
    "backend",
)


def prepare_probe(overrides: Sequence[str], folders: ConfFolders, nodes: int) -> Prepared:
    """The sweep that measures ``nodes`` nodes of the cluster named by the overrides, or this machine.

    Raises `UltrasweepError` for overrides that the user may not choose here.
    """
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name in _FORBIDDEN or name.startswith("grid."):
            raise UltrasweepError(
                f"probe: {name} is set by this command; cluster, model, launcher and results_dir may be given"
            )
    settable_overrides = [override for override in overrides if not override.startswith("results_dir=")]
    begin = ["+grid=probe", *settable_overrides]
    config = compose_sweep(begin, folders, launcher=default_launcher())
    refuse_planned_only(config.cluster)
    if config.launcher_kind == "rehearse":
        raise UltrasweepError("probe: launcher=rehearse has no links to measure; it may be local or slurm")
    devices, on_cpu = config.cluster.devices_per_node, config.cluster.backend == "cpu"
    if config.launcher_kind == "local":
        if nodes > 1:
            raise UltrasweepError(f"probe: --nodes {nodes} needs launcher=slurm; this machine is one node")
        machine, asked = this_machine(), config.launcher.get("num_devices")
        on_cpu = on_cpu or not (machine.num_gpus or config.cluster_given)
        devices = asked if isinstance(asked, int) else _CPU_RANKS if on_cpu else max(1, machine.num_gpus)
    if on_cpu:
        given = {override.partition("=")[0] for override in settable_overrides}
        begin += [setting for setting in _ON_CPU if setting.partition("=")[0] not in given]
    world_size = nodes * devices
    heads = next(iter(compose_sweep(begin, folders, launcher=config.launcher_kind).models.values())).num_kv_heads
    tp = math.gcd(_LARGEST_TP, math.gcd(devices, heads))
    begin += [
        f"grid.axes.world_size={world_size}",
        f"grid.axes.tp={[1, tp] if tp > 1 else [1]}".replace(" ", ""),
        f"results_dir={_results_dir(overrides) / probes.FOLDER / 'runs'}",
        f"name={time.strftime('%Y%m%d-%H%M%S')}",
    ]
    prepared = prepare(begin, folders, ())
    settings = dataclasses.replace(
        prepared.settings, probe="probe", node_check=False, point_deadline_s=_DEADLINE_S, max_attempts=1
    )
    return dataclasses.replace(prepared, settings=settings)


def _results_dir(overrides: Sequence[str]) -> Path:
    given = [o.partition("=")[2] for o in overrides if o.startswith("results_dir=")]
    if len(given) > 1:
        raise UltrasweepError(f"probe: results_dir is given twice, {' and '.join(given)}; give it once")
    return Path(given[0] if given else "results").expanduser()


def store_probe(sweep: SweepDir, prepared: Prepared, command: str) -> Probe:
    """Store the figures that the finished sweep of a probe has measured.

    Raises `UltrasweepError` if there are none: then the probe failed.
    """
    from results.tables.store import read_attempts

    config, settings = prepared.plan.config, prepared.settings
    cluster = config.cluster
    rows: list[dict[str, Any]] = []
    attempts = read_attempts(sweep.path).to_pylist()
    at = probes.now()
    for attempt in attempts:
        if attempt["outcome"] != "ok":
            continue
        known = {name: attempt[name] for name in _PROVENANCE} | {
            "model": attempt["model"],
            "hidden_size": attempt["hidden_size"],
            "precision": attempt["precision"],
            "nodes": math.ceil(attempt["world_size"] / settings.num_devices),
            "devices_per_node": min(attempt["world_size"], settings.num_devices),
            "command": command,
        }
        rows.append(_step(attempt, known))
        folder = sweep.attempts / attempt["attempt_id"]
        for rank in range(attempt["world_size"]):
            result = protocol.read_result(folder, rank)
            rows += _figures(result, attempt, known, settings.num_devices) if result is not None else []
    if not any(row["kind"] != "step" for row in rows):
        why = next((f": {attempt['evidence']}" for attempt in attempts if attempt["outcome"] != "ok"), "")
        raise UltrasweepError(f"probe: nothing was measured{why}; its logs are in {sweep.path}")
    host = next((row["host"] for row in rows if row["host"]), None) or "host"
    probe_id = f"{at.strftime('%Y%m%d-%H%M%S')}-{host}"
    same = {
        "probe_id": probe_id,
        "probe_version": probes.PROBE_VERSION,
        "measured_at": at,
        "cluster": cluster.name,
    }
    path = probes.write_probe(config.results_dir.parents[1], cluster.name, probe_id, [row | same for row in rows])
    return probes.read_probe(path)


def _step(attempt: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    fields = ("tp", "dp", "zero_stage", "micro_batch_size", "seq_len", "recompute", "num_layers", "world_size")
    return {
        **known,
        **{name: attempt[name] for name in (*fields, "sm_clock_mhz", "power_w", "temperature_c")},
        "kind": "step",
        "name": "step_time",
        "value": attempt["step_time_s"],
        "unit": "s",
        "repeats": attempt["timed_steps"],
        "host": (attempt["hosts"] or [None])[0],
    }


def _figures(
    result: RankResult, attempt: dict[str, Any], known: dict[str, Any], devices_per_node: int
) -> list[dict[str, Any]]:
    nodes = attempt["nodes"] or []
    index = result.rank // devices_per_node
    of_rank = {
        "rank": result.rank,
        "host": result.host,
        "device_id": result.device_id,
        "node": nodes[index] if index < len(nodes) else None,
    }
    return [{**known, **of_rank, **dataclasses.asdict(figure)} for figure in result.probe or []]


def headlines(probe: Probe) -> list[str]:
    """The main results of a probe, one line each."""
    lines = []
    if products := probe.select("matmul"):
        best = max(products, key=lambda row: row["value"])
        clock = f" at {best['sm_clock_mhz']:,.0f} MHz, {best['power_w']:,.0f} W" if best["power_w"] else ""
        shape = f"{best['rows']} x {best['inner']} x {best['columns']}"
        lines.append(f"matmul: up to {best['value'] / 1e12:,.1f} TFLOP/s ({best['name']}, {shape}{clock})")
    if copies := probe.select("copy", "copy"):
        rates = [row["value"] / 1e9 for row in copies]
        lines.append(f"copy: {min(rates):,.0f} to {max(rates):,.0f} GB/s by device")
    if both := probe.select("copy", "both_ways"):
        rates = [row["value"] / 1e9 for row in both]
        lines.append(f"host link: {min(rates):,.1f} to {max(rates):,.1f} GB/s in each direction at once, by device")
    for placement in ("inside_node", "between_nodes", "mixed"):
        all_reduces = probe.select("collective", "all_reduce", placement=placement)
        if all_reduces:
            row = max(all_reduces, key=lambda row: (row["group_size"], row["bytes"]))
            n = row["group_size"]
            bus = 2 * (n - 1) / n * row["bytes"] / row["value"] / 1e9
            lines.append(f"all-reduce {placement}: {bus:,.1f} GB/s over {n} ranks, {row['bytes'] / 2**20:,.0f} MiB")
    lines += [
        f"{row['name']} during {row['beside']}{_BETWEEN.get(row['placement'], '')}: takes {row['value']:.2f} x as long"
        for row in probe.select("interference")
    ]
    lines += [
        f"step of {row['model']}, dp {row['dp']}, tp {row['tp']}: {row['value']:.3f} s" for row in probe.select("step")
    ]
    return lines
