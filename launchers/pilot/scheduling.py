"""Chooses the point that a pilot runs next: points as wide as its allocation first, then narrower ones side by side.

A point must fit the time that is left. Its shape is the number of nodes that it needs. A repeat goes to nodes where its
layout has not run yet, if possible: each pilot first takes points whose layouts it has not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from launchers.node.remote import Node
from launchers.settings import LaunchSettings
from launchers.state import queue
from launchers.state.circuit_breaker import CircuitBreaker, kind_of, paused_message
from launchers.state.history import HistoryReader, damage
from launchers.state.queue import Claim, QueueReader
from launchers.state.requirements import needed_s, nodes_needed
from launchers.state.sweep_dir import Point, SweepDir
from results.text.numbers import format_duration, plural


class Scheduler:
    """Claims points of the sweep's queue for one pilot."""

    def __init__(
        self,
        sweep: SweepDir,
        pilot_id: str,
        settings: LaunchSettings,
        records: HistoryReader,
        report: Callable[[str], None],
    ) -> None:
        """``records`` is refreshed at every claim. ``report`` takes a line for the pilot's log."""
        self.waits_for_canary = False
        """Whether the last claim skipped points because the first point of their shape still runs."""
        self._sweep = sweep
        self._settings = settings
        self._report = report
        self._reader = QueueReader(sweep, pilot_id, report)
        self._breaker = CircuitBreaker(settings.breaker_failures)
        self._records = records
        self._reported: set[str] = set()
        """Paused kinds that have already been logged."""
        self._damaged = 0
        """Number of records that cannot be read at the last report of them."""
        self._paused = 0
        """Number of points of paused kinds at the last claim."""
        self._too_long = ""
        """Why points that would fit the nodes do not fit the time that is left; empty when there are none."""
        self._too_long_s = math.inf
        """Least seconds that such a point needs."""

    @property
    def files_read(self) -> tuple[int, int]:
        """Numbers of points and of records whose files have been read."""
        return self._reader.files_read, self._records.files_read

    def claim_next(
        self, free: int, nodes: Collection[str], left_s: float | None, running: Sequence[Point]
    ) -> Claim | None:
        """Claim the next point; None when no point fits.

        ``free``: how many of the pilot's ``nodes`` are free. ``left_s``: seconds until the allocation ends; None: it
        does not end. ``running``: the points that this pilot runs now. Raises `OSError`; a point may have been claimed
        then.
        """
        self._records.refresh()
        if len(self._records.damaged) > self._damaged:
            self._damaged = len(self._records.damaged)
            self._report(damage(self._records.damaged))
        self._breaker.update(self._sweep, self._records.all())
        self._report_paused()
        self.waits_for_canary = False
        claim = self._reader.claim_next(lambda waiting: self._choose(waiting, free, nodes, left_s, running))
        if claim is not None and (shape := self._shape(claim.point)) not in self._breaker.proven:
            # Two pilots may have claimed at the same moment: the pilot with the earlier point goes first.
            rivals = [p for p in self._reader.claimed_by_others() if self._shape(p) == shape]
            if any(rival.index < claim.point.index for rival in rivals):
                queue.release(claim)
                self.waits_for_canary = True
                return None
        return claim

    def waiting_for(self, least: int, most: int) -> int:
        """Number of waiting points that need ``least`` to ``most`` nodes."""
        return sum(
            point.method == self._settings.method and least <= self._shape(point) <= most
            for point in self._reader.waiting()
        )

    def choose_nodes(self, claim: Claim, free: Sequence[Node]) -> list[Node]:
        """The nodes on which to run the point. Nodes where the point or its layout ran before come last."""
        tried = {node for record in self._records.of(claim.stem) for node in record.nodes} | {*claim.point.ran_on}
        return sorted(free, key=lambda node: node.name in tried)[: self._shape(claim.point)]

    def why_waiting(self) -> str:
        """Why points wait that this pilot does not claim; empty when there are none."""
        paused = paused_message(self._breaker.paused, self._paused) if self._paused else ""
        return "; ".join(part for part in (paused, self._too_long) if part)

    def leaves_points_for(self, whole_s: float) -> bool:
        """Whether a point waits that does not fit the time that is left, and would fit ``whole_s``, the time of a job
        that starts anew."""
        return self._too_long_s <= whole_s

    def _shape(self, point: Point) -> int:
        return nodes_needed(point, self._settings.num_devices)

    def _choose(
        self,
        waiting: list[Point],
        free: int,
        nodes: Collection[str],
        left_s: float | None,
        running: Sequence[Point],
    ) -> Iterable[Point]:
        size = len(nodes)
        fitting = [p for p in waiting if p.method == self._settings.method and self._shape(p) <= size]
        if left_s is not None:
            needs = {point.stem: needed_s(point, self._settings) for point in fitting}
            too_long = [needed for needed in needs.values() if needed > left_s]
            self._too_long, self._too_long_s = _too_long(too_long, left_s), min(too_long, default=math.inf)
            fitting = [point for point in fitting if needs[point.stem] <= left_s]
        paused = self._breaker.paused
        allowed = [p for p in fitting if kind_of(p.experiment, self._shape(p)) not in paused] if paused else fitting
        self._paused = len(fitting) - len(allowed)
        ready = sorted(self._past_canary(allowed, running), key=lambda p: self._ran_here(p, nodes))
        widest = [point for point in ready if self._shape(point) == size]
        if widest:  # they run alone: no other point starts while they wait for all nodes
            return widest if free == size else []
        return sorted((p for p in ready if self._shape(p) <= free), key=lambda p: -self._shape(p))

    def _ran_here(self, point: Point, nodes: Collection[str]) -> bool:
        """Whether the point can only run on a set of nodes that includes one where its layout ran before."""
        return len(set(nodes).difference(point.ran_on)) < self._shape(point)

    def _past_canary(self, points: list[Point], running: Sequence[Point]) -> list[Point]:
        """``points`` without those of an unproven shape that already has a running point, here or elsewhere."""
        shapes = {self._shape(point) for point in points} - self._breaker.proven
        if not shapes:
            return points
        in_flight = {self._shape(point) for point in [*running, *self._reader.claimed_by_others()]} & shapes
        if not in_flight:
            return points
        self.waits_for_canary = True
        return [point for point in points if self._shape(point) not in in_flight]

    def _report_paused(self) -> None:
        for kind, why in self._breaker.paused.items():
            if kind not in self._reported:
                self._reported.add(kind)
                self._report(f"paused: {kind}: {why}")


def _too_long(needs: Sequence[float], left_s: float) -> str:
    """A sentence about points that need more seconds than are left; empty without such points."""
    if not needs:
        return ""
    need, more = ("needs", "") if len(needs) == 1 else ("need", " or more")
    least, left = format_duration(min(needs)), format_duration(max(0.0, left_s))
    points = plural(len(needs), "point")
    return f"{points} {need} {least}{more}, and this job has {left} left for points (launcher.time_min)"
