"""Every attempt below a results folder as one frame, with what was planned and what could not be read.

The published table of the Ultra-Scale Playbook's study (a CSV file) is read in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.rows.derived import add_formulas
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.step_peaks import add_first_steps
from results import reference, store
from results.errors import InvalidResults

POINT_KEYS = ["sweep", "experiment_id", "method"]
"""What makes two attempts tries at the same point."""
_NEEDED = ("experiment_id", "method", "outcome", "model", "world_size")
"""Without one of these a row has no place in any group."""


@dataclass(frozen=True, slots=True)
class Results:
    """What `load` found. Frames have the columns of `results.schema`; what is missing is NaN or None."""

    path: Path
    sweeps: tuple[str, ...]
    attempts: pd.DataFrame
    ledger: pd.DataFrame
    problems: tuple[str, ...]
    """One line for each file that could not be read."""


def load(path: Path) -> Results:
    """Attempts and ledgers of a sweep, of every sweep below a folder, of one Parquet file of attempts, or the study's
    published table (``.csv``).

    Raises `InvalidResults` when there is nothing of that kind.
    """
    path = Path(path)
    if path.suffix.lower() == ".csv" and not path.is_dir():
        return _study(path)
    reading = store.scan(path, "attempts")
    attempts = reading.table.to_pandas()
    problems = list(reading.problems)
    folders: list[Path] = []
    if path.is_file():
        sweeps = tuple(sorted(attempts["sweep"].dropna().unique()))
        ledger = store.empty_ledger().to_pandas()
    else:
        folders = store.sweep_dirs(path)
        sweeps = tuple(folder.resolve().name for folder in folders)
        try:
            ledger = store.read_ledger(path).to_pandas()
        except InvalidResults as error:
            problems.append(str(error))
            ledger = store.empty_ledger().to_pandas()
    broken = attempts[list(_NEEDED)].isna().any(axis=1)
    if path.is_file() and len(attempts) and broken.all():
        raise InvalidResults(
            f"{path} is not a table of attempts: no row has {', '.join(_NEEDED[:-1])} and {_NEEDED[-1]}"
        )
    if broken.any():
        problems.append(f"{int(broken.sum())} rows without {', '.join(_NEEDED[:-1])} or {_NEEDED[-1]} are left out")
        attempts = attempts[~broken].reset_index(drop=True)
    attempts["backend"] = attempts["backend"].fillna(_backend_by_device(attempts))
    attempts, unread = add_first_steps(attempts, folders)
    problems += unread
    return Results(path=path, sweeps=sweeps, attempts=attempts, ledger=ledger, problems=tuple(problems))


def _backend_by_device(attempts: pd.DataFrame) -> pd.Series:
    """``backend`` of measured rows that are older than the column: the driver of a GPU reports its memory, a CPU has
    a name alone. None where the ranks told neither."""
    told = attempts["device_name"].notna() & (attempts["method"] == "measured")
    found = attempts["device_memory_bytes"].notna().map({True: "cuda", False: "cpu"})
    return found.where(told, None)


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
    final = last_attempts(results.attempts)
    decided = final[~final["will_retry"].eq(True)]
    done = set(zip(decided["sweep"].fillna(""), decided["experiment_id"], strict=True))
    points = zip(to_run["sweep"].fillna(""), to_run["experiment_id"], strict=True)
    return to_run[[point not in done for point in points]]
