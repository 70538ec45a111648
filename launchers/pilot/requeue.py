"""Requeues a pilot's own job in its batch system, so that the sweep continues even if no command watches it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from launchers.attempt.outcome import StopReason
from launchers.pilot.allocation import Allocation
from launchers.pilot.batch_system import BatchSystem
from launchers.pilot.scheduling import Scheduler
from launchers.state.sweep_dir import SweepDir, entry_names
from results.shared_filesystem.patience import patiently

_END_LIMIT_S = 20.0
"""Seconds that an ending pilot waits for a filesystem that fails."""
FRUITLESS_RESTARTS = 3
"""A pilot that has been restarted this many times and is ended once more before it has finished a point is not
requeued."""


class JobRequeue:
    """Decides at the end of a pilot whether its job shall start again, and asks the batch system for it."""

    def __init__(
        self,
        sweep: SweepDir,
        allocation: Allocation,
        batch: BatchSystem | None,
        scheduler: Scheduler,
        wall_time_s: float | None,
        log: Callable[[str], None],
    ) -> None:
        self._sweep = sweep
        self._allocation = allocation
        self._batch = batch
        self._scheduler = scheduler
        self._wall_time_s = wall_time_s
        self._log = log

    def ask_if_needed(self, stop_reason: StopReason | None, outcomes: Collection[str]) -> None:
        """Ask for a restart if a preemption or the time limit has ended the pilot and points wait, or if the points
        that wait fit a whole job and not the rest of this one. ``outcomes``: those of the points that the pilot has
        finished."""
        job, batch, restarts = self._allocation.job, self._batch, self._allocation.restarts
        if job is None or batch is None or not self._stopped_too_early(stop_reason) or not self.points_wait():
            return
        if restarts >= FRUITLESS_RESTARTS and not set(outcomes) - {"preempted"}:
            self._log(f"job {job} is not requeued: it was ended {restarts + 1} times in a row")
            return
        refused = batch.requeue(self._sweep, self._allocation)
        if refused is None:
            self._log(f"job {job} is requeued: points are left")
        else:
            self._log(f"job {job} is not requeued, points are left: {refused}")

    def points_wait(self) -> bool:
        """Whether any point of the sweep waits; False, with a line in the log, if the queue cannot be read."""
        try:
            return bool(patiently(lambda: entry_names(self._sweep.todo), limit_s=_END_LIMIT_S))
        except OSError as error:
            self._log(f"cannot see whether points wait: {error}")
            return False

    def _stopped_too_early(self, stop_reason: StopReason | None) -> bool:
        """Whether another job in this one's place could go on with the sweep."""
        if stop_reason is not None:
            return stop_reason == "preempted"
        return self._wall_time_s is not None and self._scheduler.leaves_points_for(self._wall_time_s)
