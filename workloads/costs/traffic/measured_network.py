"""A cluster whose collectives between nodes have been timed by a probe: their seconds are read from the measurements
instead of the alpha-beta model (`workloads.costs.traffic.collectives`).

A network need not follow two numbers: through NCCL's sockets, for example, a message twice as long can take three times
as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workloads.spec.cluster import ClusterSpec

Key = tuple[str, int, int]
"""Operation, number of ranks, ranks in each node."""
Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes in bytes and their seconds, ascending."""
_PLACEMENTS = ("between_nodes", "mixed")
_OPS = {"p2p": "send_recv"}
"""Names of operations in a probe, where they differ from those of `workloads.costs.traffic.collectives.Collective`."""


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """Seconds of operations between nodes by size."""

    curves: Mapping[Key, Curve]
    nodes: int
    """Number of nodes that the probe spanned."""

    def seconds(self, op: str, bytes: float, ranks: int, local: int) -> float | None:
        """Seconds of an operation on ``bytes`` (as `collective_time_s` counts them) in a group of ``ranks``, ``local``
        of them in each node; None if no such group was timed.

        Between two sizes the time is interpolated linearly; below the smallest size it is that of the smallest, above
        the largest it grows in proportion.
        """
        curve = self.curves.get((_OPS.get(op, op), ranks, local))
        if curve is None:
            return None
        sizes, times = curve
        if bytes > sizes[-1]:
            return times[-1] * bytes / sizes[-1]
        return float(np.interp(bytes, sizes, times))

    def rate(self, op: str, ranks: int, local: int) -> tuple[float, float] | None:
        """(seconds of the smallest size, bytes per second of the largest size) of an operation; None if it was not
        timed."""
        curve = self.curves.get((_OPS.get(op, op), ranks, local))
        return None if curve is None else (curve[1][0], curve[0][-1] / curve[1][-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedCluster(ClusterSpec):
    """A cluster with a measured network."""

    network: MeasuredNetwork


def network_of(rows: Iterable[Mapping[str, Any]], devices_per_node: int) -> MeasuredNetwork | None:
    """The network in a probe's rows (`results.tables.probes.COLUMNS`); None if it did not span several nodes."""
    points: dict[Key, dict[float, float]] = {}
    nodes = 0
    for row in rows:
        if row["kind"] != "collective" or row["placement"] not in _PLACEMENTS or row["backend"] != "cuda":
            continue
        ranks, size, seconds = row["group_size"] or 0, row["bytes"] or 0, row["value"]
        local = 1 if row["placement"] == "between_nodes" else devices_per_node
        if ranks > local and size > 0 and seconds > 0:
            points.setdefault((row["name"], ranks, local), {})[float(size)] = float(seconds)
            nodes = max(nodes, ranks // local)
    if not points:
        return None
    curves: dict[Key, Curve] = {}
    for key, by_size in points.items():
        sizes = sorted(by_size)
        curves[key] = tuple(sizes), tuple(_non_decreasing([by_size[size] for size in sizes]))
    return MeasuredNetwork(curves, nodes)


def _non_decreasing(seconds: Sequence[float]) -> list[float]:
    """Seconds by ascending size, lowered to those of larger messages where these were faster: other load only makes
    times longer."""
    times = list(seconds)
    for at in reversed(range(len(times) - 1)):
        times[at] = min(times[at], times[at + 1])
    return times
