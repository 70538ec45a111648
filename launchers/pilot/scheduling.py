"""Which waiting point a pilot runs next: its own shape first, then what fits beside it, in what is left of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from launchers.node.remote import Node
from launchers.settings import LaunchSettings
from launchers.state import history, queue
from launchers.state.circuit_breaker import CircuitBreaker, kind_of, paused_message
from launchers.state.history import AttemptRecord
from launchers.state.queue import Claim, QueueReader
from launchers.state.requirements import needed_s, nodes_needed
from launchers.state.sweep_dir import Point, SweepDir, entry_names


class Scheduler:
    """Draws for one pilot."""

    def __init__(self, sweep: SweepDir, pilot_id: str, settings: LaunchSettings, report: Callable[[str], None]) -> None:
        self.waits_for_canary = False
        """The last draw left points alone because the first of their shape still runs."""
        self._sweep = sweep
        self._settings = settings
        self._report = report
        self._reader = QueueReader(sweep, pilot_id, report)
        self._breaker = CircuitBreaker(settings.breaker_failures)
        self._records: dict[str, AttemptRecord] = {}
        self._told: set[str] = set()
        self._held = 0

    def records(self) -> list[AttemptRecord]:
        """Every attempt recorded so far, by any pilot."""
        fresh = [name for name in entry_names(self._sweep.history) if name not in self._records]
        for name in fresh:
            for record in history.read_records(self._sweep, [name]):
                self._records[name] = record
        return list(self._records.values())

    def claim_next(self, free: int, size: int, left_s: float | None, running: Sequence[Point]) -> Claim | None:
        """Claim a point for ``free`` of the pilot's ``size`` nodes, ``left_s`` before the allocation ends (None: no
        end), beside those that are ``running``; None when there is nothing for these nodes."""
        self._breaker.update(self._sweep, self.records())
        self._tell_held()
        self.waits_for_canary = False
        claim = self._reader.claim_next(lambda waiting: self._choose(waiting, free, size, left_s, running))
        if claim is not None and (shape := self._shape(claim.point)) not in self._breaker.proven:
            # Two pilots may have drawn at the same moment: the one with the earlier point goes first.
            rivals = [p for p in self._reader.claimed_by_others() if self._shape(p) == shape]
            if any(rival.index < claim.point.index for rival in rivals):
                queue.release(claim)
                self.waits_for_canary = True
                return None
        return claim

    def choose_nodes(self, claim: Claim, free: Sequence[Node]) -> list[Node]:
        """The nodes on which to run the point: others than those where it failed before, if there are enough."""
        tried = {node for record in history.records_of(self._sweep, claim.stem) for node in record.nodes}
        return sorted(free, key=lambda node: node.name in tried)[: self._shape(claim.point)]

    def paused_message(self) -> str:
        """Why points are left that no pilot will draw, empty when there are none."""
        return paused_message(self._breaker.held, self._held) if self._held else ""

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
        held = self._breaker.held
        open_ = [p for p in fitting if kind_of(p.experiment, self._shape(p)) not in held] if held else fitting
        self._held = len(fitting) - len(open_)
        ready = self._past_canary(open_, running)
        own = [point for point in ready if self._shape(point) == size]
        if own:  # wide points go alone: nothing new starts beside them while they wait for their nodes
            return own if free == size else []
        return sorted((p for p in ready if self._shape(p) <= free), key=lambda p: (-self._shape(p), p.index))

    def _past_canary(self, points: list[Point], running: Sequence[Point]) -> list[Point]:
        """Without the points whose shape is not proven and of which one runs already, here or elsewhere."""
        shapes = {self._shape(point) for point in points} - self._breaker.proven
        if not shapes:
            return points
        flying = {self._shape(point) for point in [*running, *self._reader.claimed_by_others()]} & shapes
        if not flying:
            return points
        self.waits_for_canary = True
        return [point for point in points if self._shape(point) not in flying]

    def _tell_held(self) -> None:
        for kind, why in self._breaker.held.items():
            if kind not in self._told:
                self._told.add(kind)
                self._report(f"held back: {kind}: {why}")
