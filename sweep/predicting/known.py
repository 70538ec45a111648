"""Measurements on a cluster that predictions of a plan start from: rows of every sweep of a results folder, and the
newest probe."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from sweep.composing.config import SweepConfig
from sweep.predicting.power import MeasuredPower, power_of_rows
from workloads.contract.probe_figures import ON_GPU
from workloads.costs.traffic.measured_network import MeasuredNetwork, network_of
from workloads.predict.probed import LAUNCH_S, probed, probed_host
from workloads.rules.captured_steps import is_captured
from workloads.rules.layout_rules import layout_violations
from workloads.spec.cluster import ClusterSpec, HostSpec
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import ENGINE, Experiment, from_dict, layout_id


class MeasuredLayout(NamedTuple):
    """A layout that ran, with its measured step time."""

    experiment: Experiment
    step_time_s: float
    launch: float | None = None
    """Its host's time per launched operation, relative to the usual time `LAUNCH_S`; None: unknown."""
    peak_bytes: int | None = None
    """Allocated bytes of its fullest device; None: unknown."""


@dataclass(frozen=True, slots=True)
class Known:
    """Measurements on a cluster that a plan may use."""

    steps: Mapping[str, MeasuredLayout] = field(default_factory=dict)
    """Layouts that ran there, by `layout_id`, newest first."""
    probe: Mapping[str, float] = field(default_factory=dict)
    """Rates and factors as `workloads.predict.probed.probed` returns them; empty: no probe, or a probe without usable
    rates."""
    probe_day: str = ""
    """Day when the probe ended, as year-month-day."""
    network: MeasuredNetwork | None = None
    """Times of collectives between nodes; None without a probe of several nodes."""
    host: HostSpec | None = None
    """The host with the rates that the probe has measured; None without a probe."""
    power: MeasuredPower | None = None
    """Power of rows of the same device, also on other clusters; None: no row has it."""
    elsewhere: tuple[tuple[ClusterSpec, Known], ...] = ()
    """Measurements on other clusters that also count."""


def known_of(config: SweepConfig) -> Known:
    """Measurements that predictions of a sweep start from: of its cluster and of those in ``plan.learn_from``."""
    return read_known(config.cluster, config.results_dir, config.learn_from)


def read_known(cluster: ClusterSpec, results_dir: Path, elsewhere: Sequence[ClusterSpec] = ()) -> Known:
    """Rows and the probe of a cluster in a results folder, and of the clusters ``elsewhere``.

    Files that cannot be read are skipped.
    """
    if cluster.matmul_efficiency is None or not results_dir.is_dir():
        return Known()
    from results.tables.probes import load_probe

    others = tuple((other, read_known(other, results_dir)) for other in elsewhere if other.name != cluster.name)
    devices = {cluster.device.name, *cluster.device.driver_names}
    rows = list(_measured_rows(results_dir, cluster, ["device_name", "power_w"], devices))
    known = Known(
        ran_layouts((row for row in rows if row["cluster"] == cluster.name), cluster.backend),
        power=power_of_rows(row for row in rows if row["device_name"] in devices),
        elsewhere=others,
    )
    if (probe := load_probe(cluster.name, results_dir)) is None:
        return known
    rates = probed(probe.rows, cluster)
    if (network := network_of(probe.rows, cluster.devices_per_node)) is not None:
        rates_of_pilots = _checked_rates(results_dir, cluster, network.nodes, probe.measured_at - _SAME_NETWORK)
        network = network.over_moments(rates_of_pilots, ON_GPU.check_bytes)
    day = f"{probe.measured_at:%Y-%m-%d}" if rates or network else ""
    host = probed_host(probe.rows, cluster.host)
    return dataclasses.replace(known, probe=rates, probe_day=day, network=network, host=host)


def ran_layouts(measured: Iterable[Mapping[str, Any]], backend: str = "cuda") -> dict[str, MeasuredLayout]:
    """Layouts that ran on one cluster, by `layout_id`, newest first. ``measured``: columns `READ` of finished attempts.

    Several runs of a layout give the median step time and launch time. Runs whose allocator had to free its cache,
    warm-up included, are left out: that time is not a property of the layout. So are steps that ran eagerly where those
    of the layout are captured on ``backend`` (too few warm-up steps).
    """
    runs: list[MeasuredLayout] = []
    smooth = (row for row in measured if not row["allocator_retries"])
    for row in sorted(smooth, key=lambda row: str(row["started_at"]), reverse=True):
        try:
            experiment = from_dict(json.loads(row["config_json"]))
        except (InvalidExperiment, ValueError, TypeError, KeyError):  # written by a version that this one cannot read
            continue
        as_predicted = (row.get("cuda_graph_run") == "step") == is_captured(experiment, backend)
        if not layout_violations(experiment) and (as_predicted or experiment.engine != ENGINE):
            launch_s = row["host_launch_s"] or 0
            launch = launch_s / LAUNCH_S if 0 < launch_s < math.inf else None
            peak = row.get("peak_allocated_bytes")
            runs.append(MeasuredLayout(experiment, row["step_time_s"], launch, int(peak) if peak else None))
    runs_by_layout: dict[str, list[MeasuredLayout]] = {}
    for ran in runs:
        runs_by_layout.setdefault(layout_id(ran.experiment), []).append(ran)
    return {
        name: every[0]._replace(
            step_time_s=statistics.median(one.step_time_s for one in every),
            launch=_middle(one.launch for one in every),
            peak_bytes=max((one.peak_bytes for one in every if one.peak_bytes is not None), default=None),
        )
        for name, every in runs_by_layout.items()
    }


def _checked_rates(folder: Path, cluster: ClusterSpec, nodes: int, since: datetime) -> list[float]:
    """Bus bandwidths in B/s of the all-reduces by which pilots of so many nodes checked the network before their first
    point, one by pilot."""
    rates: dict[str, float] = {}
    spanned: dict[str, int] = {}
    for row in _measured_rows(folder, cluster, ["pilot_id", "nodes", _CHECK]):
        if pilot := row["pilot_id"]:
            spanned[pilot] = max(spanned.get(pilot, 0), len(row["nodes"] or ()))
            if (row[_CHECK] or 0) > 0 and row["started_at"] >= since:
                rates[pilot] = row[_CHECK]
    return [rate for pilot, rate in rates.items() if spanned[pilot] == nodes]


def _middle(launches: Iterable[float | None]) -> float | None:
    known = [launch for launch in launches if launch is not None]
    return statistics.median(known) if known else None


def _measured_rows(
    folder: Path, cluster: ClusterSpec, more: Sequence[str] = (), devices: Collection[str] = ()
) -> Iterable[dict[str, Any]]:
    """Columns `READ`, and ``more``, of finished measurements on the cluster, including real steps of its probes.

    ``devices``: names of devices whose rows on other clusters come too.
    """
    from results.errors import InvalidResults
    from results.tables import store
    from results.tables.schema import MEASUREMENT_VERSION

    for sweep in store.own_sweep_dirs(folder):
        try:
            table = store.runs_of(store.scan(sweep, "attempts").table.select([*READ, *more, "attempt_id"]), sweep)
        except (InvalidResults, OSError):
            continue
        for row in table.select([*READ, *more]).to_pylist():
            if (
                row["outcome"] == "ok"
                and row["method"] == "measured"
                and (row["cluster"] == cluster.name or (devices and row["device_name"] in devices))
                and row["measurement_version"] == MEASUREMENT_VERSION
                and row["config_json"]
                and (row["step_time_s"] or 0) > 0
            ):
                yield row


_SAME_NETWORK = timedelta(days=30)
"""Time before a probe from which pilots' checks are taken to be of the same network."""
_CHECK = "check_all_reduce_between_nodes_bytes_per_s"
READ = [
    "started_at", "config_json", "step_time_s", "host_launch_s", "outcome", "method", "cluster", "measurement_version",
    "allocator_retries", "peak_allocated_bytes", "cuda_graph_run",
]  # fmt: skip
