"""Calibration factors of the time model from a probe of a cluster: its devices, its hosts and its links.

A figure counts if it was measured on a GPU of the cluster; without a figure there is no factor. Rates of single tests
become parameters by inverting the model's terms: T rows of width h reach ``share / ((1 + tokens/T) (1 + width/h))``.
The probe's real steps are measured rows like others and need no inversion. The factors belong to a cluster, so that
rows of one cluster apply to another if both are probed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workloads.predict.hardware import CALIBRATED_AT
from workloads.predict.parameters import TIME
from workloads.spec.cluster import ClusterSpec, HostSpec

Row = Mapping[str, Any]
"""One figure, with the columns of `results.tables.probes.COLUMNS`."""
LONG = 4096
"""Number of tokens from which a product counts as large."""
WIDEST = 3.0
"""Maximum change of a parameter by a probe, in its spreads; beyond it the test is considered broken and ignored."""

LAUNCH_S = 49e-6
"""Seconds to launch one operation (`workloads.measuring.host_pace`) on a host for which this engine's times hold. Over
fourteen hosts of H100 and H200 the host's part of a step grew nearly as the square of the launch time
(docs/accuracy_details.md)."""
USUAL_LAUNCH = 52e-6 / LAUNCH_S
"""Launch time of a host of which nothing is measured: the median of the medians of 41 hosts of H100 and H200 that five
recorded rows or more are of (41 to 64 us)."""
IN_A_PROBE = 0.84
"""Host time of a layer in a real step divided by that in a probe: the median of five hosts. Used for probes without a
launch figure."""


def probed(rows: Sequence[Row], cluster: ClusterSpec) -> dict[str, float]:
    """Factors by name: ``world_measured`` and ``intra_measured`` in B/s and ``launch`` or, without a launch figure,
    ``pace`` (all of `workloads.predict.points.Points`); and ``matmul``, a factor on the device's peak. A name is
    missing if the probe has no figure.

    ``rows``: those of one probe of the cluster; rows of CPU processes are ignored.
    """
    rows = [row for row in rows if row["backend"] == "cuda" and row["value"] > 0]
    launch = _launch(rows)
    factors = {"matmul": _matmul(rows, cluster), "launch": launch, "pace": None if launch else _pace(rows)}
    near = {name: factor for name, factor in factors.items() if factor is not None and not _went_wrong(name, factor)}
    return {**near, **_rates(rows)}


def probed_host(rows: Sequence[Row], host: HostSpec) -> HostSpec:
    """``host`` with the rates of a probe: its link in both directions at once and in one alone, on the slowest device,
    all devices at once. Rows of CPU processes are ignored."""
    rows = [row for row in rows if row["backend"] == "cuda" and row["value"] > 0]
    both, alone = ([row["value"] for row in _of(rows, "copy", name=name)] for name in ("both_ways", "to_host"))
    if not both:
        return host
    one_way = min(alone) if alone else host.link_one_way_bandwidth
    shared = host.link_shared_bandwidth if len(both) == 1 else None  # several devices were timed at once
    return replace(host, link_bandwidth=min(both), link_shared_bandwidth=shared, link_one_way_bandwidth=one_way)


def _went_wrong(name: str, factor: float) -> bool:
    power = TIME["host_launch"].value if name == "launch" else 1.0
    return abs(power * math.log(factor)) > WIDEST * TIME[_SPREAD_OF[name]].spread


_SPREAD_OF = {"matmul": "matmul", "launch": "host", "pace": "host"}
"""Parameter of `TIME` that a factor changes."""


def _matmul(rows: Sequence[Row], cluster: ClusterSpec) -> float | None:
    """Share of peak of a layer's products, one after another (their FLOPs over their seconds), divided by the
    default."""
    peak, share = cluster.device.peak_of("bf16"), cluster.matmul_efficiency
    products = [row for row in _of(rows, "matmul", tp=1) if (row["rows"] or 0) >= LONG and row["hidden_size"]]
    if not products or peak is None or share is None:
        return None
    flops = [2.0 * row["rows"] * row["inner"] * row["columns"] for row in products]
    seconds = 0.0
    for row, work in zip(products, flops, strict=True):
        short = (1 + TIME["tokens"].value / row["rows"]) * (1 + TIME["width"].value / row["hidden_size"])
        seconds += work / row["value"] / short
    reached: float = sum(flops) / seconds / peak
    return reached / (share / CALIBRATED_AT) / TIME["matmul"].value


def pace_of(launch: float) -> float:
    """Factor on the host's part of a step, before any fit, if a launch takes ``launch`` times as long as usual."""
    pace: float = launch ** TIME["host_launch"].value
    return pace


def _launch(rows: Sequence[Row]) -> float | None:
    """Launch time of the slowest rank's host, as in rows of attempts, divided by `LAUNCH_S`."""
    launches = [row["value"] for row in _of(rows, "host", name="launch")]
    return max(launches) / LAUNCH_S if launches else None


def _pace(rows: Sequence[Row]) -> float | None:
    """Host seconds of a layer, forward and backward, over all cases that were tested, divided by the model's general
    values. A factor of one means the same host for every code base."""
    measured, usual = 0.0, 0.0
    for fields, names in _HOST_CASES:
        parts = [[row["value"] for row in _of(rows, "host", name=f"layer_{way}", **fields)] for way in _WAYS]
        if all(parts):
            measured += sum(map(statistics.median, parts))
            usual += sum(TIME[name].value for name in names)
    return IN_A_PROBE * measured / usual if usual else None


_PLAIN = {"tp": 1, "zero_stage": 0, "recompute": "none"}
_HOST_CASES: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...] = (
    (_PLAIN, ("host",)),
    ({**_PLAIN, "tp": 2}, ("host", "host_tp")),
    ({**_PLAIN, "zero_stage": 3}, ("host", "host_zero3")),
    ({**_PLAIN, "recompute": "selective"}, ("host", "host_selective")),
    ({**_PLAIN, "recompute": "full"}, ("host", "host_full")),
)
"""Tests of the host, and the parameters of the model whose sum each test measures."""
_WAYS = ("forward", "backward")


def _rates(rows: Sequence[Row]) -> dict[str, float]:
    """Bus bandwidth in B/s of the largest all-reduce inside a node, and over all devices of several nodes."""
    rates = {}
    for name, placement in (("intra_measured", "inside_node"), ("world_measured", "mixed")):
        calls = [row for row in _of(rows, "collective", name="all_reduce", placement=placement) if row["bytes"]]
        calls = [row for row in calls if (row["group_size"] or 0) > 1]
        if calls:
            row = max(calls, key=lambda one: (one["group_size"], one["bytes"]))
            n = row["group_size"]
            rates[name] = 2 * (n - 1) / n * row["bytes"] / row["value"]
    return rates


def _of(rows: Iterable[Row], kind: str, **fields: Any) -> list[Row]:
    wanted = {"kind": kind, **fields}
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]
