"""Computes how many pilots of how many nodes a sweep's points need, without files and without Slurm."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launchers.settings import LaunchSettings
from launchers.slurm.options import SlurmOptions
from launchers.state.requirements import expected_s, needed_s, nodes_needed
from launchers.state.sweep_dir import Point
from results.text.numbers import format_duration, plural

DEFAULT_NODES = 64
"""Nodes that the pilots of one shape may hold at the same time if no option of the user sets their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Waiting points by shape (nodes of a pilot), and counts of points that no pilot with these options can run."""

    points: Mapping[int, list[Point]] = field(default_factory=dict)
    pilots: Mapping[int, int] = field(default_factory=dict)
    """Needed pilots by shape, including those that already run or wait."""
    capped: Mapping[int, str] = field(default_factory=dict)
    """By shape, a sentence where `DEFAULT_NODES` allows fewer pilots than would finish in time."""
    too_wide: int = 0
    """Points that need more nodes than ``max_nodes``."""
    too_long: int = 0
    """Points that need more time than a pilot may use."""
    longest_s: float = 0.0
    """Seconds that the longest of the ``too_long`` points needs."""


def demand_of(points: Iterable[Point], settings: LaunchSettings, options: SlurmOptions) -> Demand:
    """Group ``points`` by shape and count the pilots of each: as many as needed to finish within ``target_h``, or
    within one time limit where that is shorter or ``target_h`` is not given. Without ``target_h``, ``max_nodes`` and
    ``max_pilots``, the pilots of a shape get at most `DEFAULT_NODES` nodes."""
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
    pilots, capped = dict[int, int](), dict[int, str]()
    for nodes in sorted(shapes, reverse=True):
        wanted = _pilots(nodes, shapes[nodes], settings, options)
        pilots[nodes] = min(wanted, _most(nodes, options))
        if pilots[nodes] < wanted:
            capped[nodes] = _capped(nodes, shapes[nodes], settings, pilots[nodes], wanted)
    return Demand(
        points=dict(sorted(shapes.items(), reverse=True)),
        pilots=pilots,
        capped=capped,
        too_wide=too_wide,
        too_long=len(long_s),
        longest_s=max(long_s, default=0.0),
    )


def _most(nodes: int, options: SlurmOptions) -> int:
    """Largest number of pilots of a shape where no option sets one."""
    given = (options.target_h, options.max_nodes, options.max_pilots)
    return sys.maxsize if any(option is not None for option in given) else max(1, DEFAULT_NODES // nodes)


def _capped(nodes: int, points: list[Point], settings: LaunchSettings, pilots: int, wanted: int) -> str:
    run_s = sum(expected_s(point, settings) for point in points) / pilots
    unknown = sum(point.predicted_step_time_s is None for point in points)
    duration = f"about {format_duration(run_s)}"
    if unknown:
        has = "has" if unknown == 1 else "have"
        duration = (
            f"at most {format_duration(run_s)} ({plural(unknown, 'point')} {has} no predicted time and "
            f"{'counts' if unknown == 1 else 'count'} with the deadline)"
        )
    return (
        f"{plural(len(points), 'point')} of {plural(nodes, 'node')}: {plural(pilots, 'pilot')} at a time, not "
        f"{wanted:,} (by default a shape gets at most {DEFAULT_NODES} nodes); they run for {duration}, their "
        "jobs start again until no point is left; launcher.max_nodes=N or launcher.max_pilots=N sets another limit"
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
