"""Series of one row for the drawer: peak memory of each step, and times of each pipeline stage.

Rows of schema 9 have both as columns. For older rows most of it is computed from their sweep's table of steps if that
is short: reading a line for each rank and step of a large sweep would take longer than the whole report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from analysis.rows.labels import records
from results.errors import InvalidResults
from results.tables import files, store

BY_STAGE = {
    "forward": "forward_by_stage_s",
    "backward": "backward_by_stage_s",
    "work": "forward_backward_by_stage_s",
    "idle": "pipeline_idle_by_stage_s",
}
"""Seconds of each pipeline stage: the page's name and the rows' column. Only rows with several stages get them."""
BY_STEP = {"allocated": "peak_allocated_by_step_bytes", "reserved": "peak_reserved_by_step_bytes"}
"""Peak bytes of each step from the first on; in MiB on the page."""
_OF_STEPS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}
_TIMES = {"work": "forward_backward_s", "idle": "pipeline_idle_s"}
MOST_STEP_ROWS = 200_000
"""Largest number of lines of a table of steps that is read."""
MOST_VALUES = 200_000
"""Limit for all rows together, the fastest first: a page of many thousand rows would grow too large."""
_DIGITS = 5
"""Significant digits of a stored time."""


def series(path: Path, frame: pd.DataFrame) -> dict[int, dict[str, list[float | int | None]]]:
    """Known lists of `BY_STAGE` (if pp > 1) and `BY_STEP`, by position in ``frame``.

    ``path`` is where the rows were read from: a sweep or a folder of sweeps. Rows of a single file have only their own
    columns.
    """
    if frame.empty or "outcome" not in frame:  # a plan: nothing has run
        return {}
    columns = {name: column for name, column in (BY_STAGE | BY_STEP).items() if column in frame}
    lists = {name: frame[column].to_list() for name, column in columns.items()}
    lacks = frame[[*columns.values()]].isna().all(axis=1).to_numpy()
    steps = _from_steps(path, frame[lacks])
    for position in np.flatnonzero(lacks).tolist() if steps else ():
        for name, values in steps.get(frame["attempt_id"].iloc[position], {}).items():
            lists.setdefault(name, [None] * len(frame))[position] = values
    several_stages = frame["pp"].to_numpy(dtype=float, na_value=np.nan) > 1
    sizes = np.zeros(len(frame), np.int64)
    known: dict[str, NDArray[np.bool_]] = {}
    for name, of_rows in lists.items():
        has_list = np.array([isinstance(values, list | np.ndarray) for values in of_rows], bool)
        known[name] = has_list if name in BY_STEP else has_list & several_stages
        places = np.flatnonzero(known[name])
        sizes[places] += np.fromiter((len(of_rows[place]) for place in places.tolist()), np.int64, len(places))
    fastest = frame["tokens_per_s_per_gpu"].reset_index(drop=True).sort_values(ascending=False, kind="stable").index
    order = fastest.to_numpy()
    order = order[np.cumsum(sizes[order]) <= MOST_VALUES]
    lists_of_row: dict[int, dict[str, list[float | int | None]]] = {position: {} for position in order.tolist()}
    for name, of_rows in lists.items():
        positions = order[known[name][order]].tolist()
        for position, values in zip(positions, _short(name, [of_rows[at] for at in positions]), strict=True):
            lists_of_row[position][name] = values
    return {position: of_row for position, of_row in lists_of_row.items() if of_row}


def _short(name: str, lists: Sequence[Any]) -> Iterator[list[float | int | None]]:
    """The lists, rounded together: bytes as whole MiB, times to `_DIGITS` digits; an unknown number is None."""
    values = np.concatenate([np.zeros(0), *lists]).astype(float)
    finite = np.isfinite(values)
    short: list[float | int | None]
    if name in BY_STEP:
        short = np.rint(np.where(finite, values, 0) / 2**20).astype(np.int64).tolist()
    else:
        short = [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
    for place in np.flatnonzero(~finite).tolist():
        short[place] = None
    ends = np.cumsum([len(of_row) for of_row in lists]).tolist()
    yield from (short[start:end] for start, end in zip([0, *ends], ends, strict=False))


def _from_steps(path: Path, frame: pd.DataFrame) -> dict[str, dict[str, list[Any]]]:
    """Lists by attempt, unrounded, from the tables of steps of the sweeps of ``frame``."""
    if frame.empty or not path.is_dir():
        return {}
    try:
        folders = store.sweep_dirs(path)
    except InvalidResults:
        return {}
    wanted = set(frame["attempt_id"])
    lists_of_attempt: dict[str, dict[str, list[Any]]] = {}
    for folder in folders:
        table = _read(files.compacted_path(folder, "steps"))
        if table is not None:
            lists_of_attempt |= _lists(table[table["attempt_id"].isin(wanted)])
    return lists_of_attempt


def _read(path: Path) -> pd.DataFrame | None:
    """Needed columns of a table; None if it is too long, missing or unreadable (the report says so elsewhere)."""
    names = ["attempt_id", "step", "is_warmup", "rank", "pp_rank", *_OF_STEPS.values(), *_TIMES.values()]
    try:
        if pq.read_metadata(path).num_rows > MOST_STEP_ROWS:
            return None
        table: pd.DataFrame = pq.read_table(path, columns=names).to_pandas()
    except (OSError, pa.ArrowException):
        return None
    return table


def _lists(steps: pd.DataFrame) -> dict[str, dict[str, list[Any]]]:
    lists_of_attempt: dict[str, dict[str, list[Any]]] = {}
    by_step = steps.groupby(["attempt_id", "step"])[list(_OF_STEPS.values())]
    # over all ranks; unknown if a rank lacks it
    highest = by_step.max().where(by_step.count().eq(by_step.size(), axis=0))
    for row in records(highest.reset_index()):  # in the order of steps; steps after a gap are dropped
        lists = lists_of_attempt.setdefault(str(row["attempt_id"]), {})
        for name, column in _OF_STEPS.items():
            if pd.notna(row[column]) and row["step"] == len(lists.get(name, ())):
                lists.setdefault(name, []).append(row[column])
    timed = steps[steps["is_warmup"].eq(False)]
    medians = timed.groupby(["attempt_id", "pp_rank", "rank"])[list(_TIMES.values())].median()
    means = medians.groupby(["attempt_id", "pp_rank"]).mean().reset_index()
    for row in records(means):
        lists = lists_of_attempt.setdefault(str(row["attempt_id"]), {})
        for name, column in _TIMES.items():
            if pd.notna(row[column]) and row["pp_rank"] == len(lists.get(name, ())):
                lists.setdefault(name, []).append(row[column])
    return lists_of_attempt
