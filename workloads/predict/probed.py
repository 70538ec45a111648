"""What a probe of a cluster says of its devices, its hosts and its links, as factors on what the time model takes for
granted.

A figure counts where it was measured on a GPU of the cluster; of what a probe has no figure, nothing is said. Rates of
single tests become quantities of the model by undoing what it adds to them: a product of T rows on a width h reached
``share / ((1 + tokens/T) (1 + width/h))``. Its real steps are measured rows like others and need no undoing. They are
factors of a cluster, so that rows of one cluster can teach something of another where both are probed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workloads.predict.layouts import CALIBRATED_AT
from workloads.predict.parameters import TIME
from workloads.spec.cluster import ClusterSpec

Row = Mapping[str, Any]
"""A figure with the columns of `results.tables.probes.COLUMNS`."""
LONG = 4096
"""Tokens from which a product says something of large ones."""
WIDEST = 3.0
"""A quantity that a probe would move by more than so many of its spreads stays where it is: the test went wrong."""

LAUNCH_S = 49e-6
"""Seconds to launch one operation (`workloads.measuring.host_pace`) on a host for which this engine's times hold. From
one to another of fourteen hosts of H100 and H200 the host's part of a step grew nearly as its square
(docs/accuracy.md)."""
IN_A_PROBE = 0.84
"""What a layer takes the host in a real step, over what it takes in a probe: the middle of five hosts. For probes that
have no figure of launches."""


def probed(rows: Sequence[Row], cluster: ClusterSpec) -> dict[str, float]:
    """Of `workloads.predict.points.Points`, ``world_measured`` and ``intra_measured`` in B/s, and of the host its
    ``launch`` or, where the probe has no such figure, its ``pace``; and ``matmul``, a factor on the device's peak. A
    name is missing where the probe has no figure.

    ``rows``: of one probe of the cluster; those of CPU processes say nothing.
    """
    rows = [row for row in rows if row["backend"] == "cuda" and row["value"] > 0]
    launch = _launch(rows)
    found = {"matmul": _matmul(rows, cluster), "launch": launch, "pace": None if launch else _pace(rows)}
    near = {name: factor for name, factor in found.items() if factor is not None and not _went_wrong(name, factor)}
    return {**near, **_rates(rows)}


def _went_wrong(name: str, factor: float) -> bool:
    power = TIME["host_launch"].value if name == "launch" else 1.0
    return abs(power * math.log(factor)) > WIDEST * TIME[_SPREAD_OF[name]].spread


_SPREAD_OF = {"matmul": "matmul", "launch": "host", "pace": "host"}
"""The quantity that a factor moves."""


def _matmul(rows: Sequence[Row], cluster: ClusterSpec) -> float | None:
    """The share of peak of a layer's products, one after another (their FLOPs over their seconds), over the default."""
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
    """How many times as long as usual the host's part takes, before any fit, where a launch takes ``launch`` times as
    long."""
    pace: float = launch ** TIME["host_launch"].value
    return pace


def _launch(rows: Sequence[Row]) -> float | None:
    """Of the slowest rank's host, as rows of attempts have it, over `LAUNCH_S`."""
    found = [row["value"] for row in _of(rows, "host", name="launch")]
    return max(found) / LAUNCH_S if found else None


def _pace(rows: Sequence[Row]) -> float | None:
    """Seconds to issue a layer, forward and backward, in all cases that were tested, over what the general values of
    the model say, so that a factor of one is the same host for every code base."""
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
"""Tests of the host, and the quantities of the model that add up to what each takes."""
_WAYS = ("forward", "backward")


def _rates(rows: Sequence[Row]) -> dict[str, float]:
    """Bus bandwidth of the largest all-reduce inside a node, and of that over all devices of several."""
    found = {}
    for name, placement in (("intra_measured", "inside_node"), ("world_measured", "mixed")):
        calls = [row for row in _of(rows, "collective", name="all_reduce", placement=placement) if row["bytes"]]
        calls = [row for row in calls if (row["group_size"] or 0) > 1]
        if calls:
            row = max(calls, key=lambda one: (one["group_size"], one["bytes"]))
            n = row["group_size"]
            found[name] = 2 * (n - 1) / n * row["bytes"] / row["value"]
    return found


def _of(rows: Iterable[Row], kind: str, **fields: Any) -> list[Row]:
    wanted = {"kind": kind, **fields}
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]
