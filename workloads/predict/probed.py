"""What a probe of a cluster says of the quantities of the time model, in the place of their defaults.

A figure counts where it was measured on a GPU of the cluster; what a probe has no figure of keeps its default. Rates of
single tests become quantities by undoing what the model adds to them: a product of T rows on a width h reached
``share / ((1 + tokens/T) (1 + width/h))``. Its real steps are measured rows like others and need no undoing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.cluster import ClusterSpec
from workloads.predict.layouts import CALIBRATED_AT
from workloads.predict.parameters import TIME

Row = Mapping[str, Any]
"""A figure with the columns of `results.probes.COLUMNS`."""
LONG = 4096
"""Tokens from which a product says something of large ones."""
WIDEST = 3.0
"""A quantity that a probe would move by more than so many of its spreads keeps its default: the test went wrong."""


@dataclass(frozen=True, slots=True)
class Probed:
    time: Mapping[str, float] = field(default_factory=dict)
    """Values of `workloads.predict.parameters.TIME`."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """``world_measured`` and ``intra_measured`` of `workloads.predict.points.Points`, B/s."""


def probed(rows: Sequence[Row], cluster: ClusterSpec) -> Probed:
    """``rows``: of one probe of the cluster; those of CPU processes say nothing."""
    rows = [row for row in rows if row["backend"] == "cuda" and row["value"] > 0]
    found = {**_matmul(rows, cluster), **_host(rows)}
    near = {}
    for name, value in found.items():
        default = TIME[name]
        if abs(math.log(value / default.value)) <= WIDEST * default.spread:
            near[name] = value
    return Probed(near, _rates(rows))


def _matmul(rows: Sequence[Row], cluster: ClusterSpec) -> dict[str, float]:
    """The share of peak of a layer's products, one after another: their FLOPs over their seconds."""
    peak, share = cluster.device.peak_of("bf16"), cluster.matmul_efficiency
    products = [row for row in _of(rows, "matmul", tp=1) if (row["rows"] or 0) >= LONG and row["hidden_size"]]
    if not products or peak is None or share is None:
        return {}
    flops = [2.0 * row["rows"] * row["inner"] * row["columns"] for row in products]
    seconds = 0.0
    for row, work in zip(products, flops, strict=True):
        short = (1 + TIME["tokens"].value / row["rows"]) * (1 + TIME["width"].value / row["hidden_size"])
        seconds += work / row["value"] / short
    return {"matmul": sum(flops) / seconds / peak / (share / CALIBRATED_AT)}


def _host(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds to issue a layer, forward and backward, and how many more each choice costs."""

    def layer(**fields: Any) -> float | None:
        parts = [[row["value"] for row in _of(rows, "host", name=f"layer_{way}", **fields)] for way in _WAYS]
        return sum(map(statistics.median, parts)) if all(parts) else None

    plain = {"tp": 1, "zero_stage": 0, "recompute": "none"}
    alone = layer(**plain)
    if alone is None:
        return {}
    found = {"host": alone}
    for name, changed in (
        ("host_tp", {"tp": 2}),
        ("host_zero3", {"zero_stage": 3}),
        ("host_selective", {"recompute": "selective"}),
        ("host_full", {"recompute": "full"}),
    ):
        other = layer(**{**plain, **changed})
        if other is not None and other > alone:
            found[name] = other - alone
    return found


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
