"""Writes rows again that a sweep's tables have lost (a damaged or deleted ``attempts.parquet``), from the folders of
the attempts.

Every recorded attempt had its row before its record, so a record without a row is a row that was lost. A row that is
made again has the same numbers. What only the pilot knew of the code (commit, versions) is there where the pilot's
config holds it, else null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from results import files, store
from results.errors import InvalidResults
from results.text import plural

_RECORDED = ("outcome", "phase", "phase_step", "failed_rank", "evidence", "infrastructure")
"""What a record says of how the attempt ended."""


def rebuild_lost_rows(sweep: SweepDir) -> str | None:
    """Write the rows of recorded attempts that the tables lack, and move damaged merged files aside. What was done, in
    one line; None where nothing was lost, or nothing is left to make rows from. Where nothing can be written the line
    says that."""
    # In this order nothing looks lost while pilots work: a row is written before its record, and a part is removed
    # after it is in the merged file.
    try:
        recorded = _recorded(sweep)
        parts = {table: {path.stem for path in files.part_paths(sweep.path, table)} for table in files.SCHEMAS}
        merged = {table: _merged_ids(files.compacted_path(sweep.path, table)) for table in files.SCHEMAS}
    except OSError:  # the file system fails for a while: nothing is known to be lost
        return None
    damaged = [files.compacted_path(sweep.path, table) for table, found in merged.items() if found is None]
    known = parts["attempts"] | (merged["attempts"] or set())
    if merged["steps"] is None:
        known &= parts["steps"]
    lost = {attempt_id: stem for attempt_id, stem in recorded.items() if attempt_id not in known}
    if not lost and not damaged:
        return None
    points = _points(sweep)
    try:
        records = HistoryReader(sweep)
        records.refresh()
        rebuilt = sum(
            _rebuild(sweep, points.get(stem), records.of(stem), attempt_id) for attempt_id, stem in sorted(lost.items())
        )
        for path in damaged:
            path.replace(_aside(path))
    except OSError as error:
        rows_lost = plural(len(lost), "row")
        return f"{sweep.path}: {rows_lost} lost from the tables could not be made again: {error.strerror or error}"
    return _told(sweep, damaged, rebuilt, len(lost)) if rebuilt or damaged else None


def _told(sweep: SweepDir, damaged: list[Path], rebuilt: int, lost: int) -> str:
    why = (
        f"{' and '.join(path.name for path in damaged)} could not be read and {'is' if len(damaged) == 1 else 'are'} "
        f"kept as {', '.join(_aside(path).name for path in damaged)}"
        if damaged
        else "rows of recorded attempts were missing"
    )
    left = "" if rebuilt == lost else f"; of {lost - rebuilt} the folder is gone too"
    return f"{sweep.path}: {why}; {plural(rebuilt, 'row')} made again from {sweep.attempts.name}/{left}"


def _merged_ids(path: Path) -> set[str] | None:
    """Ids of the attempts in a merged file; empty where there is none, None where it is damaged. Raises `OSError` for
    an error of the file system, which says nothing of the content."""
    try:
        with pq.ParquetFile(path) as file:
            return set(file.read(columns=["attempt_id"])["attempt_id"].to_pylist())
    except FileNotFoundError:
        return set()
    except OSError as error:
        if error.errno is not None:
            raise
        return None  # Arrow's words for a file that is cut
    except (pa.ArrowException, KeyError):
        return None


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _recorded(sweep: SweepDir) -> dict[str, str]:
    """The points' stems by the ids of all recorded attempts."""
    if not sweep.history.is_dir():  # an archived sweep
        return {}
    named = (split_name(name) for name in entry_names(sweep.history))
    return {attempt_id: stem for stem, attempt_id in named}


def _points(sweep: SweepDir) -> dict[str, Path]:
    """The points' files in the queue, by stem."""
    folders = (folder for folder in (sweep.todo, sweep.claimed, sweep.done) if folder.is_dir())
    return {split_name(name)[0]: folder / name for folder in folders for name in entry_names(folder)}


def _rebuild(sweep: SweepDir, point_file: Path | None, records: Sequence[AttemptRecord], attempt_id: str) -> bool:
    """Write the row and the steps of one attempt again. False where its folder or its point is gone."""
    record = next((one for one in records if one.attempt_id == attempt_id), None)
    try:
        point: Point | None = read_point(point_file) if point_file is not None else None
    except (OSError, InvalidResults):
        return False
    attempt = reopen_attempt(sweep, point, attempt_id) if point is not None else None
    if record is None or attempt is None:
        return False
    done = abandoned(sweep, attempt, record.evidence or "its row was lost")
    outcome = dataclasses.replace(done.outcome, **{name: getattr(record, name) for name in _RECORDED})
    row = rows.attempt_row(
        attempt,
        _context(sweep, attempt, record),
        outcome,
        done.results,
        ended_at=record.ended_at,
        will_retry=record.will_retry,
        gap_s=record.gap_s,
        comparison=_compared(sweep, attempt, outcome.outcome, done.results),
        rehearsed=done.rehearsed,
        repeat_of=answered_meanwhile([one for one in records if one.ended_at < record.ended_at], attempt),
    )
    store.write_attempt(sweep.path, row, rows.step_rows(attempt, done.results))
    return True


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
    """The config of a pilot; those of one array share it, under the name without task and restart."""
    for name in dict.fromkeys((pilot_id, pilot_id.rsplit(".", 2)[0])):
        try:
            return read_pilot_config(pilot_state.config_path(sweep, name))
        except (OSError, InvalidResults):
            continue
    return None


def _compared(
    sweep: SweepDir, attempt: Attempt, outcome: str, results: Mapping[int, Any]
) -> loss_check.Comparison | None:
    losses = [loss for loss in rows.losses_of(results) if loss is not None]
    norms = [norm for norm in rows.grad_norms_of(results) if norm is not None]
    if outcome != "ok" or attempt.task.method != "measured" or not losses:
        return None
    try:
        return loss_check.compare(sweep.losses, attempt.point.experiment, attempt.attempt_id, losses, norms)
    except OSError:
        return None
