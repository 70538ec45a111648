"""How long a pilot's points may still run: until the end of its allocation, less the time of the warning.

A job's time limit runs from the start of the job, which may be minutes before the pilot's own start (setup lines, a
container that is unpacked), and a site may change the limit later. So the batch system is asked, more than once. Where
it cannot be asked, the limit given at the submission counts from the start of the job as the batch file noted it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from results.text.numbers import format_duration

ASK_EVERY_S = 120.0
"""Seconds between two questions to the batch system. Each pilot asks, so the interval is long."""
_CHANGE_S = 60.0
"""A new end that differs by more than this many seconds from the known one is reported."""


class AllocationEnd:
    """Knows when the points of one pilot must have ended."""

    def __init__(
        self,
        usable_s: float | None,
        age_s: float,
        reserve_s: float,
        ask: Callable[[], float | None] | None,
        report: Callable[[str], None],
    ) -> None:
        """``usable_s``: seconds from the job's start that points may use by the limit at submission; None: no limit.
        ``age_s``: seconds since the job's start. ``reserve_s``: seconds before the end of the allocation by which the
        points must have ended. ``ask`` returns the seconds that the batch system still gives the job, or None.
        ``report`` takes a line for the pilot's log.
        """
        self._ends_at = time.monotonic() + usable_s - age_s if usable_s is not None else None
        self._reserve_s, self._ask, self._report = reserve_s, ask, report
        self._ask_at = 0.0

    def left_s(self) -> float | None:
        """Seconds that points may still use, negative when the time is over; None without a limit."""
        if self._ask is not None and time.monotonic() >= self._ask_at:
            allowed_s = self._ask()
            self._ask_at = time.monotonic() + ASK_EVERY_S
            if allowed_s is not None:
                self._set(allowed_s - self._reserve_s)
        return self._ends_at - time.monotonic() if self._ends_at is not None else None

    def _set(self, left_s: float) -> None:
        ends_at = time.monotonic() + left_s
        before, self._ends_at = self._ends_at, ends_at
        if before is not None and abs(ends_at - before) > _CHANGE_S and math.isfinite(ends_at):
            expected = format_duration(max(0.0, before - ends_at + left_s))
            self._report(f"points may run for {format_duration(max(0.0, left_s))} by the job's limit, not {expected}")
