"""``status`` and ``retry``: where sweeps stand, from their files alone, and putting failed points back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launchers.status import SweepStatus, retry, sweep_status
from launchers.sweepdir import SweepDir, entry_names, key_of
from results.errors import InvalidResults
from results.schema import OUTCOMES
from results.store import sweep_dirs

SETTLED = ("ok", "oom")
"""Outcomes that another try would only repeat."""


def print_status(path: Path, console: Console) -> None:
    """A line for each sweep below ``path``, and for a single one its failures too. Raises `InvalidResults` for none."""
    folders = sweep_dirs(path)
    statuses = [sweep_status(SweepDir.open(folder)) for folder in folders]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("sweep")
    for name in ("points", "done", "failed", "running", "waiting", "device-h"):
        table.add_column(name, justify="right")
    table.add_column("expected end")
    for folder, status in zip(folders, statuses, strict=True):
        failed = sum(count for outcome, count in status.done.items() if outcome != "ok")
        table.add_row(
            escape(str(folder)),
            *(f"{n:,}" for n in (status.total, status.finished, failed, status.claimed, status.todo)),
            f"{status.device_hours:.2f}",
            _expected_end(status),
        )
    console.print(table)
    for status in statuses:
        if len(statuses) == 1:
            _print_details(status, console)


def retry_points(path: Path, which: Sequence[str]) -> int:
    """Put finished points back into the queue of the sweep in ``path``; how many.

    ``which``: outcomes, ids or parts of ids that only one point has; none: every outcome but those of `SETTLED`.
    """
    sweep = SweepDir.open(path)
    if not which:
        return retry(sweep, [outcome for outcome in OUTCOMES if outcome not in SETTLED])
    keys = [key_of(name) for folder in (sweep.todo, sweep.claimed, sweep.done) for name in entry_names(folder)]
    return retry(sweep, [word if word in OUTCOMES else _one_key(word, keys, path) for word in which])


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


def _print_details(status: SweepStatus, console: Console) -> None:
    told = ", ".join(f"{outcome} {count}" for outcome, count in sorted(status.done.items()))
    if told:
        console.print(f"outcomes: {told}", highlight=False)
    for pilot in status.pilots:
        running = pilot.running
        at = f": {running.experiment_id} ({running.phase})" if running is not None else ""
        console.print(f"pilot {pilot.pilot_id} {pilot.activity}{escape(at)}", highlight=False)
    for record in status.failures():
        evidence = escape(" ".join((record.evidence or "").split())[:200])
        console.print(f"{record.outcome}: {record.experiment_id} in {record.phase}: {evidence}", highlight=False)


def _expected_end(status: SweepStatus) -> str:
    if not status.left:
        return "finished"
    if status.expected_left_s is None:
        return "not begun" if not status.pilots else "?"
    left = timedelta(seconds=round(status.expected_left_s))
    return f"in {left}" if status.pilots else f"stopped; {left} left"
