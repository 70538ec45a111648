"""The allocation that a point needs: nodes, devices on each node, and wall time."""

from __future__ import annotations

import math

from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import Point
from workloads.contract.stages import rehearsed_ranks

START_UP_S = 30.0
"""Seconds reserved for start, build and warm-up in the check whether a point still fits into the wall time."""


def nodes_needed(point: Point, devices_per_node: int) -> int:
    """Number of nodes that the point runs on. A rehearsal runs on one device."""
    return math.ceil(point.experiment.world_size / devices_per_node) if point.method == "measured" else 1


def devices_used(point: Point, settings: LaunchSettings) -> int:
    """Number of devices on each node that the point uses at the same time."""
    return min(point.experiment.world_size, settings.num_devices) if point.method == "measured" else 1


def needed_s(point: Point, settings: LaunchSettings) -> float:
    """Wall time to reserve for the point, in seconds: its start-up and 1.5 times its predicted steps, at most its
    deadline."""
    return expected_s(point, settings, room=1.5)


def expected_s(point: Point, settings: LaunchSettings, room: float = 1.0) -> float:
    """Expected duration of the point in seconds: its start-up and ``room`` times its predicted steps, at most its
    deadline. Without a prediction its deadline."""
    deadline_s = settings.point_deadline_s or point.deadline_s
    if point.predicted_step_time_s is None:
        return deadline_s
    steps = settings.measure.steps_of(point.predicted_step_time_s)
    ranks = len(rehearsed_ranks(point.experiment)) if point.method != "measured" else 1
    return min(deadline_s, ranks * (START_UP_S + room * steps * point.predicted_step_time_s))
