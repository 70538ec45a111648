"""What a point needs of an allocation: nodes, devices on each node, and wall time."""

from __future__ import annotations

import math

from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import Point
from workloads.contract.stages import rehearsed_ranks

START_UP_S = 30.0
"""Seconds allowed for start, build and warm-up when it is decided whether a point still fits into the wall time."""


def nodes_needed(point: Point, devices_per_node: int) -> int:
    """Number of nodes that the point runs on. A rehearsal runs on one device."""
    return math.ceil(point.experiment.world_size / devices_per_node) if point.method == "measured" else 1


def devices_used(point: Point, settings: LaunchSettings) -> int:
    """Number of devices on each node that the point uses at a time."""
    return min(point.experiment.world_size, settings.num_devices) if point.method == "measured" else 1


def needed_s(point: Point, settings: LaunchSettings) -> float:
    """Wall time to reserve for the point, in seconds: 1.5 times what is predicted for its steps, never more than its
    deadline."""
    return expected_s(point, settings, room=1.5)


def expected_s(point: Point, settings: LaunchSettings, room: float = 1.0) -> float:
    """How long the point should take, in seconds: its start-up and ``room`` times its predicted steps. Its deadline
    where nothing is predicted, and never more than that."""
    deadline_s = settings.point_deadline_s or point.deadline_s
    if point.predicted_step_time_s is None:
        return deadline_s
    steps = settings.measure.steps_of(point.predicted_step_time_s)
    ranks = len(rehearsed_ranks(point.experiment)) if point.method != "measured" else 1
    return min(deadline_s, ranks * (START_UP_S + room * steps * point.predicted_step_time_s))
