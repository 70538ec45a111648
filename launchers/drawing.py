"""Which waiting point a pilot runs next: its own shape first, then what fits beside it, in what is left of the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from launchers import queue
from launchers.gates import Gates, held_message, kind_of
from launchers.nodes import Node
from launchers.queue import AttemptRecord, Claim, Drawer
from launchers.settings import LaunchSettings
from launchers.sweepdir import Point, SweepDir, entry_names
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


class Drawing:
    """Draws for one pilot."""

    def __init__(self, sweep: SweepDir, pilot_id: str, settings: LaunchSettings, report: Callable[[str], None]) -> None:
        self.waits_for_canary = False
        """The last draw left points alone because the first of their shape still runs."""
        self._sweep = sweep
        self._settings = settings
        self._report = report
        self._drawer = Drawer(sweep, pilot_id, report)
        self._gates = Gates(settings.breaker_failures)
        self._records: dict[str, AttemptRecord] = {}
        self._told: set[str] = set()
        self._held = 0

    def records(self) -> list[AttemptRecord]:
        """Every attempt recorded so far, by any pilot."""
        fresh = [name for name in entry_names(self._sweep.history) if name not in self._records]
        for name in fresh:
            for record in queue.read_records(self._sweep, [name]):
                self._records[name] = record
        return list(self._records.values())

    def draw(self, free: int, size: int, left_s: float | None, running: Sequence[Point]) -> Claim | None:
        """Claim a point for ``free`` of the pilot's ``size`` nodes, ``left_s`` before the allocation ends (None: no
        end), beside those that are ``running``; None when there is nothing for these nodes."""
        self._gates.update(self._sweep, self.records())
        self._tell_held()
        self.waits_for_canary = False
        claim = self._drawer.draw(lambda waiting: self._choose(waiting, free, size, left_s, running))
        if claim is not None and (shape := self._shape(claim.point)) not in self._gates.proven:
            # Two pilots may have drawn at the same moment: the one with the earlier point goes first.
            rivals = [p for p in self._drawer.claimed_by_others() if self._shape(p) == shape]
            if any(rival.index < claim.point.index for rival in rivals):
                queue.hand_back(claim)
                self.waits_for_canary = True
                return None
        return claim

    def places(self, claim: Claim, free: Sequence[Node]) -> list[Node]:
        """The nodes on which to run the point: others than those where it failed before, if there are enough."""
        tried = {node for record in queue.history(self._sweep, claim.stem) for node in record.nodes}
        return sorted(free, key=lambda node: node.name in tried)[: self._shape(claim.point)]

    def held_message(self) -> str:
        """Why points are left that no pilot will draw, empty when there are none."""
        return held_message(self._gates.held, self._held) if self._held else ""

    def _shape(self, point: Point) -> int:
        return nodes_needed(point, self._settings.num_devices)

    def _choose(
        self, waiting: list[Point], free: int, size: int, left_s: float | None, running: Sequence[Point]
    ) -> Iterable[Point]:
        fitting = [
            point
            for point in waiting
            if point.method == self._settings.method
            and self._shape(point) <= size
            and (left_s is None or needed_s(point, self._settings) <= left_s)
        ]
        held = self._gates.held
        open_ = [p for p in fitting if kind_of(p.experiment, self._shape(p)) not in held] if held else fitting
        self._held = len(fitting) - len(open_)
        ready = self._past_canary(open_, running)
        own = [point for point in ready if self._shape(point) == size]
        if own:  # wide points go alone: nothing new starts beside them while they wait for their nodes
            return own if free == size else []
        return sorted((p for p in ready if self._shape(p) <= free), key=lambda p: (-self._shape(p), p.index))

    def _past_canary(self, points: list[Point], running: Sequence[Point]) -> list[Point]:
        """Without the points whose shape is not proven and of which one runs already, here or elsewhere."""
        shapes = {self._shape(point) for point in points} - self._gates.proven
        if not shapes:
            return points
        flying = {self._shape(point) for point in [*running, *self._drawer.claimed_by_others()]} & shapes
        if not flying:
            return points
        self.waits_for_canary = True
        return [point for point in points if self._shape(point) not in flying]

    def _tell_held(self) -> None:
        for kind, why in self._gates.held.items():
            if kind not in self._told:
                self._told.add(kind)
                self._report(f"held back: {kind}: {why}")
