"""Loads every attempt below a results folder into one frame, with the plan's ledger and the problems found.

The published table of the Ultra-Scale Playbook's study (a CSV file) is read the same way. A plan that has not run has
no attempts, only its ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.rows.answers import from_other_sweeps
from analysis.rows.derived import add_formulas, without_odd_shapes
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.frames import frame_of
from analysis.rows.step_peaks import add_first_steps
from results.errors import InvalidResults
from results.statistics.grade import with_rehearsals
from results.tables import reference, store
from results.tables.load import upgraded, upgraded_ledger
from results.tables.odd_rows import without_odd_rows
from results.tables.schema import ATTEMPTS

POINT_KEYS = ["sweep", "experiment_id", "method"]
"""Columns that identify a point: attempts that agree in them are tries at the same point."""
DECIDING = (*POINT_KEYS, "started_at", "attempt_number", "repeat_of", "will_retry", "outcome")
"""Columns that `decided` reads."""
_NEEDED = ("experiment_id", "method", "outcome", "model", "world_size")
"""Required columns: a row that lacks one of them belongs to no group and is excluded."""


@dataclass(frozen=True, slots=True)
class LoadedResults:
    """Result of `load`. Frames have the columns of `results.tables.schema`; missing values are NaN or None."""

    path: Path
    """What was read."""
    sweeps: tuple[str, ...]
    """Names of the sweeps."""
    attempts: pd.DataFrame
    """One row for each attempt, failed ones included."""
    ledger: pd.DataFrame
    """One row for each planned point; no row if there is no ledger."""
    problems: tuple[str, ...]
    """One line for each file that could not be read, and for anything else that is missing."""
    notes: tuple[str, ...] = ()
    """One line for each other sweep whose rows were taken over because the plan reuses them."""


def load(path: Path, leave_out: Collection[str] = ()) -> LoadedResults:
    """Attempts and ledgers of a sweep, of every sweep below a folder, of one Parquet file of attempts or of a plan, or
    of the study's published table (``.csv``). Points of a plan that other sweeps answer get the rows of those sweeps.

    Attempts lack the columns ``leave_out``; a list of numbers in every row takes more memory than all other columns.
    Raises `InvalidResults` if the path holds nothing of that kind.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv" and not path.is_dir():
        return _study(path)
    if path.is_file() and _is_plan(path):
        return _plan(path)
    reading = store.scan(path, "attempts")
    table, newer = upgraded(reading.table)
    table, odd = without_odd_rows(table)
    ledger, unreadable = _ledger_of(path)  # before the frame of attempts, which takes more memory than its table
    attempts = frame_of(_without(table, leave_out))
    problems = [*reading.problems, *newer, *odd]
    notes: list[str] = []
    folders: list[Path] = []
    if path.is_file():
        sweeps = tuple(sorted(attempts["sweep"].dropna().unique()))
    else:
        folders = store.sweep_dirs(path)
        problems += _remedies(folders, reading.problems)
        problems += unreadable
        others = from_other_sweeps(ledger, attempts, folders)
        if others.rows is not None:
            table = upgraded(pa.concat_tables([table, others.rows], promote_options="permissive"))[0]
            table, odd = without_odd_rows(table)
            attempts = frame_of(_without(table, leave_out))
            problems += odd
        folders += others.folders
        notes += others.found
        problems += others.missing
        sweeps = tuple(folder.resolve().name for folder in folders)
    broken = attempts[list(_NEEDED)].isna().any(axis=1)
    if path.is_file() and len(attempts) and broken.all():
        raise InvalidResults(
            f"{path} is not a table of attempts: no row has {', '.join(_NEEDED[:-1])} and {_NEEDED[-1]}"
        )
    if broken.any():
        problems.append(f"{int(broken.sum())} rows without {', '.join(_NEEDED[:-1])} or {_NEEDED[-1]} are left out")
        attempts = attempts[~broken].reset_index(drop=True)
    attempts, odd_shapes = without_odd_shapes(attempts)
    problems += odd_shapes
    attempts = with_rehearsals(attempts)
    attempts, unread = add_first_steps(attempts, folders)
    problems += unread
    return LoadedResults(path, sweeps, attempts, ledger, tuple(problems), tuple(notes))


def _without(table: pa.Table, columns: Collection[str]) -> pa.Table:
    return table.select([name for name in table.column_names if name not in columns])


def _ledger_of(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """The ledgers below a folder, and a line if they cannot be read; a file of attempts has none."""
    problems = []
    if not path.is_file():
        try:
            ledger = frame_of(upgraded_ledger(store.read_ledger(path)))
            pa.default_memory_pool().release_unused()
            return ledger, []
        except InvalidResults as error:
            problems.append(str(error))
    return store.empty_ledger().to_pandas(), problems


def _remedies(folders: Sequence[Path], problems: Sequence[str]) -> list[str]:
    """How to restore the rows of a damaged file, for sweeps that still have their attempt folders."""
    return [
        f"the rows of {folder} can be rebuilt from {folder / 'attempts'}: python -m sweep status {folder}"
        for folder in folders
        if any(f"{folder}/" in problem for problem in problems) and (folder / "attempts").is_dir()
    ]


def _is_plan(path: Path) -> bool:
    """Whether a file is a ledger as ``plan --out`` writes it."""
    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException):
        return False
    return "verdict" in names and "attempt_id" not in names


def _plan(path: Path) -> LoadedResults:
    ledger = frame_of(upgraded_ledger(store.read_ledger(path)))
    attempts, _ = add_first_steps(ATTEMPTS.empty_table().to_pandas(), [])
    return LoadedResults(path, tuple(sorted(ledger["sweep"].dropna().unique())), attempts, ledger, ())


def _study(path: Path) -> LoadedResults:
    study = reference.read(path)
    return LoadedResults(
        path=path,
        sweeps=(reference.SWEEP,),
        attempts=add_formulas(study.table.to_pandas()),
        ledger=store.empty_ledger().to_pandas(),
        problems=study.problems,
    )


@cache_per_frame
def last_attempts(attempts: pd.DataFrame) -> pd.DataFrame:
    """Deciding attempt of each point: the last one of each experiment, sweep and method. If two runners tried a point
    at once, the first row counts."""
    if attempts.empty:
        return attempts
    first = attempts["repeat_of"].isna()
    order = attempts.loc[first, [*POINT_KEYS, "started_at", "attempt_number"]].reset_index(drop=True)
    order = order.sort_values(["started_at", "attempt_number"], na_position="first", kind="stable")
    places = first.to_numpy().nonzero()[0][order.drop_duplicates(POINT_KEYS, keep="last").index.sort_values()]
    # A frame has some 180 columns, and most points have one attempt: take the rows once, and only if some are left out.
    last = attempts if len(places) == len(attempts) else attempts.iloc[places]
    return last if last.index.is_monotonic_increasing else last.sort_index()


def not_run_yet(final: pd.DataFrame) -> pd.Series:
    """Mask over `last_attempts` of those that decided nothing: their point will be retried, or they were cancelled."""
    again = final["will_retry"].eq(True) if "will_retry" in final else pd.Series(False, index=final.index)
    return again | final["outcome"].eq("cancelled") if "outcome" in final else again


def decided(attempts: pd.DataFrame, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """Attempts that decided their points: `last_attempts` without points that have not run yet. With ``columns`` it has
    only these, which takes a fraction of the time."""
    final = last_attempts(attempts)
    again = not_run_yet(final)
    rows = final if columns is None else final[list(columns)]
    return rows[~again] if again.any() else rows


def planned(results: LoadedResults) -> pd.DataFrame:
    """Ledger rows of the points that a sweep is to run, or has run, itself.

    A plan repeated after part of it has run marks that part ``cached``, answered by rows of the same sweep. Points
    answered by other sweeps are not included.
    """
    ledger = results.ledger
    to_run, cached = ledger["verdict"] == "run", ledger["verdict"] == "cached"
    if cached.any():
        attempts_here = set(_pairs_of(results.attempts, "attempt_id"))
        answers = _pairs_of(ledger, "cached_attempt")
        cached &= pd.Series([answer in attempts_here for answer in answers], index=ledger.index, dtype=bool)
    return ledger[to_run | cached]


def _pairs_of(rows: pd.DataFrame, column: str) -> Iterator[tuple[Any, Any]]:
    """The sweep and the value of ``column`` of each row; iterating over a column of texts itself takes ten times as
    long as over its list."""
    return zip(rows["sweep"].to_list(), rows[column].to_list(), strict=True)


def waiting(results: LoadedResults) -> pd.DataFrame:
    """Ledger rows that should run and have no deciding attempt yet; of shipped sweeps none, which go on nowhere."""
    return results.ledger[:0] if store.is_shipped(results.path) else without_result(results)


def without_result(results: LoadedResults) -> pd.DataFrame:
    """Ledger rows that should have run and have no deciding attempt."""
    to_run = results.ledger[results.ledger["verdict"] == "run"]
    done = _ended(results.attempts)
    points = _pairs_of(to_run[["sweep", "experiment_id"]].fillna({"sweep": ""}), "experiment_id")
    return to_run[[point not in done for point in points]]


@cache_per_frame
def _ended(attempts: pd.DataFrame) -> set[tuple[Any, Any]]:
    """Sweep and experiment of each point that has a deciding attempt."""
    ended = decided(attempts[[name for name in DECIDING if name in attempts]])
    return set(_pairs_of(ended.fillna({"sweep": ""}), "experiment_id"))
