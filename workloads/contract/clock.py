"""A clock that tells the time of day but never jumps, for times from which durations are made. No torch here."""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since the epoch: by the system's clock when this object is made, by the monotonic clock from then on.

    So two readings of one object are as far apart as they were in truth, although somebody may have set the system's
    clock between them. Readings of two objects may differ by what the system's clock was off.
    """

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()
