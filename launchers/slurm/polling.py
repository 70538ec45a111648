"""How often a run on Slurm polls squeue and the sweep's files: often after a change, then less and less."""

from __future__ import annotations

import time

SQUEUE_S, SLOWEST_SQUEUE_S = 2.0, 60.0
"""Minimum and maximum seconds between two calls of squeue."""
FILES_S, SLOWEST_FILES_S = 1.0, 5.0
"""Minimum and maximum seconds between two reads of the sweep's files."""
_SLOWER = 1.4
_SIGNAL_S = 0.2


class PollTimer:
    """Timer for the next poll. ``period_s`` is the pause between two polls."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self.period_s = shortest_s
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._next_at = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next_at

    def left_s(self) -> float:
        """Seconds until the next poll."""
        return max(0.0, self._next_at - time.monotonic())

    def polled(self, *, changed: bool) -> None:
        """Call this after every poll, with whether anything had changed."""
        self.period_s = self._shortest_s if changed else min(self._longest_s, self.period_s * _SLOWER)
        self._next_at = time.monotonic() + self.period_s


def squeue_timer() -> PollTimer:
    return PollTimer(SQUEUE_S, SLOWEST_SQUEUE_S)


def files_timer() -> PollTimer:
    return PollTimer(FILES_S, SLOWEST_FILES_S)


def sleep_until_signal(seconds: float, signals: list[int]) -> None:
    """Sleep, or return early when ``signals`` grows (see `launchers.interrupts.interrupts`)."""
    until, known = time.monotonic() + seconds, len(signals)
    while time.monotonic() < until and len(signals) == known:
        time.sleep(min(_SIGNAL_S, max(0.0, until - time.monotonic())))
