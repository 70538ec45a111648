"""Computes how many pilots of how many nodes a sweep's points need, without files and without Slurm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launchers.settings import LaunchSettings
from launchers.slurm.options import SlurmOptions
from launchers.state.requirements import expected_s, needed_s, nodes_needed
from launchers.state.sweep_dir import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Waiting points by shape (nodes of a pilot), and counts of points that no pilot with these options can run."""

    points: Mapping[int, list[Point]] = field(default_factory=dict)
    pilots: Mapping[int, int] = field(default_factory=dict)
    """Needed pilots by shape, including those that already run or wait."""
    too_wide: int = 0
    """Points that need more nodes than ``max_nodes``."""
    too_long: int = 0
    """Points that need more time than a pilot may use."""
    longest_s: float = 0.0
    """Seconds that the longest of the ``too_long`` points needs."""


def demand_of(points: Iterable[Point], settings: LaunchSettings, options: SlurmOptions) -> Demand:
    """Group ``points`` by shape and count the pilots of each: as many as needed to finish within ``target_h``, or
    within one time limit where that is shorter or ``target_h`` is not given."""
    shapes: dict[int, list[Point]] = defaultdict(list)
    too_wide, long_s = 0, list[float]()
    for point in points:
        nodes = nodes_needed(point, settings.num_devices)
        if options.max_nodes is not None and nodes > options.max_nodes:
            too_wide += 1
        elif needed_s(point, settings) > options.usable_s:
            long_s.append(needed_s(point, settings))
        else:
            shapes[nodes].append(point)
    return Demand(
        points=dict(sorted(shapes.items(), reverse=True)),
        pilots={nodes: _pilots(nodes, shapes[nodes], settings, options) for nodes in sorted(shapes, reverse=True)},
        too_wide=too_wide,
        too_long=len(long_s),
        longest_s=max(long_s, default=0.0),
    )


def _pilots(nodes: int, points: list[Point], settings: LaunchSettings, options: SlurmOptions) -> int:
    target_s = float(options.usable_s)
    if options.target_h is not None:
        target_s = min(target_s, options.target_h * 3600)
    work_s = sum(expected_s(point, settings) for point in points)
    count = min(max(1, math.ceil(work_s / target_s)), len(points))
    if options.max_pilots is not None:
        count = min(count, options.max_pilots)
    if options.max_nodes is not None:
        count = min(count, options.max_nodes // nodes)
    return count
