"""A cluster whose collectives between nodes have been timed by a probe: their seconds are read from the measurements
instead of the alpha-beta model (`workloads.costs.traffic.collectives`).

A network need not follow two numbers: through NCCL's sockets, for example, a message twice as long can take three times
as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_INSTEAD = {"send": "send_recv"}
"""Operations that stand for those which older probes did not time."""


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """Seconds of operations between nodes by size."""

    curves: Mapping[Key, Curve]
    nodes: int
    """Number of nodes that the probe spanned."""
    beside: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Slowdown of a matrix product during a collective, and of a collective during products, by number of ranks and
    ranks in each node; no entry: not measured."""

    def seconds(self, op: str, bytes: float, ranks: int, local: int) -> float | None:
        """Seconds of an operation on ``bytes`` (as `collective_time_s` counts them) in a group of ``ranks``, ``local``
        of them in each node; None if no such group was timed.

        Between two sizes the time is interpolated linearly; below the smallest size it is that of the smallest, above
        the largest it grows in proportion. The operation ``send`` is one way, ``p2p`` both ways at once.
        """
        curve = self.curves.get((_OPS.get(op, op), ranks, local))
        if curve is None and op in _INSTEAD:
            curve = self.curves.get((_INSTEAD[op], ranks, local))
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

    def over_moments(self, rates: Sequence[float], bytes: int) -> MeasuredNetwork:
        """The network as it was over several moments: the probe's, and those at which other processes reached these bus
        bandwidths (B/s) in all-reduces of ``bytes`` between one rank of each node.

        Processes reach different rates, from one moment to the next and with their connections: the times of all
        operations are multiplied by the mean time of these all-reduces over the probe's.
        """
        probed = self.seconds("all_reduce", bytes, self.nodes, 1)
        if probed is None or not rates:
            return self
        moved = 2 * (self.nodes - 1) / self.nodes * bytes
        slower = statistics.fmean([1.0, *(moved / rate / probed for rate in rates)])
        curves = {
            key: (sizes, tuple(slower * seconds for seconds in times)) for key, (sizes, times) in self.curves.items()
        }
        return replace(self, curves=curves)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedCluster(ClusterSpec):
    """A cluster with a measured network."""

    network: MeasuredNetwork


def network_of(rows: Iterable[Mapping[str, Any]], devices_per_node: int) -> MeasuredNetwork | None:
    """The network in a probe's rows (`results.tables.probes.COLUMNS`); None if it did not span several nodes."""
    points: dict[Key, dict[float, list[float]]] = {}
    slowdowns: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    nodes = 0
    for row in rows:
        if row["placement"] not in _PLACEMENTS or row["backend"] != "cuda":
            continue
        ranks, size, value = row["group_size"] or 0, row["bytes"] or 0, row["value"]
        local = 1 if row["placement"] == "between_nodes" else devices_per_node
        if ranks <= local or size <= 0 or value <= 0:
            continue
        if row["kind"] == "collective":
            points.setdefault((row["name"], ranks, local), {}).setdefault(float(size), []).append(float(value))
            nodes = max(nodes, ranks // local)
        elif row["kind"] == "interference":
            of_compute, of_traffic = slowdowns.setdefault((ranks, local), ([], []))
            (of_compute if row["name"] == "compute" else of_traffic).append(max(1.0, float(value)))
    if not points:
        return None
    curves: dict[Key, Curve] = {}
    for key, by_size in points.items():
        sizes = sorted(by_size)
        curves[key] = tuple(sizes), tuple(_non_decreasing([statistics.fmean(by_size[size]) for size in sizes]))
    beside = {key: _paying(*both) for key, both in slowdowns.items() if all(both)}
    return MeasuredNetwork(curves, nodes, beside)


def _paying(of_compute: Sequence[float], of_traffic: Sequence[float]) -> tuple[float, float]:
    """Mean slowdown of compute and of traffic; of traffic at most that which makes both together as slow as one after
    the other."""
    compute, traffic = statistics.fmean(of_compute), statistics.fmean(of_traffic)
    return compute, min(traffic, compute / (compute - 1)) if compute > 1 else traffic


def _non_decreasing(seconds: Sequence[float]) -> list[float]:
    """Seconds by ascending size, lowered to those of larger messages where these were faster: other load only makes
    times longer."""
    times = list(seconds)
    for at in reversed(range(len(times) - 1)):
        times[at] = min(times[at], times[at + 1])
    return times
