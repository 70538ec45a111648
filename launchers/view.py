"""How a running sweep is shown: a live view in a terminal, one line an attempt everywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launchers.outcome import where
from launchers.pilotstate import Running
from launchers.settle import describe
from launchers.status import SweepStatus

_SHOWN = 5
_COLOURS = {"ok": "green", "cancelled": "yellow", "preempted": "yellow", "oom": "magenta"}


class View(Protocol):
    """Shows one status after another between ``__enter__`` and ``__exit__``."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, status: SweepStatus) -> None: ...

    def say(self, line: str) -> None: ...


class PlainView:
    """One line for each attempt that ends, and for whatever holds a pilot up."""

    def __init__(self, already_shown: set[str], console: Console | None = None) -> None:
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._shown = already_shown
        self._messages: dict[str, str] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, status: SweepStatus) -> None:
        fresh = [record for record in status.attempts if record.attempt_id not in self._shown]
        finished = status.finished - sum(not record.will_retry for record in fresh)
        for record in fresh:
            self._shown.add(record.attempt_id)
            finished += not record.will_retry
            self.say(f"[{max(0, finished)}/{status.total}] {describe(record)}")
        for pilot in status.pilots:
            if pilot.message and self._messages.get(pilot.pilot_id) != pilot.message:
                self.say(pilot.message)
            self._messages[pilot.pilot_id] = pilot.message

    def say(self, line: str) -> None:
        self._console.print(Text(line))


class LiveView:
    """What runs, what is left, when it should end, and the failures by kind."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, status: SweepStatus) -> None:
        self._live.update(picture(status))

    def say(self, line: str) -> None:
        self._console.print(Text(line))


def picture(status: SweepStatus) -> Group:
    """The live view of one status."""
    head = Table.grid(padding=(0, 2))
    counts = Text(f"{status.finished}/{status.total} points")
    for outcome, number in sorted(status.done.items(), key=lambda item: (item[0] != "ok", -item[1])):
        counts.append(f"  {outcome} {number}", style=_COLOURS.get(outcome, "red"))
    head.add_row(
        Text(status.name, style="bold"),
        ProgressBar(total=max(1, status.total), completed=status.finished, width=30),
        counts,
        Text(_time_left(status)),
    )
    parts: list[Table | Text] = [head]
    for pilot in status.pilots:
        parts.append(Text(_running(pilot.running, time.time()) if pilot.running else f"  pilot: {pilot.activity}"))
        if pilot.message:
            parts.append(Text(f"  {pilot.message}", style="bold red"))
    for record in status.attempts[-_SHOWN:]:
        line = Text(f"  {describe(record)}", no_wrap=True, overflow="ellipsis")
        line.stylize(_COLOURS.get(record.outcome, "red"), 2, 2 + len(record.outcome))
        parts.append(line)
    return Group(*parts)


def span(seconds: float) -> str:
    """A length of time for people: ``42 s``, ``3 min``, ``2 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _time_left(status: SweepStatus) -> str:
    if status.left == 0:
        return "done"
    if status.expected_left_s is None:
        return f"{status.left} left"
    end = time.localtime(time.time() + status.expected_left_s)
    stamp = time.strftime("%H:%M" if status.expected_left_s < 20 * 3600 else "%a %H:%M", end)
    return f"{status.left} left, about {span(status.expected_left_s)}, until {stamp}"


def _running(running: Running, now: float) -> str:
    spent = f"{now - running.started_at:.0f} s of at most {running.deadline_s:.0f} s"
    return f"  runs {running.experiment_id} on {running.world_size}: {where(running.phase, running.step)}, {spent}"
