"""A clock that gives the time of day but never jumps, so that differences of its readings are durations. No torch
here."""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since the epoch: by the system's clock when this object is made, by the monotonic clock from then on.

    So the difference of two readings of one object is the true duration, even if somebody has set the system's clock in
    between. Readings of two objects may differ by the error of the system's clock.
    """

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()
