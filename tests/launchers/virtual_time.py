"""Virtual time: several programs run as threads of one process, one at a time, and every sleep ends at once.

The clock advances only when every program sleeps, to the time at which the first of them wakes. So a run of an hour
takes as long as its computations, gives the same result again, and does not depend on how busy the machine is.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class VirtualTime:
    """The clock, and the threads that share it."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._sleeping: list[tuple[float, int, threading.Semaphore]] = []
        self._order = itertools.count()
        self._over = threading.Semaphore(0)
        self._errors: list[BaseException] = []

    def run(self, *programs: Callable[[], None]) -> None:
        """Run the programs until all have ended. Raises the first error of one of them."""
        for program in programs:
            own = threading.Semaphore(0)
            threading.Thread(target=self._program, args=(program, own), daemon=True).start()
            self._add(0.0, own)
        self._wake_first()
        self._over.acquire()
        if self._errors:
            raise self._errors[0]

    def sleep(self, seconds: float) -> None:
        """Sleep in the calling program; the others run meanwhile."""
        until = self.now + max(0.0, seconds)
        if not self._sleeping or until < self._sleeping[0][0]:
            self.now = until
            return
        own = threading.Semaphore(0)
        self._add(until, own)
        self._wake_first()
        own.acquire()

    def _program(self, program: Callable[[], None], own: threading.Semaphore) -> None:
        own.acquire()
        try:
            program()
        except BaseException as error:
            self._errors.append(error)
        self._wake_first()

    def _add(self, time: float, sleeper: threading.Semaphore) -> None:
        heapq.heappush(self._sleeping, (time, next(self._order), sleeper))

    def _wake_first(self) -> None:
        if not self._sleeping or self._errors:
            self._over.release()
            return
        self.now, _, sleeper = heapq.heappop(self._sleeping)
        sleeper.release()


class VirtualEvent(threading.Event):
    """An event that is waited for in virtual time. Only the waiting program and its own steps set it."""

    longest_s = 0.5
    """Most seconds by which a wait is longer than its caller asks, if nothing happens meanwhile: programs that look
    many times a second change threads less often."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self.next_at = 0.0
        """When something happens, as far as is known."""
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``timeout`` seconds, or longer (`longest_s`); not at all if the event is set."""
        if not self.is_set():
            assert timeout is not None
            self._clock.sleep(max(timeout, min(self.next_at - self._clock.now, self.longest_s)))
        return self.is_set()
