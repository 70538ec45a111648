"""Writes a pilot's state file: its current activity, and a count that shows other processes that the pilot lives."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence

from launchers.attempt.watchdog import Progress
from launchers.pilot.allocation import Allocation
from launchers.pilot.attempt_thread import AttemptThread
from launchers.pilot.node_pool import NodePool
from launchers.state import pilot_state
from launchers.state.pilot_state import Activity, PilotState
from launchers.state.process_identity import own_identity
from launchers.state.sweep_dir import SweepDir

INTERVAL_S = 1.0
"""Maximum seconds between two writes of the file."""
PROGRESS_EVERY_S = 0.5
"""Minimum seconds between two writes for progress of an attempt, which people and the successor of a dead pilot
read."""


class StateWriter:
    """Holds a pilot's current activity. ``message`` says for people why it cannot continue; empty while it can."""

    def __init__(
        self, sweep: SweepDir, allocation: Allocation, pool: NodePool, threads: Sequence[AttemptThread]
    ) -> None:
        """``threads``: the pilot's own list of running attempts, read at every write."""
        self.activity: Activity = "starting"
        self.message = ""
        self.finished: Counter[str] = Counter()
        """Number of recorded attempts of this pilot by outcome."""
        self._sweep = sweep
        self._allocation = allocation
        self._pool = pool
        self._threads = threads
        self._identity = own_identity()
        self._started_at = time.time()
        self._count = 0
        self._written_at = 0.0
        self._written: list[tuple[str, Progress]] = []
        """Progress of the attempts at the last write."""

    def write_if_due(self) -> None:
        """Write if an attempt has made progress, or the interval is over."""
        age_s = time.monotonic() - self._written_at
        if age_s >= INTERVAL_S or (age_s >= PROGRESS_EVERY_S and self._progress() != self._written):
            self.write("running" if self._threads else self.activity, self.message)

    def write(self, activity: Activity, message: str = "") -> None:
        """Write now. Errors while writing are ignored."""
        self.activity, self._count = activity, self._count + 1
        self._written_at, self._written = time.monotonic(), self._progress()
        state = PilotState(
            pilot_id=self._allocation.pilot_id,
            identity=self._identity,
            count=self._count,
            time=time.time(),
            started_at=self._started_at,
            activity=activity,
            message=message,
            running=tuple(thread.running() for thread in self._threads),
            finished=dict(self.finished),
            job=self._allocation.job,
            nodes=self._pool.names,
        )
        # A full disk must not end the pilot. If it lasts, another pilot takes over the claims, and the rows say so.
        with contextlib.suppress(OSError):
            pilot_state.write_state(self._sweep, state)

    def _progress(self) -> list[tuple[str, Progress]]:
        return [(thread.attempt.attempt_id, thread.progress) for thread in self._threads]
