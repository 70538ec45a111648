"""``explain --memory``: prints the allocations and frees that lead to a point's peak of device memory."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from results.errors import UltrasweepError
from results.text.numbers import format_bytes
from results.text.terminal import plain_table
from sweep.inspecting.lookup import Record
from workloads.costs.memory.estimate import peak_timeline
from workloads.costs.memory.events import TENSORS, Event, events_of
from workloads.rules.engine_support import is_own
from workloads.rules.layout_rules import layout_violations

_AFTER = 1
"""Number of steps shown after the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEvents:
    """The action in which the fullest pipeline stage peaks, from its start to just after the peak."""

    stage: int
    action: str
    events: tuple[Event, ...]
    peak: int
    """Index of the event after which most bytes are allocated."""


def peak_events(record: Record) -> PeakEvents:
    """The allocations and frees that lead to the peak. Raises `UltrasweepError` for another engine's layout and for one
    that cannot run."""
    e = record.experiment
    if not is_own(e):
        raise UltrasweepError(f"--memory explains the engine ultrasweep, and {record.id} ran on engine={e.engine}")
    if violations := layout_violations(e):
        raise UltrasweepError(f"--memory explains layouts that can run; {record.id}: {violations[0]}")
    stage, timeline, place = peak_timeline(e)
    events = [event for event in events_of(timeline) if event.step <= place + _AFTER]
    peak = max(number for number, event in enumerate(events) if event.step <= place)
    return PeakEvents(stage=stage, action=str(timeline.action), events=tuple(events), peak=peak)


def print_memory(record: Record, console: Console) -> None:
    """Prints `peak_events` as a table, and where the engine makes each tensor."""
    found = peak_events(record)
    events, peak = found.events, found.peak
    table = plain_table(title=f"bytes on stage {found.stage}, {found.action}")
    for name, right in (("unit", False), ("tensor", False), ("allocated", True), ("in all", True), ("", False)):
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    shown = ""
    for number, event in enumerate(events):
        unit = event.unit if event.unit != shown else ""
        shown = event.unit
        mark = "< peak" if number == peak else ""
        table.add_row(unit, TENSORS[event.tensor].name, f"{event.bytes:+,}", f"{event.total:,}", mark)
    console.print(f"[bold]{record.id}[/]", highlight=False)
    console.print(table)
    whole = format_bytes(events[peak].total, 2)
    console.print(f"peak: {whole}; where the engine makes what, in workloads/engine:", highlight=False)
    for key in dict.fromkeys(event.tensor for event in events):
        console.print(f"  {TENSORS[key].name}: {escape(TENSORS[key].made_in)}", highlight=False, soft_wrap=True)
