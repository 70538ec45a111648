"""What the drawer draws of one row: peak memory of each step, and the times of each pipeline stage.

Rows of schema 9 have both in columns. Of older rows most of it is worked out of their sweep's table of steps where that
is short: a line for each rank and step of a large sweep would take longer to read than the whole report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

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
"""Bytes of each step from the first; on the page in MiB."""
_OF_STEPS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}
_TIMES = {"work": "forward_backward_s", "idle": "pipeline_idle_s"}
MOST_STEP_ROWS = 200_000
"""Tables of steps with more lines are not read."""
MOST_VALUES = 200_000
"""Of all rows together, the fastest first: a page of many thousand rows would grow too large."""
_DIGITS = 5
"""Significant digits that a time keeps."""


def series(path: Path, frame: pd.DataFrame) -> dict[int, dict[str, list[float | int | None]]]:
    """By position in ``frame`` the lists of `BY_STAGE` (where pp > 1) and `BY_STEP` that are known.

    ``path`` is what the rows were read from: a sweep or a folder of sweeps. Rows of a single file have only their own
    columns.
    """
    if frame.empty or "outcome" not in frame:  # a plan: nothing has run
        return {}
    own = [name for name in (*BY_STAGE.values(), *BY_STEP.values()) if name in frame]
    order = frame["tokens_per_s_per_gpu"].reset_index(drop=True).sort_values(ascending=False, kind="stable").index
    columns = {name: frame[name].to_list() for name in own}
    lacking = frame if len(own) == 0 else frame[frame[own].isna().all(axis=1)]
    steps = _from_steps(path, lacking)
    ids, stages = frame["attempt_id"].to_list(), frame["pp"].to_numpy(dtype=float, na_value=np.nan)
    found: dict[int, dict[str, list[float | int | None]]] = {}
    left = MOST_VALUES
    for position in order:
        lists = dict(steps.get(ids[position], {}))
        for names in (BY_STAGE, BY_STEP):
            for name, column in names.items():
                value = columns[column][position] if column in columns else None
                if isinstance(value, list | np.ndarray):
                    lists[name] = list(value)
        kept = {name: _short(name, values) for name, values in lists.items() if name in BY_STEP or stages[position] > 1}
        left -= sum(map(len, kept.values()))
        if left < 0:
            break
        if kept:
            found[position] = kept
    return found


def _short(name: str, values: Sequence[Any]) -> list[float | int | None]:
    known = [None if pd.isna(value) else float(value) for value in values]
    if name in BY_STEP:
        return [None if value is None else round(value / 2**20) for value in known]
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in known]


def _from_steps(path: Path, frame: pd.DataFrame) -> dict[str, dict[str, list[Any]]]:
    """The same lists, unrounded, from the tables of steps of the sweeps of ``frame``, by attempt."""
    if frame.empty or not path.is_dir():
        return {}
    try:
        folders = store.sweep_dirs(path)
    except InvalidResults:
        return {}
    wanted = set(frame["attempt_id"])
    found: dict[str, dict[str, list[Any]]] = {}
    for folder in folders:
        table = _read(files.compacted_path(folder, "steps"))
        if table is not None:
            found |= _lists(table[table["attempt_id"].isin(wanted)])
    return found


def _read(path: Path) -> pd.DataFrame | None:
    """The needed columns of a short table; None where it is long, missing or unreadable, which the report says."""
    names = ["attempt_id", "step", "is_warmup", "rank", "pp_rank", *_OF_STEPS.values(), *_TIMES.values()]
    try:
        if pq.read_metadata(path).num_rows > MOST_STEP_ROWS:
            return None
        found: pd.DataFrame = pq.read_table(path, columns=names).to_pandas()
    except (OSError, pa.ArrowException):
        return None
    return found


def _lists(steps: pd.DataFrame) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    by_step = steps.groupby(["attempt_id", "step"])[list(_OF_STEPS.values())]
    highest = by_step.max().where(by_step.count().eq(by_step.size(), axis=0))  # of all ranks, or not known
    for row in records(highest.reset_index()):  # in the order of steps; what follows a gap is not told
        lists = found.setdefault(str(row["attempt_id"]), {})
        for name, column in _OF_STEPS.items():
            if pd.notna(row[column]) and row["step"] == len(lists.get(name, ())):
                lists.setdefault(name, []).append(row[column])
    timed = steps[steps["is_warmup"].eq(False)]
    medians = timed.groupby(["attempt_id", "pp_rank", "rank"])[list(_TIMES.values())].median()
    means = medians.groupby(["attempt_id", "pp_rank"]).mean().reset_index()
    for row in records(means):
        lists = found.setdefault(str(row["attempt_id"]), {})
        for name, column in _TIMES.items():
            if pd.notna(row[column]) and row["pp_rank"] == len(lists.get(name, ())):
                lists.setdefault(name, []).append(row[column])
    return found
