"""Progress of a report: one line that is updated on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

_EVERY_S = 5.0
"""Shortest time between two lines when the output is not a terminal, in seconds."""


class ReportProgress:
    """Permanent lines (`say`), and one line that the next figure replaces (`step`)."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last = clock()
        # Refreshed on request, not by a thread: figures are drawn in forked processes, which have no threads.
        self._line = Live(
            console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def say(self, text: str) -> None:
        self.clear()
        self._print(text)

    def step(self, done: int, total: int, what: str) -> None:
        """Report that ``done`` of ``total`` figures are drawn; ``what`` names the last one."""
        text = f"figure {done} of {total}: {what}"
        if self._console.is_terminal:
            self._line.start()
            self._line.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._clock() - self._last >= _EVERY_S:
            self._last = self._clock()
            self._print(text)

    def clear(self) -> None:
        """Remove the line of `step`."""
        self._line.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
