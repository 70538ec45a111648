"""Shows a running sweep: a live view in a terminal, one line for each attempt elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launchers.attempt.outcome import where
from launchers.state.history import AttemptRecord, describe, rate_of
from launchers.state.pilot_state import Running
from launchers.status.status import SweepStatus
from launchers.status.work_left import ShapeStatus
from results.text.numbers import format_bytes, format_duration, format_hours, plural, short_id
from results.text.terminal import open_console, plain_table

_MOST_ATTEMPTS, _MOST_RUNNING = 5, 8
"""Maximum numbers of attempts and of running points in the live view."""
_SILENT_S, _STILL_S = 5.0, 30.0
"""Seconds without a line after which the plain view prints the stage of a rehearsal: a new one, or still the same."""
_COLOURS = {"ok": "green", "cancelled": "yellow", "preempted": "yellow", "oom": "magenta"}


class StatusView(Protocol):
    """Shows one status after another between ``__enter__`` and ``__exit__``."""

    def __enter__(self) -> StatusView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, status: SweepStatus) -> None: ...

    def print_line(self, line: str) -> None: ...


def choose_view(live: bool | None, status: SweepStatus) -> StatusView:
    """The live view or the plain one. ``live`` is None: live if standard output is a terminal. ``status``: the plain
    view does not show attempts that are already in it."""
    live = sys.stdout.isatty() if live is None else live
    return LiveView() if live else PlainView({record.attempt_id for record in status.attempts}, status.finished)


class PlainView:
    """One line for each attempt that ends, for each message of a blocked pilot, and for the stages of a rehearsal that
    takes longer than seconds."""

    def __init__(
        self,
        already_shown: set[str],
        finished: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or open_console(soft_wrap=True)
        self._shown = already_shown
        self._finished = finished
        """Points that had ended at the last line, which each line of a last attempt raises by one; None: not known yet.
        It is counted here because a point moves only after its attempt is recorded."""
        self._messages: dict[str, str] = {}
        self._clock = clock
        self._said_at = clock()
        self._said = ""
        """Position of the rehearsal in the last line."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, status: SweepStatus) -> None:
        fresh = [record for record in status.attempts if record.attempt_id not in self._shown]
        if self._finished is None:
            self._finished = max(0, status.finished - sum(not record.will_retry for record in fresh))
        for record in fresh:
            self._shown.add(record.attempt_id)
            self._finished += not record.will_retry
            self.print_line(f"[{self._finished}/{status.total}] {describe(record)}")
        for pilot in status.pilots:
            if pilot.message and self._messages.get(pilot.pilot_id) != pilot.message:
                self.print_line(pilot.message)
            self._messages[pilot.pilot_id] = pilot.message
        self._show_stages(status)

    def _show_stages(self, status: SweepStatus) -> None:
        """Print where the oldest running rehearsal is, if nothing was printed for a while."""
        running = [one for pilot in status.pilots for one in pilot.running if one.part]
        if not running:
            return
        one = min(running, key=lambda one: one.started_at)
        position = f"{one.part}, {where(one.phase, one.step)}"
        silent_s = self._clock() - self._said_at
        if silent_s < (_SILENT_S if position != self._said else _STILL_S):
            return
        self._said = position
        spent_s = max(0.0, time.time() - one.started_at)
        self.print_line(f"[{self._finished}/{status.total}] {position} after {spent_s:.0f} s  {one.experiment_id}")

    def print_line(self, line: str) -> None:
        self._said_at = self._clock()
        self._console.print(Text(line), highlight=False)


class LiveView:
    """Running and remaining points, the expected end, and the last attempts, redrawn continuously."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or open_console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, status: SweepStatus) -> None:
        self._live.update(render_status(status, self._console.width))

    def print_line(self, line: str) -> None:
        self._console.print(Text(line))


def render_status(status: SweepStatus, width: int) -> Group:
    """One status as shown by the live view, in ``width`` characters: numbers first, then ids as far as they fit."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        _line(status.name, "bold"),
        ProgressBar(total=max(1, status.total), completed=status.finished, width=max(10, min(30, width // 4))),
        Text(f"{status.finished:,}/{status.total:,} points"),
    )
    counts = Text(_time_left(status))
    for outcome, number in sorted(status.done.items(), key=lambda item: (item[0] != "ok", -item[1])):
        counts.append(f"  {outcome} {number:,}", style=_COLOURS.get(outcome, "red"))
    parts: list[RenderableType] = [head, counts]
    if len(status.shapes) > 1:
        parts.append(shape_table(status))
    running = sorted(
        ((one, pilot.elapsed_s(one)) for pilot in status.pilots for one in pilot.running), key=lambda one: -one[1]
    )
    parts += [_line(_running(one, elapsed_s, width)) for one, elapsed_s in running[:_MOST_RUNNING]]
    if len(running) > _MOST_RUNNING:
        parts.append(Text(f"  ... and {len(running) - _MOST_RUNNING:,} more points"))
    idle = Counter(pilot.activity for pilot in status.pilots if not pilot.running)
    parts += [Text(f"  {_pilots(count)}: {activity}") for activity, count in idle.items()]
    messages = Counter(pilot.message for pilot in status.pilots if pilot.message)
    for message, count in messages.most_common(_MOST_RUNNING):
        parts.append(Text(f"  {_pilots(count)}: {message}" if count > 1 else f"  {message}", style="bold red"))
    for record in status.attempts[-_MOST_ATTEMPTS:]:
        parts += _attempt(record, width)
    return Group(*parts)


def shape_table(status: SweepStatus) -> Table:
    """Points by the shape of their allocations."""
    table = plain_table(show_footer=len(status.shapes) > 1)
    shapes = status.shapes
    failed = [sum(count for outcome, count in one.done.items() if outcome != "ok") for one in shapes]
    left = [one.device_hours_left for one in shapes]
    columns: list[tuple[str, list[str], str]] = [
        ("shape", [_shape(one) for one in shapes], "total"),
        ("points", [f"{one.total:,}" for one in shapes], f"{sum(one.total for one in shapes):,}"),
        ("waiting", [f"{one.waiting:,}" for one in shapes], f"{sum(one.waiting for one in shapes):,}"),
        ("running", [f"{one.running:,}" for one in shapes], f"{sum(one.running for one in shapes):,}"),
        ("ok", [f"{one.done.get('ok', 0):,}" for one in shapes], f"{status.done.get('ok', 0):,}"),
        ("not ok", [f"{count:,}" for count in failed], f"{sum(failed):,}"),
        ("device-h", [format_hours(one.device_hours) for one in shapes], format_hours(status.device_hours)),
        (
            "left",
            [format_hours(value) for value in left],
            format_hours(None if None in left else sum(value or 0.0 for value in left)),
        ),
    ]
    for at, (name, _, footer) in enumerate(columns):
        table.add_column(name, footer, justify="right" if at else "left")
    for row in zip(*(cells for _, cells, _ in columns), strict=True):
        table.add_row(*row)
    return table


def _time_left(status: SweepStatus) -> str:
    if status.left == 0:
        return "done"
    if status.expected_left_s is None:
        return f"{status.left} left"
    end = time.localtime(time.time() + status.expected_left_s)
    stamp = time.strftime("%H:%M" if status.expected_left_s < 20 * 3600 else "%a %H:%M", end)
    return f"{status.left} left, about {format_duration(status.expected_left_s)}, until {stamp}"


def _shape(shape: ShapeStatus) -> str:
    devices = plural(shape.devices, "device")
    return devices if shape.nodes is None else f"{plural(shape.nodes, 'node')}, {devices}"


def _pilots(count: int) -> str:
    return plural(count, "pilot") if count > 1 else "pilot"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _running(running: Running, elapsed_s: float, width: int) -> str:
    spent = f"{elapsed_s:.0f} s of at most {running.deadline_s:.0f} s"
    ranks = plural(running.world_size, "rank")
    part = f"{running.part} " if running.part else ""
    start = f"  runs        {part}{where(running.phase, running.step)}, {spent}, {ranks}  "
    return start + short_id(running.experiment_id, width - len(start))


def _attempt(record: AttemptRecord, width: int) -> list[Text]:
    """Outcome, speed, memory and time of one attempt, its id, and for a failure the first line of its evidence."""
    peak = format_bytes(record.peak_allocated_bytes, 2) if record.peak_allocated_bytes is not None else ""
    numbers = [text for text in (rate_of(record), peak, f"{record.duration_s:.1f} s") if text]
    again = "  tried again" if record.will_retry else ""
    start = f"  {record.outcome:<12}{'  '.join(numbers)}{again}  "
    line = _line(start + short_id(record.experiment_id, width - len(start)))
    line.stylize(_COLOURS.get(record.outcome, "red"), 2, 2 + len(record.outcome))
    if record.outcome == "ok" or not record.evidence:
        return [line]
    return [line, _line(f"              {record.evidence.splitlines()[0]}")]
