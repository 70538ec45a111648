"""Whether and why a pilot must stop: from signals, and from the pipe to the process that started it."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

from launchers.attempt.outcome import StopReason


class StopRequest:
    """``reason`` is None until the pilot must stop. The first reason counts."""

    def __init__(self, wake: threading.Event, *, stop_with_parent: bool) -> None:
        """``wake`` is set by every signal. ``stop_with_parent``: standard input is a pipe from the parent."""
        self.reason: StopReason | None = None
        self._wake = wake
        self._stop_with_parent = stop_with_parent

    def listen(self) -> None:
        """Handle SIGINT (the user cancels), SIGTERM and SIGUSR2 (the allocation ends) from now on."""
        signal.signal(signal.SIGINT, self._handler("cancelled"))
        signal.signal(signal.SIGTERM, self._handler("preempted"))
        signal.signal(signal.SIGUSR2, self._handler("preempted"))

    def check_parent(self) -> None:
        """Stop when the parent has closed its end of the pipe, or has died."""
        if self.reason is None and self._stop_with_parent and _is_closed(0):
            self.reason = "abandoned"

    def _handler(self, reason: StopReason) -> Callable[[int, object], None]:
        def handler(_number: int, _frame: object) -> None:
            self.reason = self.reason or reason
            self._wake.set()

        return handler


def _is_closed(descriptor: int) -> bool:
    """Whether the other end of a pipe is closed."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 1024) == b""
