"""How far a report is: one line that renews itself on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Protocol

_EVERY_S = 5.0
"""Elsewhere than on a terminal, at most one line in this time."""


class Stream(Protocol):
    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class Progress:
    """Lines that stay (`say`) and the one that does not (`step`)."""

    def __init__(self, stream: Stream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()
        self._last = clock()

    def say(self, text: str) -> None:
        self.clear()
        self._write(text + "\n")

    def step(self, done: int, total: int, what: str) -> None:
        text = f"figure {done} of {total}: {what}"
        if self._terminal:
            # A line as wide as the terminal would wrap, and then only its second half be renewed.
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[2K{text[:width]}")
        elif self._clock() - self._last >= _EVERY_S:
            self._last = self._clock()
            self._write(text + "\n")

    def clear(self) -> None:
        """Take away the line of `step`."""
        if self._terminal:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
