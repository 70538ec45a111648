"""Every attempt below a results folder as one frame, with what was planned and what could not be read.

The published table of the Ultra-Scale Playbook's study (a CSV file) is read in the same way, and so is a plan of which
nothing has run: then there is no attempt, and the ledger is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.rows.answers import from_other_sweeps
from analysis.rows.derived import add_formulas
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.step_peaks import add_first_steps
from results.errors import InvalidResults
from results.statistics.grade import with_rehearsals
from results.tables import reference, store
from results.tables.load import upgraded, upgraded_ledger
from results.tables.schema import ATTEMPTS

POINT_KEYS = ["sweep", "experiment_id", "method"]
"""Attempts that agree in these columns are tries at the same point."""
_NEEDED = ("experiment_id", "method", "outcome", "model", "world_size")
"""A row that lacks one of these columns is excluded: it belongs to no group."""


@dataclass(frozen=True, slots=True)
class Results:
    """What `load` found. Frames have the columns of `results.tables.schema`; what is missing is NaN or None."""

    path: Path
    sweeps: tuple[str, ...]
    attempts: pd.DataFrame
    ledger: pd.DataFrame
    problems: tuple[str, ...]
    """One line for each file that could not be read, and for whatever else is missing."""
    notes: tuple[str, ...] = ()
    """One line for each sweep whose rows are here because the plan has taken them over."""


def load(path: Path) -> Results:
    """Attempts and ledgers of a sweep, of every sweep below a folder, of one Parquet file of attempts or of a plan, or
    the study's published table (``.csv``). Points that finished attempts of other sweeps answer have those rows.

    Raises `InvalidResults` when there is nothing of that kind.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv" and not path.is_dir():
        return _study(path)
    if path.is_file() and _is_plan(path):
        return _plan(path)
    reading = store.scan(path, "attempts")
    table, newer = upgraded(reading.table)
    attempts = table.to_pandas()
    problems = [*reading.problems, *newer]
    notes: list[str] = []
    folders: list[Path] = []
    if path.is_file():
        sweeps = tuple(sorted(attempts["sweep"].dropna().unique()))
        ledger = store.empty_ledger().to_pandas()
    else:
        folders = store.sweep_dirs(path)
        problems += _remedies(folders, reading.problems)
        try:
            ledger = upgraded_ledger(store.read_ledger(path)).to_pandas()
        except InvalidResults as error:
            problems.append(str(error))
            ledger = store.empty_ledger().to_pandas()
        others = from_other_sweeps(ledger, attempts, folders)
        if others.rows is not None:
            attempts = upgraded(pa.concat_tables([table, others.rows], promote_options="permissive"))[0].to_pandas()
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
    attempts = with_rehearsals(attempts)
    attempts, unread = add_first_steps(attempts, folders)
    problems += unread
    return Results(path, sweeps, attempts, ledger, tuple(problems), tuple(notes))


def _remedies(folders: Sequence[Path], problems: Sequence[str]) -> list[str]:
    """How to get the rows of a damaged file back, where the folders of its attempts are still there."""
    return [
        f"the rows of {folder} can be made again from {folder / 'attempts'}: python -m sweep status {folder}"
        for folder in folders
        if any(f"{folder}/" in problem for problem in problems) and (folder / "attempts").is_dir()
    ]


def _is_plan(path: Path) -> bool:
    """Whether a file is a ledger, as ``plan --out`` writes it."""
    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException):
        return False
    return "verdict" in names and "attempt_id" not in names


def _plan(path: Path) -> Results:
    ledger = upgraded_ledger(store.read_ledger(path)).to_pandas()
    attempts, _ = add_first_steps(ATTEMPTS.empty_table().to_pandas(), [])
    return Results(path, tuple(sorted(ledger["sweep"].dropna().unique())), attempts, ledger, ())


def _study(path: Path) -> Results:
    found = reference.read(path)
    return Results(
        path=path,
        sweeps=(reference.SWEEP,),
        attempts=add_formulas(found.table.to_pandas()),
        ledger=store.empty_ledger().to_pandas(),
        problems=found.problems,
    )


@cache_per_frame
def last_attempts(attempts: pd.DataFrame) -> pd.DataFrame:
    """The attempt that decided each point: the last one of each experiment, sweep and method. Of a point that ran twice
    at once, the first row counts."""
    if attempts.empty:
        return attempts
    order = attempts[attempts["repeat_of"].isna()].sort_values(
        ["started_at", "attempt_number"], na_position="first", kind="stable"
    )
    return order.drop_duplicates(POINT_KEYS, keep="last").sort_index()


def not_run_yet(final: pd.DataFrame) -> pd.Series:
    """Which of `last_attempts` decided nothing: their point is to be tried again, or they were cancelled."""
    again = final["will_retry"].eq(True) if "will_retry" in final else pd.Series(False, index=final.index)
    return again | final["outcome"].eq("cancelled") if "outcome" in final else again


def decided(attempts: pd.DataFrame) -> pd.DataFrame:
    """The attempts that say what became of their points: `last_attempts` without those of points that have not run
    yet."""
    final = last_attempts(attempts)
    return final[~not_run_yet(final)]


def planned(results: Results) -> pd.DataFrame:
    """Ledger rows of the points that a sweep is to run, or has run, itself.

    A plan that is made again after a part was run calls that part ``cached``: its answer is then a row of the same
    sweep. Points answered by other sweeps are not among these.
    """
    ledger = results.ledger
    own = set(zip(results.attempts["sweep"], results.attempts["attempt_id"], strict=True))
    answers = zip(ledger["sweep"], ledger["cached_attempt"], strict=True)
    by_itself = pd.Series([answer in own for answer in answers], index=ledger.index, dtype=bool)
    return ledger[(ledger["verdict"] == "run") | ((ledger["verdict"] == "cached") & by_itself)]


def waiting(results: Results) -> pd.DataFrame:
    """Ledger rows that should run and have no attempt yet that decided them."""
    to_run = results.ledger[results.ledger["verdict"] == "run"]
    ended = decided(results.attempts)
    done = set(zip(ended["sweep"].fillna(""), ended["experiment_id"], strict=True))
    points = zip(to_run["sweep"].fillna(""), to_run["experiment_id"], strict=True)
    return to_run[[point not in done for point in points]]
