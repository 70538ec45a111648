"""Rebuilds rows that a sweep's tables have lost (a damaged or deleted file) from the folders of the attempts.

The row of an attempt is written before its record, so a record without a row shows a lost row. A rebuilt row has the
same numbers. Facts that only the pilot knew about the code (commit, versions) are taken from the pilot's config, or
else null. So only lost rows are rebuilt.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from launchers.attempt import loss_check, rows
from launchers.attempt.attempt import Attempt, reopen_attempt
from launchers.pilot.dead_pilots import abandoned
from launchers.pilot.recorder import answered_meanwhile
from launchers.state import pilot_state
from launchers.state.history import AttemptRecord, HistoryReader
from launchers.state.pilot_config import PilotConfig, read_pilot_config
from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point, split_name
from results.errors import InvalidResults
from results.shared_filesystem.whole_files import NotAFile, open_regular, path_of
from results.tables import files, store
from results.text.numbers import listed, plural

_RECORDED = ("outcome", "phase", "phase_step", "failed_rank", "evidence", "infrastructure")
"""Columns of a record that describe how the attempt ended."""
_MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""
_LEAST_BYTES = 12
_ENDING = ".damaged"
"""Suffix of the names under which damaged files are kept."""
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class _Table:
    """Ids of the attempts that have rows in one table."""

    merged_path: Path
    merged: set[str] | None
    """Ids in the merged file; None if that file is damaged."""
    whole: set[str]
    """Ids in readable parts."""
    damaged: dict[str, Path]
    """Damaged parts, by attempt id."""

    @property
    def known(self) -> set[str]:
        return self.whole | (self.merged or set())

    def keep(self, attempt_id: str) -> list[Path]:
        """Rename a damaged part before a new one takes its place. Returns the part's path, if there is one."""
        part = self.damaged.get(attempt_id)
        if part is None:
            return []
        part.replace(_aside(part))
        return [part]

    def move_aside(self) -> list[Path]:
        """Rename a damaged merged file, and damaged parts whose rows the merged file holds, so that readers skip them.
        Returns the renamed files."""
        damaged_paths = [self.merged_path] if self.merged is None else []
        damaged_paths += [part for attempt_id, part in self.damaged.items() if attempt_id in (self.merged or ())]
        for path in damaged_paths:
            path.replace(_aside(path))
        return damaged_paths


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one attempt in both tables."""

    attempt: dict[str, Any]
    steps: list[dict[str, Any]]


def rebuild_lost_rows(sweep: SweepDir) -> str | None:
    """Write the rows of recorded attempts that the tables lack, and move damaged files aside. Returns one line about
    what was done or could not be written; None where nothing was lost, or nothing is left to make rows from."""
    # This order of reads keeps rows from looking lost while pilots work: a row is written before its record, and a part
    # is removed after it is in the merged file.
    try:
        recorded = _recorded(sweep)
        parts = {table: files.part_paths(sweep.path, table) for table in files.SCHEMAS}
        attempts, steps = (_look(sweep, table, parts[table]) for table in files.SCHEMAS)
    except OSError:  # the file system fails temporarily: nothing is known to be lost
        return None
    lost = recorded.keys() - attempts.known
    # An attempt that failed early has no steps, so a missing file proves nothing: only a damaged one does.
    without_steps = lost | (recorded.keys() if steps.merged is None else recorded.keys() & steps.damaged.keys())
    without_steps -= steps.known
    damaged = [table for table in (attempts, steps) if table.merged is None or table.damaged]
    if not lost and not damaged:
        return None
    points = _points(sweep)
    aside: list[Path] = []
    rows_remade = steps_remade = gone = 0
    try:
        records = HistoryReader(sweep)
        records.refresh()
        for attempt_id in sorted(lost | without_steps):
            stem = recorded[attempt_id]
            rebuilt = _rows_of(sweep, points.get(stem), records.of(stem), attempt_id)
            if rebuilt is None:
                gone += 1
                continue
            if attempt_id in without_steps and rebuilt.steps:
                aside += steps.keep(attempt_id)
                store.write_steps(sweep.path, attempt_id, rebuilt.steps)
                steps_remade += attempt_id not in lost
            if attempt_id in lost:
                aside += attempts.keep(attempt_id)
                store.write_attempt(sweep.path, rebuilt.attempt, [])
                rows_remade += 1
        aside += [path for table in damaged for path in table.move_aside()]
    except OSError as error:
        count = plural(len(lost | without_steps), "attempt")
        return f"{sweep.path}: lost rows of {count} could not be rebuilt: {error.strerror or error}"
    return _report_line(sweep, aside, rows_remade, steps_remade, gone) if rows_remade or steps_remade or aside else None


def _report_line(sweep: SweepDir, aside: Sequence[Path], rows_remade: int, steps_remade: int, gone: int) -> str:
    names = listed([str(path.relative_to(sweep.path)) for path in aside])
    why = (
        f"{names} could not be read and {'is' if len(aside) == 1 else 'are'} kept as "
        f"{listed([_aside(path).name for path in aside])}"
        if 0 < len(aside) <= _MOST_NAMES
        else f"{plural(len(aside), 'file')} could not be read and are kept under names that end in {_ENDING}"
        if aside
        else "rows of recorded attempts were missing"
    )
    if not rows_remade and not steps_remade and not gone:
        return f"{sweep.path}: {why}; no row is lost"
    made = [plural(rows_remade, "row")] if rows_remade or not steps_remade else []
    made += [f"the steps of {plural(steps_remade, 'attempt')}"] if steps_remade else []
    left = f"; {plural(gone, 'attempt')} not rebuilt: the folder is gone" if gone else ""
    return f"{sweep.path}: {why}; {listed(made)} rebuilt from {sweep.attempts.name}/{left}"


def _look(sweep: SweepDir, table: files.Table, parts: Sequence[Path]) -> _Table:
    """Read which attempts the table has. Raises `OSError` for a filesystem error, which says nothing about a file's
    content."""
    merged_path = files.compacted_path(sweep.path, table)
    damaged = {path.stem: path for path in parts if _is_damaged(path, table, merged_path)}
    whole = {path.stem for path in parts} - damaged.keys()
    return _Table(merged_path, _merged_ids(merged_path), whole, damaged)


def _is_damaged(part: Path, table: files.Table, merged: Path) -> bool:
    """Whether a part is damaged. The check of both ends finds a part that was cut or never written to disk. Since a
    sweep may have thousands of parts, only a part that the last compaction left behind, perhaps because of damage, is
    read in full."""
    try:
        with open_regular(part) as file:
            begins = file.read(len(_MAGIC))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_MAGIC)))
            if begins != _MAGIC or file.read() != _MAGIC or size < _LEAST_BYTES:
                return True
            written_at = os.fstat(file.fileno()).st_mtime
        if merged.exists() and written_at < merged.stat().st_mtime:
            files.read_file(part, table)
    except FileNotFoundError:  # a pilot has merged the part meanwhile
        return False
    except (InvalidResults, NotAFile):
        return True
    return False


def _merged_ids(path: Path) -> set[str] | None:
    """Ids of the attempts in a merged file; empty if there is none, None if it is damaged. Raises `OSError` for a
    filesystem error, which says nothing about the content."""
    try:
        with open_regular(path) as opened, pq.ParquetFile(path_of(opened), read_dictionary=["attempt_id"]) as file:
            # Each id is read once for many rows: a table of steps has hundreds of rows for an attempt.
            ids = file.read(columns=["attempt_id"])["attempt_id"]
            return set(ids.unify_dictionaries().unique().to_pylist())
    except FileNotFoundError:
        return set()
    except OSError as error:
        if error.errno is not None:
            raise
        return None  # Arrow's message for a truncated file
    except (pa.ArrowException, NotAFile, KeyError):
        return None


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}{_ENDING}")


def _recorded(sweep: SweepDir) -> dict[str, str]:
    """Stems of the points of all recorded attempts, by attempt id."""
    if not sweep.history.is_dir():  # an archived sweep
        return {}
    named = (split_name(name) for name in entry_names(sweep.history))
    return {attempt_id: stem for stem, attempt_id in named}


def _points(sweep: SweepDir) -> dict[str, Path]:
    """Paths of the points' files in the queue, by stem."""
    folders = (folder for folder in (sweep.todo, sweep.claimed, sweep.done) if folder.is_dir())
    return {split_name(name)[0]: folder / name for folder in folders for name in entry_names(folder)}


def _rows_of(
    sweep: SweepDir, point_file: Path | None, records: Sequence[AttemptRecord], attempt_id: str
) -> _Rows | None:
    """The row and the steps of one attempt; None where its folder or its point is gone."""
    record = next((one for one in records if one.attempt_id == attempt_id), None)
    try:
        point: Point | None = read_point(point_file) if point_file is not None else None
    except (OSError, InvalidResults):
        return None
    attempt = reopen_attempt(sweep, point, attempt_id) if point is not None else None
    if record is None or attempt is None:
        return None
    execution = abandoned(sweep, attempt, record.evidence or "its row was lost")
    outcome = dataclasses.replace(execution.outcome, **{name: getattr(record, name) for name in _RECORDED})
    row = rows.attempt_row(
        attempt,
        _context(sweep, attempt, record),
        outcome,
        execution.results,
        ended_at=record.ended_at,
        will_retry=record.will_retry,
        gap_s=record.gap_s,
        comparison=_compared(sweep, attempt, outcome.outcome, execution.results),
        rehearsed=execution.rehearsed,
        repeat_of=answered_meanwhile([one for one in records if one.ended_at < record.ended_at], attempt),
    )
    return _Rows(row, rows.step_rows(attempt, execution.results))


def _context(sweep: SweepDir, attempt: Attempt, record: AttemptRecord) -> rows.RunContext:
    config = _config_of(sweep, record.pilot_id)
    provenance = dict(config.provenance or {}) if config is not None else {}
    return rows.RunContext(
        sweep=sweep.name,
        launcher=config.settings.launcher if config is not None else "local",
        cluster=attempt.task.cluster,
        provenance=provenance | ({"command": config.command} if config is not None else {}),
        pilot_id=record.pilot_id,
    )


def _config_of(sweep: SweepDir, pilot_id: str) -> PilotConfig | None:
    """The config of a pilot. The pilots of one array share a config, whose name lacks task and restart."""
    for name in dict.fromkeys((pilot_id, pilot_id.rsplit(".", 2)[0])):
        try:
            return read_pilot_config(pilot_state.config_path(sweep, name))
        except (OSError, InvalidResults):
            continue
    return None


def _compared(
    sweep: SweepDir, attempt: Attempt, outcome: str, results: Mapping[int, Any]
) -> loss_check.LossComparison | None:
    losses = [loss for loss in rows.losses_of(results) if loss is not None]
    norms = [norm for norm in rows.grad_norms_of(results) if norm is not None]
    if outcome != "ok" or attempt.task.method != "measured" or not losses:
        return None
    try:
        return loss_check.compare(sweep.losses, attempt.point.experiment, attempt.attempt_id, losses, norms)
    except OSError:
        return None
