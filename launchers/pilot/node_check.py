"""Measures the speed of every node of a pilot in seconds, before its first point, and finds nodes far below their
peers.

All ranks of all nodes run at once (`workloads.probe.run.check`). The rates go into every attempt of the pilot, since
two regimes of one network, or one throttled device, can reverse a comparison of layouts. A failed check costs its
numbers and a line in the log, never the pilot.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launchers.attempt.watchdog import watch
from launchers.node.connection import NodeLost
from launchers.node.ports import NoFreePort
from launchers.node.rank_group import StartFailed
from launchers.node.remote import Node, RemoteRanks
from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import SweepDir
from workloads.contract import protocol
from workloads.contract.protocol import RankResult, Task, read_json, write_json
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

Rates = Mapping[str, float | None]
"""Rates by the columns in `COLUMNS`; for several devices or nodes the lowest."""
COLUMNS = {
    "matmul": "check_matmul_flops",
    "copy": "check_copy_bytes_per_s",
    "all_reduce_inside_node": "check_all_reduce_inside_node_bytes_per_s",
    "all_reduce_between_nodes": "check_all_reduce_between_nodes_bytes_per_s",
}
"""Column of each rate, by the name of the check's figure."""
FAR_BELOW = 0.9
"""A node below this share of the median of its peers is reported. Rates of equal nodes differ by 2 to 3 %."""
LIMIT_S = 180.0
"""Time limit of a check in seconds; NCCL's first start over many nodes takes most of it."""
_ANSWER_LIMIT_S = 30.0
_MODEL = ModelSpec(
    name="check",
    num_layers=1,
    hidden_size=64,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    ffn_hidden_size=64,
    vocab_size=64,
)


class CheckFailed(Exception):
    """The check measured no rates; the message says why."""


def check_nodes(
    sweep: SweepDir,
    pilot_id: str,
    settings: LaunchSettings,
    nodes: Sequence[Node],
    stop_asked: Callable[[], bool],
    tick: Callable[[], None],
) -> dict[str, Rates]:
    """Measure the rates of each node, by name. They are also stored for later pilots of the sweep.

    ``tick`` is called about five times a second. Raises `CheckFailed`, or `OSError` when files cannot be written.
    """
    width = settings.num_devices
    world_size = width * len(nodes)
    folder = check_dir(sweep, pilot_id)
    try:
        port = nodes[0].reserve_port()
    except (NodeLost, NoFreePort) as error:
        raise CheckFailed(str(error)) from None
    experiment = Experiment.canonical(model=_MODEL, dp=world_size, global_batch_size=world_size, seq_len=16)
    task = Task(
        attempt_id=folder.name,
        experiment=experiment,
        measure=settings.measure,
        cluster=settings.cluster,
        device=settings.device,
        devices_per_node=width,
        rendezvous_host=nodes[0].address,
        rendezvous_port=port,
        collective_timeout_s=settings.collective_timeout_s,
        probe="check",
    )
    protocol.write_task(folder, task)
    group = RemoteRanks(nodes, range(world_size), width, f"check-{pilot_id}")
    try:
        group.start(folder, {node.name: _environment(node, settings, width) for node in nodes})
    except StartFailed as error:
        raise CheckFailed(str(error)) from None
    watch(
        folder,
        group,
        settings,
        deadline_s=LIMIT_S,
        expected_step_s=None,
        stop_asked=stop_asked,
        on_progress=lambda progress: tick(),
    )
    _wait_until_free(nodes, settings, width)
    results = {rank: result for rank in range(world_size) if (result := protocol.read_result(folder, rank)) is not None}
    if len(results) < world_size:
        raise CheckFailed(_why(folder, world_size, results))
    rates_by_node = {
        node.name: _lowest([_of_rank(results[rank]) for rank in range(at * width, (at + 1) * width)])
        for at, node in enumerate(nodes)
    }
    write_json(folder / "rates.json", rates_by_node)
    return rates_by_node


def check_dir(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.path / "checks" / pilot_id


def rates_of(checks: Mapping[str, Rates], nodes: Sequence[str]) -> Rates | None:
    """The lowest rates of these nodes; None unless all of them were checked."""
    if not nodes or any(node not in checks for node in nodes):
        return None
    return _lowest([checks[node] for node in nodes])


def slow_nodes(sweep: SweepDir, checks: Mapping[str, Rates]) -> dict[str, str]:
    """Nodes far below their peers, with the numbers. Peers are the other nodes of this pilot and of earlier ones."""
    everyone = {**_earlier(sweep), **checks}
    slow: dict[str, str] = {}
    for node, rates in checks.items():
        shortfalls = []
        for name, column in COLUMNS.items():
            others = [value for other, has in everyone.items() if other != node and (value := has.get(column))]
            value = rates.get(column)
            if value is None or not others:
                continue
            middle = statistics.median(others)
            if value < FAR_BELOW * middle:
                unit = "TFLOP/s" if name == "matmul" else "GB/s"
                scale = 1e12 if name == "matmul" else 1e9
                what = name.replace("_", " ")
                shortfalls.append(
                    f"{what} {value / scale:.3g} {unit}, median of {len(others)} others {middle / scale:.3g}"
                )
        if shortfalls:
            slow[node] = "far below its peers: " + "; ".join(shortfalls)
    return slow


def _earlier(sweep: SweepDir) -> dict[str, Rates]:
    rates_by_node: dict[str, Rates] = {}
    with contextlib.suppress(OSError):
        for path in sorted((sweep.path / "checks").glob("*/rates.json")):
            with contextlib.suppress(OSError, ValueError):
                rates_by_node |= {node: rates for node, rates in read_json(path).items() if isinstance(rates, dict)}
    return rates_by_node


def _of_rank(result: RankResult) -> Rates:
    rates: dict[str, float | None] = dict.fromkeys(COLUMNS.values())
    return rates | {COLUMNS[figure.name]: figure.value for figure in result.probe or ()}


def _lowest(rates: Sequence[Rates]) -> Rates:
    return {
        column: min((value for each in rates if (value := each.get(column)) is not None), default=None)
        for column in COLUMNS.values()
    }


def _environment(node: Node, settings: LaunchSettings, width: int) -> dict[str, str]:
    ids = node.device_ids[:width] if node.device_ids is not None else ()
    return {**settings.environment, "CUDA_VISIBLE_DEVICES": ",".join(ids)}


def _wait_until_free(nodes: Sequence[Node], settings: LaunchSettings, width: int) -> None:
    limit_s = settings.device_free_limit_s
    for node in nodes:
        with contextlib.suppress(NodeLost):
            node.wait(node.ask("free", count=width, limit_s=limit_s), "free", limit_s + _ANSWER_LIMIT_S)


def _why(folder: Path, world_size: int, results: Mapping[int, RankResult]) -> str:
    missing = world_size - len(results)
    for rank in range(world_size):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if (error := protocol.read_error(folder, rank)) is not None:
                return f"rank {rank}: {error.message.splitlines()[0]}"
    return f"{missing} of {world_size} ranks measured nothing; see {folder}"
