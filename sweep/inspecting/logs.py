"""``logs``: prints the last log lines of the ranks and the pilot of a point's newest attempt."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launchers.state import history, pilot_state
from launchers.state.history import AttemptRecord
from launchers.state.submissions import log_dir, token_of_pilot
from launchers.state.sweep_dir import SweepDir, entry_names, key_of
from results.errors import InvalidResults
from results.shared_filesystem import packed_folder
from results.tables.store import shipped_sweep_dirs, sweep_dirs
from results.text.log_tail import read_tail
from sweep.inspecting.lookup import Results
from workloads.contract.protocol import log_path, read_attempt_json
from workloads.contract.typed import LATEST

_RANKS = 8
"""Number of ranks whose logs are shown if none is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    sweep: SweepDir
    folder: Path
    about: dict[str, Any]
    """Content of ``attempt.json``; empty if it cannot be read."""
    record: AttemptRecord | None
    """None while it runs, or if its pilot died."""

    @property
    def started_at(self) -> float:
        value = self.about.get("started_at")
        return float(value) if isinstance(value, (int, float)) and 0 <= value <= LATEST else 0.0


def print_logs(path: Path, word: str, console: Console, *, rank: int | None, lines: int) -> None:
    """Print the logs of the newest attempt at the point whose id is ``word`` or contains it.

    Raises `InvalidResults` if no point or several have such an id, or if the point has no attempt.
    """
    attempt = _newest(path, word)
    _print_line(console, _headline(attempt))
    if attempt.record is not None and attempt.record.evidence:
        for line in attempt.record.evidence.splitlines():
            _print_line(console, f"  {line}")
    logs = _rank_logs(attempt.folder)
    if rank is not None and rank not in logs:
        known = f"it has logs of ranks {min(logs)} to {max(logs)}" if logs else "it has none"
        raise InvalidResults(f"{attempt.folder} has no log of rank {rank}; {known}")
    shown = [rank] if rank is not None else _choose(logs, attempt.record)
    for number in shown:
        _print_tail(console, f"rank {number}", log_path(attempt.folder, number), lines)
    if rank is None:
        if len(logs) > len(shown):
            _print_line(
                console, f"... and {len(logs) - len(shown):,} more in {packed_folder.home(attempt.folder)} (--rank N)"
            )
        for log in _pilot_logs(attempt):
            _print_tail(console, "pilot", log, lines)


def _newest(path: Path, word: str) -> _Attempt:
    by_experiment: dict[str, list[tuple[SweepDir, Path]]] = {}
    waiting: set[str] = set()
    for folder in sweep_dirs(path):
        sweep = SweepDir.open(folder)
        for attempt in packed_folder.folders(sweep.attempts) if sweep.attempts.is_dir() else []:
            if word and word in attempt.name:
                by_experiment.setdefault(attempt.name.rpartition(".a")[0] or attempt.name, []).append((sweep, attempt))
        if not sweep.archived:
            waiting |= {key for name in entry_names(sweep.todo) if word and word in (key := key_of(name))}
    if word in by_experiment:
        by_experiment = {word: by_experiment[word]}
    if len(by_experiment) > 1:
        first = next(iter(by_experiment))
        raise InvalidResults(f"{word!r} is part of {len(by_experiment):,} ids in {path}, e.g. {first}; give more of it")
    if not by_experiment:
        if waiting:
            raise InvalidResults(f"{min(waiting)} waits in the queue and has not run yet")
        raise InvalidResults(f"no attempt in {path} has an id that contains {word!r}{_hint(path, word)}")
    candidates = [_read(sweep, folder) for sweep, folder in next(iter(by_experiment.values()))]
    return max(candidates, key=lambda attempt: attempt.started_at)


def _hint(path: Path, word: str) -> str:
    """End of a message: an archived sweep that has rows of the point, or the hint that ``explain`` finds points."""
    for folder in dict.fromkeys([*sweep_dirs(path), *shipped_sweep_dirs(path)]):
        if (
            word
            and SweepDir.open(folder).archived
            and (matching_ids := [id for id in Results(folder).ids() if word in id])
        ):
            command = shlex.join(["python", "-m", "sweep", "explain", matching_ids[0], "--results", str(folder)])
            return f"; {folder} has its rows but no logs, see {command}"
    return " (python -m sweep explain finds points)"


def _read(sweep: SweepDir, folder: Path) -> _Attempt:
    try:
        about = read_attempt_json(folder / "attempt.json")
    except (OSError, ValueError):
        about = {}
    names = [path.name for path in sweep.history.glob(f"*@{folder.name}.json")]
    records = history.read_records(sweep, names)
    return _Attempt(
        sweep=sweep,
        folder=folder,
        about=about if isinstance(about, dict) else {},
        record=records[0] if records else None,
    )


def _headline(attempt: _Attempt) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started_at)) if attempt.started_at else "?"
    nodes = attempt.about.get("nodes") or []
    on = f" on {', '.join(map(str, nodes))}" if isinstance(nodes, list) and nodes else ""
    record = attempt.record
    if record is None:
        return f"{attempt.folder.name}: not ended, started {started}{on}"
    what = f"{record.outcome} in {record.phase}" if record.outcome != "ok" and record.phase else record.outcome
    return f"{attempt.folder.name}: {what} after {record.duration_s:.0f} s, started {started}{on}"


def _rank_logs(folder: Path) -> dict[int, int]:
    """Bytes of each rank's log, by rank. Raises `InvalidResults` where the attempt's files are damaged."""
    try:
        sizes = packed_folder.sizes(folder)
    except ValueError as error:
        raise InvalidResults(str(error)) from None
    return {int(found[1]): size for name, size in sizes.items() if (found := re.fullmatch(r"rank_(\d+)\.log", name))}


def _choose(logs: dict[int, int], record: AttemptRecord | None) -> list[int]:
    """The ranks to show: the failed one, then the first ranks with any output, then others."""
    failed = record.failed_rank if record is not None else None
    order = sorted(logs, key=lambda rank: (rank != failed, logs[rank] == 0, rank))
    return order[:_RANKS]


def _pilot_logs(attempt: _Attempt) -> list[Path]:
    """The log of the attempt's pilot. Under Slurm this is the log of the job's first node."""
    pilot_id = attempt.record.pilot_id if attempt.record is not None else attempt.about.get("pilot_id")
    if not isinstance(pilot_id, str) or "/" in pilot_id:
        return []
    token = token_of_pilot(pilot_id)
    if token is None:
        path = pilot_state.log_path(attempt.sweep, pilot_id)
        return [path] if path.is_file() else []
    state = pilot_state.read_state(attempt.sweep, pilot_id)
    folder = log_dir(attempt.sweep.path, token)
    if state is None or state.job is None or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(f"{state.job}_"))[:1]


def _print_tail(console: Console, what: str, path: Path, count: int) -> None:
    try:
        lines, whole = read_tail(path, count)
    except OSError as error:
        _print_line(console, f"--- {what}: {path}: {error.strerror}")
        return
    extent = f" (last {len(lines)} lines)" if not whole else "" if lines else " (empty)"
    _print_line(console, f"--- {what}: {packed_folder.home(path.parent) / path.name}{extent}")
    for line in lines:
        _print_line(console, line)


def _print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
