"""How many pilots of which shape a queue deserves. Plain arithmetic on points: no files, no Slurm."""

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
    """What waits, by shape (nodes of a pilot), and what no pilot of these options could run."""

    points: Mapping[int, list[Point]] = field(default_factory=dict)
    pilots: Mapping[int, int] = field(default_factory=dict)
    """How many pilots of each shape should be there (those that run or wait already count)."""
    too_wide: int = 0
    """Points that need more nodes than ``max_nodes``."""
    too_long: int = 0
    """Points that need more time than a pilot has."""
    longest_s: float = 0.0
    """What the longest of those needs."""


def demand_of(points: Iterable[Point], settings: LaunchSettings, options: SlurmOptions) -> Demand:
    """Sort ``points`` by shape and count the pilots: as many as finish the expected work in the time aimed at."""
    shapes: dict[int, list[Point]] = defaultdict(list)
    too_wide, too_long = 0, [0.0]
    for point in points:
        nodes = nodes_needed(point, settings.num_devices)
        if options.max_nodes is not None and nodes > options.max_nodes:
            too_wide += 1
        elif needed_s(point, settings) > options.usable_s:
            too_long.append(needed_s(point, settings))
        else:
            shapes[nodes].append(point)
    return Demand(
        points=dict(sorted(shapes.items(), reverse=True)),
        pilots={nodes: _pilots(nodes, shapes[nodes], settings, options) for nodes in sorted(shapes, reverse=True)},
        too_wide=too_wide,
        too_long=len(too_long) - 1,
        longest_s=max(too_long),
    )


def _pilots(nodes: int, points: list[Point], settings: LaunchSettings, options: SlurmOptions) -> int:
    aim_s = float(options.usable_s)
    if options.target_h is not None:
        aim_s = min(aim_s, options.target_h * 3600)
    work_s = sum(expected_s(point, settings) for point in points)
    count = min(max(1, math.ceil(work_s / aim_s)), len(points))
    if options.max_pilots is not None:
        count = min(count, options.max_pilots)
    if options.max_nodes is not None:
        count = min(count, options.max_nodes // nodes)
    return count
