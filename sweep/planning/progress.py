"""Shows the progress of a long plan: one moving line on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_FIRST_S = 2.0
"""Seconds before the first report; a shorter plan prints nothing."""
_EVERY_S = 10.0
"""Seconds between two lines if there is no terminal."""


class PlanProgress:
    """A `sweep.grids.walk.Progress` on standard error, to be used in a ``with`` statement."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._next = clock() + _FIRST_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if now < self._next:
            return
        if self._stream.isatty():
            self._move(what, done, total)
            return
        self._next = now + _EVERY_S
        share = f" ({100 * done / total:.0f} %)" if total else ""
        print(f"planning: {done:,} of {total:,} {what}{share}", file=self._stream, flush=True)

    def _move(self, what: str, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()
        self._bar.update(self._task, description=what, completed=done, total=total)
