"""How many pilots Slurm lets a user have at a time, learned from its refusals.

Sites limit the jobs of a user or an account. What fitted when Slurm refused one more is remembered: until some of those
pilots have ended, it is asked again only now and then, and for one pilot.
"""

from __future__ import annotations

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 1800.0


class JobQuota:
    """The limit as far as it is known. Counts are of a sweep's own pilots, of all shapes."""

    def __init__(self) -> None:
        self._most: int | None = None
        """How many there were when Slurm last refused one more; None while it refuses none."""
        self._ask_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def full(self) -> bool:
        """Slurm has refused one more, and has not taken one more since."""
        return self._most is not None

    def allowed(self, wanted: int, there: int, now: float) -> int:
        """How many of ``wanted`` pilots to submit when ``there`` are some. ``now``: seconds of a monotonic clock."""
        if self._most is None:
            return wanted
        probe = 1 if now >= self._ask_at else 0
        return min(wanted, max(0, self._most - there) + probe)

    def refused(self, there: int, now: float) -> bool:
        """Slurm has refused one pilot beside the ``there`` that are there. True if it had not refused before."""
        first = self._most is None
        self._most = there
        self._ask_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return first

    def accepted(self, there: int) -> None:
        """Slurm has taken pilots, so that ``there`` are some now."""
        if self._most is not None and there > self._most:
            self._most, self._pause_s = None, _FIRST_PAUSE_S
