"""``status`` and ``retry``: where sweeps stand, and putting failed points back.

Everything is read from the sweep's files; where pilots were submitted to Slurm and Slurm answers, its word is shown
beside theirs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launchers.attempt.outcome import where
from launchers.slurm.client import Job, jobs_of
from launchers.state import circuit_breaker, node_exclusions
from launchers.state.pilot_state import PilotState, Running
from launchers.state.submissions import all_submissions
from launchers.state.sweep_dir import SweepDir, entry_names, key_of
from launchers.status.status import SweepStatus, retry, sweep_status
from launchers.status.view import shape_table
from results.errors import InvalidResults
from results.schema import OUTCOMES
from results.store import sweep_dirs
from results.text import format_duration, format_hours
from sweep.grid import suggest

SETTLED = ("ok", "oom")
"""Outcomes that another try would only repeat."""
_ROWS, _SLOWEST, _EVIDENCE = 12, 3, 200
"""Rows of the longer tables; points called slow; characters of a failure's evidence."""


def print_status(path: Path, console: Console) -> None:
    """A line for each sweep below ``path``; for a single one all that is known. Raises `InvalidResults` for none."""
    sweeps = [SweepDir.open(folder) for folder in sweep_dirs(path)]
    if len(sweeps) == 1:
        _print_one(sweeps[0], console)
        return
    table = _table("sweep", "points", "done", "failed", "running", "waiting", "device-h", "left", "expected end")
    for sweep in sweeps:
        status, _ = _look(sweep)
        failed = sum(count for outcome, count in status.done.items() if outcome != "ok")
        left = [shape.device_hours_left for shape in status.shapes]
        table.add_row(
            _cell(str(sweep.path)),
            *(f"{n:,}" for n in (status.total, status.finished, failed, status.claimed, status.todo)),
            format_hours(status.device_hours),
            format_hours(None if None in left else sum(value or 0.0 for value in left)),
            _expected_end(status),
        )
    console.print(table)


def check_outcomes(words: Iterable[str]) -> None:
    """Raises `InvalidResults` for a word that is no outcome."""
    for word in words:
        if word not in OUTCOMES:
            raise InvalidResults(f"--outcome {word}: no such outcome{suggest(word, OUTCOMES)}")


def retry_points(path: Path, which: Sequence[str]) -> int:
    """Put finished points back into the queue of the sweep in ``path``; how many.

    ``which``: outcomes, ids or parts of ids that only one point has; none: every outcome but those of `SETTLED`. What
    the breaker holds may be tried again, too: whoever retries has mended something.
    """
    sweep = SweepDir.open(path)
    if not which:
        wanted = [outcome for outcome in OUTCOMES if outcome not in SETTLED]
    else:
        keys = [key_of(name) for folder in (sweep.todo, sweep.claimed, sweep.done) for name in entry_names(folder)]
        wanted = [word if word in OUTCOMES else _one_key(word, keys, path) for word in which]
    circuit_breaker.resume(sweep)
    return retry(sweep, wanted)


def _one_key(word: str, keys: Sequence[str], path: Path) -> str:
    matches = [word] if word in keys else [key for key in keys if word and word in key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InvalidResults(f"{word!r} is part of {len(matches)} ids in {path}, e.g. {matches[0]}; give more of it")
    raise InvalidResults(
        f"{word!r} is neither an outcome ({', '.join(OUTCOMES)}) nor a part of the id of one of the {len(keys)} points "
        f"in {path}"
    )


def _look(sweep: SweepDir) -> tuple[SweepStatus, list[Job] | None]:
    """The status, and the jobs of the sweep's pilots; None when Slurm does not answer."""
    jobs: list[Job] | None = []
    names = None
    if any(submission.open for submission in all_submissions(sweep)):
        jobs = jobs_of(sweep)
        names = {job.name for job in jobs if job.alive} if jobs is not None else None
    return sweep_status(sweep, names), jobs


def _print_one(sweep: SweepDir, console: Console) -> None:
    def say(line: str, style: str = "") -> None:
        console.print(Text(_plain(line), style=style), soft_wrap=True)

    status, jobs = _look(sweep)
    say(f"{sweep.path}: {status.finished:,} of {status.total:,} points have ended; {_expected_end(status)}")
    told = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(status.done.items(), key=lambda i: -i[1]))
    if told:
        say(f"outcomes: {told}")
    if status.shapes:
        console.print()
        console.print(shape_table(status))
    if jobs is None or (jobs and status.left) or status.pilots:
        console.print()
    if jobs is None or (jobs and status.left):
        say(_describe_jobs(jobs))
    if rows := _pilot_rows(status.pilots, jobs or []):
        _print_rows(console, _table("pilot", "Slurm says", "nodes", "does"), rows, "pilots")
    running = [one for pilot in status.pilots for one in pilot.running]
    if running:
        console.print()
        table = _table("running", "devices", "phase", "for", "at most", "on")
        _print_rows(console, table, _running_rows(running), "running points")
    if slow := status.slowest(_SLOWEST):
        console.print()
        table = _table("slowest points", "devices", "took", "outcome")
        for record in slow:
            table.add_row(
                _cell(record.experiment_id),
                f"{record.world_size:,}",
                format_duration(record.duration_s),
                record.outcome,
            )
        console.print(table)
    notes = [
        f"left out: {one.node} until {_at(one.until)}: {one.reason}" for one in node_exclusions.excluded(sweep).values()
    ]
    notes += [f"held: {kind}: {why}" for kind, why in circuit_breaker.paused_kinds(sweep, status.attempts).items()]
    failures = [
        f"{record.outcome}: {record.experiment_id} in {record.phase}: {(record.evidence or '')[:_EVIDENCE]}"
        for record in status.failures()
    ]
    if notes or failures:
        console.print()
    for line in notes:
        say(line, "yellow")
    for line in failures:
        say(line)


def _describe_jobs(jobs: Sequence[Job] | None) -> str:
    """One line about the jobs of a sweep's pilots; None: Slurm does not answer."""
    if jobs is None:
        return "Slurm does not answer; what follows is from the sweep's files"
    alive = [job for job in jobs if job.alive]
    if not alive:
        return "Slurm: no pilot waits or runs"
    states = Counter(job.state.lower() for job in alive)
    reasons = Counter(job.reason for job in alive if job.waiting and job.reason not in ("", "None"))
    why = f" ({', '.join(f'{count} {reason}' for reason, count in reasons.most_common(3))})" if reasons else ""
    told = ", ".join(f"{count} {state}{why if state == 'pending' else ''}" for state, count in states.most_common())
    return f"Slurm: {told}"


def _pilot_rows(pilots: Sequence[PilotState], jobs: Sequence[Job]) -> list[tuple[str, ...]]:
    """Pilots that run, whether or not Slurm knows of them; then jobs whose pilot has not said anything yet."""
    by_name = {job.name: job for job in jobs}
    rows: list[tuple[str, ...]] = []
    for pilot in sorted(pilots, key=lambda pilot: (not pilot.running, pilot.started_at)):
        job = by_name.get(pilot.job or "")
        does = f"runs {len(pilot.running)}" if pilot.running else pilot.activity
        rows.append(
            (
                pilot.job or pilot.pilot_id,
                job.state.lower() if job is not None else "",
                _nodes(job, pilot.nodes),
                f"{does}; {pilot.message}" if pilot.message else does,
            )
        )
    heard = {pilot.job for pilot in pilots}
    starting = [job for job in jobs if job.alive and not job.waiting and job.name not in heard]
    rows += [(job.name, job.state.lower(), _nodes(job, ()), "has not said anything yet") for job in starting]
    return rows


def _running_rows(running: Iterable[Running]) -> list[tuple[str, ...]]:
    now = time.time()
    return [
        (
            one.experiment_id,
            f"{one.world_size:,}",
            where(one.phase, one.step),
            format_duration(max(0.0, now - one.started_at)),
            format_duration(one.deadline_s),
            _nodes(None, one.nodes),
        )
        for one in sorted(running, key=lambda one: one.started_at)
    ]


def _nodes(job: Job | None, nodes: Sequence[str]) -> str:
    if job is not None and job.nodes:
        return job.nodes
    return f"{nodes[0]} + {len(nodes) - 1}" if len(nodes) > 1 else "".join(nodes)


def _print_rows(console: Console, table: Table, rows: Sequence[tuple[str, ...]], what: str) -> None:
    for row in rows[:_ROWS]:
        table.add_row(*(_cell(text) for text in row))
    console.print(table)
    if len(rows) > _ROWS:
        console.print(f"... and {len(rows) - _ROWS:,} more {what}", highlight=False)


def _table(*names: str) -> Table:
    """The first column may be folded; numbers stand to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = {
        "points",
        "done",
        "failed",
        "running",
        "waiting",
        "device-h",
        "left",
        "devices",
        "for",
        "at most",
        "took",
    }
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if at and name in numbers else "left", overflow="fold")
    return table


def _cell(text: str) -> Text:
    return Text(_plain(text), overflow="fold")


def _plain(text: str) -> str:
    """One line, without what a terminal would obey."""
    return "".join(char if char.isprintable() else "�" for char in " ".join(text.split()))


def _at(when: float) -> str:
    return time.strftime("%a %H:%M", time.localtime(when))


def _expected_end(status: SweepStatus) -> str:
    if not status.left:
        return "nothing is left"
    if status.expected_left_s is None:
        return "not begun" if not status.pilots else "end not known yet"
    left = format_duration(status.expected_left_s)
    if not status.pilots:
        return "not begun" if not status.attempts else f"stopped, {left} left"
    return f"{left} left, until {_at(time.time() + status.expected_left_s)}"
