"""Learns from Slurm's refusals how many pilots a user may have at the same time.

Sites limit the jobs of a user or an account. The number of pilots at a refusal is remembered as the limit. Until some
of those pilots have ended, one more pilot is tried only from time to time.
"""

from __future__ import annotations

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 1800.0


class JobQuota:
    """The known limit. Counts are of a sweep's own pilots, of all shapes."""

    def __init__(self) -> None:
        self._most: int | None = None
        """Number of existing pilots when Slurm last refused one more; None without a current refusal."""
        self._ask_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def full(self) -> bool:
        """Whether Slurm has refused one more pilot, and has not accepted one since."""
        return self._most is not None

    def allowed(self, wanted: int, existing: int, now: float) -> int:
        """How many of the ``wanted`` pilots to submit now. ``now``: seconds of a monotonic clock."""
        if self._most is None:
            return wanted
        probe = 1 if now >= self._ask_at else 0
        return min(wanted, max(0, self._most - existing) + probe)

    def refused(self, existing: int, now: float) -> bool:
        """Record that Slurm refused one pilot in addition to the ``existing`` ones. True for the first refusal."""
        first = self._most is None
        self._most = existing
        self._ask_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return first

    def accepted(self, existing: int) -> None:
        """Record that Slurm accepted pilots, so that ``existing`` ones are in the queue or running."""
        if self._most is not None and existing > self._most:
            self._most, self._pause_s = None, _FIRST_PAUSE_S
