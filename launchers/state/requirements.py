"""What a point needs of an allocation: nodes, devices of each node, and wall time."""

from __future__ import annotations

import math

from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import Point
from workloads.stages import rehearsed_ranks

START_UP_S = 30.0
"""Allowance for start, build and warm-up when judging whether a point fits what is left of the wall time."""


def nodes_needed(point: Point, devices_per_node: int) -> int:
    """Nodes that the point runs on; a rehearsal runs on one device."""
    return math.ceil(point.experiment.world_size / devices_per_node) if point.method == "measured" else 1


def devices_used(point: Point, settings: LaunchSettings) -> int:
    """Devices of each node that the point uses at a time."""
    return min(point.experiment.world_size, settings.num_devices) if point.method == "measured" else 1


def needed_s(point: Point, settings: LaunchSettings) -> float:
    """Wall time that the point should be given: its predicted steps with room, never more than its deadline."""
    return expected_s(point, settings, room=1.5)


def expected_s(point: Point, settings: LaunchSettings, room: float = 1.0) -> float:
    """How long a point should take: its start and ``room`` times its predicted steps; its deadline where nothing is
    predicted, and never more than that."""
    deadline_s = settings.point_deadline_s or point.deadline_s
    if point.predicted_step_time_s is None:
        return deadline_s
    steps = settings.measure.warmup_steps + settings.measure.timed_steps
    ranks = len(rehearsed_ranks(point.experiment)) if point.method != "measured" else 1
    return min(deadline_s, ranks * (START_UP_S + room * steps * point.predicted_step_time_s))
