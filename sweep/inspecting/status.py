"""``status``: prints the progress of sweeps.

Everything is read from the sweep's files. If pilots were submitted to Slurm and Slurm answers, the state of their jobs
is shown, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launchers.attempt.outcome import where
from launchers.pilot.rebuild import rebuild_lost_rows
from launchers.slurm.client import Job, jobs_of
from launchers.slurm.job_summary import describe_jobs
from launchers.state import circuit_breaker, node_exclusions, submissions
from launchers.state.pilot_state import PilotState
from launchers.state.sweep_dir import SweepDir
from launchers.status.archived import archived_status
from launchers.status.status import StatusReader, SweepStatus
from launchers.status.view import shape_table
from results.errors import InvalidResults
from results.tables.store import only_shipped, sweep_dirs
from results.text.numbers import format_duration, format_hours, plural, short_id
from results.text.printable import one_line
from results.text.terminal import plain_table

_MOST_ROWS, _MOST_SLOW, _EVIDENCE_LENGTH = 12, 3, 200
_WIDE = 100
"""Width of a terminal, in characters, from which the list of sweeps has room for device-hours."""
_NUMBERS = ("points", "done", "failed", "running", "waiting", "device-h", "left", "devices", "for", "at most", "took")
"""Columns that hold numbers."""


def print_status(path: Path, console: Console) -> None:
    """Print one line for each sweep below ``path``, or all details if there is only one.

    Raises `InvalidResults` if there is none.
    """
    sweeps, unread = open_sweeps(path)
    for why in unread:
        _print_line(console, f"not shown: {why}")
    for sweep in sweeps:
        if not sweep.archived and (rebuilt := rebuild_lost_rows(sweep)) is not None:
            _print_line(console, rebuilt)
    if only_shipped(path):
        _print_line(console, f"no sweep of your own in {path} yet; sweeps that ship with the program:")
    if len(sweeps) + len(unread) == 1:
        _print_one(sweeps[0], console)
        return
    hours = console.width >= _WIDE
    columns = (
        "points",
        "done",
        "failed",
        "running",
        "waiting",
        *(("device-h", "left") if hours else ()),
        "expected end",
    )
    table = _make_table(f"sweep in {one_line(str(path))}", *columns)
    for sweep in sweeps:
        status, _ = read_status(sweep)
        failed = sum(count for outcome, count in status.done.items() if outcome != "ok")
        left = [shape.device_hours_left for shape in status.shapes]
        table.add_row(
            _cell(str(sweep.path.relative_to(path))),
            *(f"{n:,}" for n in (status.total, status.finished, failed, status.claimed, status.todo)),
            *((format_hours(status.device_hours), format_hours(_sum_known(left))) if hours else ()),
            _expected_end(sweep, status),
        )
    console.print(table)


def open_sweeps(path: Path) -> tuple[list[SweepDir], list[str]]:
    """The sweeps below ``path``, and one line for each that cannot be read.

    Raises `InvalidResults` if none can be read.
    """
    folders = sweep_dirs(path)
    sweeps, unread = [], []
    for folder in folders:
        try:
            sweeps.append(SweepDir.open(folder))
        except InvalidResults as error:
            if len(folders) == 1:
                raise
            unread.append(str(error))
    if not sweeps:
        raise InvalidResults(unread[0])
    return sweeps, unread


def _sum_known(hours: Sequence[float | None]) -> float | None:
    return None if None in hours else sum(value or 0.0 for value in hours)


def read_status(sweep: SweepDir) -> tuple[SweepStatus, list[Job] | None]:
    """The status, and the jobs of the sweep's pilots: None if Slurm does not answer, empty without submissions."""
    if sweep.archived:
        return archived_status(sweep), []
    jobs: list[Job] | None = []
    names = None
    if any(submission.open for submission in submissions.all_submissions(sweep)):
        jobs = jobs_of(sweep)
        names = {job.name for job in jobs if job.alive} if jobs is not None else None
    reader = StatusReader(sweep)
    status = reader.read(names)
    reader.merge_records()  # for the next call, in a sweep whose pilots were of an older version
    return status, jobs


def _print_one(sweep: SweepDir, console: Console) -> None:
    status, jobs = read_status(sweep)
    counts = f"{status.finished:,} of {status.total:,} points have ended"
    _print_line(console, f"{sweep.path}: {counts}; {_expected_end(sweep, status)}")
    outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(status.done.items(), key=lambda i: -i[1]))
    if outcomes:
        _print_line(console, f"outcomes: {outcomes}")
    if status.shapes:
        console.print()
        console.print(shape_table(status))
    _print_pilots(status, jobs, console)
    if running := _running_rows(status.pilots, console.width):
        console.print()
        table = _make_table("running", "devices", "phase", "for", "at most", "on")
        _print_rows(console, table, running, "running points")
    if slow := status.slowest(_MOST_SLOW):
        console.print()
        table = _make_table("slowest points", "devices", "took", "outcome")
        rows = [
            (_id(r.experiment_id, console.width), f"{r.world_size:,}", format_duration(r.duration_s), r.outcome)
            for r in slow
        ]
        _print_rows(console, table, rows, "points")
    _print_notes(sweep, status, console)


def _print_pilots(status: SweepStatus, jobs: Sequence[Job] | None, console: Console) -> None:
    has_jobs = jobs is None or bool(jobs and status.left)
    if has_jobs or status.pilots:
        console.print()
    if has_jobs:
        source = "; what follows is from the sweep's files" if jobs is None else ""
        _print_line(console, describe_jobs(jobs) + source)
    if rows := _pilot_rows(status.pilots, jobs or []):
        _print_rows(console, _make_table("pilot", "Slurm state", "nodes", "activity"), rows, "pilots")


def _print_notes(sweep: SweepDir, status: SweepStatus, console: Console) -> None:
    """Excluded nodes, paused kinds of points, and the last failure of each outcome."""
    excluded = node_exclusions.excluded(sweep).values()
    paused = circuit_breaker.paused_kinds(sweep, status.attempts)
    notes = [f"excluded: {one.node} until {_at(one.until)}: {one.reason}" for one in excluded]
    notes += [f"paused: {kind}: {why}" for kind, why in paused.items()]
    failures = [
        f"{record.outcome}: {record.experiment_id} in {record.phase}: {(record.evidence or '')[:_EVIDENCE_LENGTH]}"
        for record in status.failures()
    ]
    submitted = [] if sweep.archived else submissions.all_submissions(sweep)
    notes += [line for line in (status.damage, status.damaged_records, submissions.damage(submitted)) if line]
    if notes or failures:
        console.print()
    for line in notes:
        _print_line(console, line, "yellow")
    for line in failures:
        _print_line(console, line)


def _pilot_rows(pilots: Sequence[PilotState], jobs: Sequence[Job]) -> list[tuple[str, ...]]:
    """Active pilots, whether or not Slurm shows their jobs; then jobs whose pilot has not written its state yet."""
    by_name = {job.name: job for job in jobs}
    rows: list[tuple[str, ...]] = []
    for pilot in sorted(pilots, key=lambda pilot: (not pilot.running, pilot.started_at)):
        job = by_name.get(pilot.job or "")
        activity = f"runs {len(pilot.running)}" if pilot.running else pilot.activity
        rows.append(
            (
                pilot.job or pilot.pilot_id,
                job.state.lower() if job is not None else "",
                _nodes(job, pilot.nodes),
                f"{activity}; {pilot.message}" if pilot.message else activity,
            )
        )
    known = {pilot.job for pilot in pilots}
    starting = [job for job in jobs if job.alive and not job.waiting and job.name not in known]
    rows += [(job.name, job.state.lower(), _nodes(job, ()), "has not written its state yet") for job in starting]
    return rows


def _running_rows(pilots: Iterable[PilotState], width: int) -> list[tuple[str, ...]]:
    running = ((one, pilot.elapsed_s(one)) for pilot in pilots for one in pilot.running)
    return [
        (
            _id(one.experiment_id, width),
            f"{one.world_size:,}",
            " ".join(filter(None, (one.part, where(one.phase, one.step)))),
            format_duration(elapsed_s),
            format_duration(one.deadline_s),
            _nodes(None, one.nodes),
        )
        for one, elapsed_s in sorted(running, key=lambda one: -one[1])
    ]


def _id(experiment_id: str, width: int) -> str:
    """The id, shortened for a table of ``width`` characters in which numbers need half of them."""
    return short_id(experiment_id, max(20, width // 2))


def _nodes(job: Job | None, nodes: Sequence[str]) -> str:
    if job is not None and job.nodes:
        return job.nodes
    return f"{nodes[0]} + {len(nodes) - 1}" if len(nodes) > 1 else "".join(nodes)


def _print_rows(console: Console, table: Table, rows: Sequence[tuple[str, ...]], what: str) -> None:
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(_cell(text) for text in row))
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"... and {len(rows) - _MOST_ROWS:,} more {what}", highlight=False)


def _make_table(*names: str) -> Table:
    """A table with these columns; columns of numbers are right-aligned."""
    table = plain_table()
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if at and name in _NUMBERS else "left", overflow="fold")
    return table


def _print_line(console: Console, line: str, style: str = "") -> None:
    console.print(Text(one_line(line), style=style), soft_wrap=True)


def _cell(text: str) -> Text:
    return Text(one_line(text), overflow="fold")


def _at(when: float) -> str:
    return time.strftime("%a %H:%M", time.localtime(when))


def _expected_end(sweep: SweepDir, status: SweepStatus) -> str:
    if sweep.archived:
        return "archived"
    if not status.left:
        return f"{plural(len(status.damaged), 'point')} damaged" if status.damaged else "nothing is left"
    if status.expected_left_s is None:
        return "not begun" if not status.pilots else "end not known yet"
    left = format_duration(status.expected_left_s)
    if not status.pilots:
        return "not begun" if not status.attempts else f"stopped, {left} left"
    return f"{left} left, until {_at(time.time() + status.expected_left_s)}"
