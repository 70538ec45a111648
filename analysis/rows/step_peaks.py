"""Peak memory of the first steps, read for the few runs whose timeline may be drawn: the fastest run of each model.

A table of steps has a line for each rank and step of every attempt. Only the lines of those runs are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.rows.labels import MEMORY_CATEGORIES, records
from results.tables import files

MOST_STEPS = 8
FIRST_PEAKS = {
    "first_steps_peak_allocated_bytes": "peak_allocated_bytes",
    "first_steps_peak_reserved_bytes": "peak_reserved_bytes",
}
"""Columns that are added, and the column of the table of steps behind each. A value is a list: for each step from 0 on,
the bytes of the rank that holds most."""
KIND = ("method", "cluster", "engine", "measurement_version", "model")
"""Rows that agree in these may stand for each other."""
_READ = ("attempt_id", "step", *FIRST_PEAKS.values())


def fastest_of_each_kind(attempts: pd.DataFrame) -> pd.DataFrame:
    """Of the finished rows with their memory by category, the fastest of each kind."""
    finished = (attempts["outcome"] == "ok") & attempts[list(MEMORY_CATEGORIES)].notna().all(axis=1)
    rows = attempts.loc[finished, ["sweep", "attempt_id", "tokens_per_s_per_gpu", *KIND]]
    order = rows.sort_values(["tokens_per_s_per_gpu", "attempt_id"], ascending=[False, True], na_position="last")
    return order.drop_duplicates(list(KIND))


def add_first_steps(attempts: pd.DataFrame, sweeps: Sequence[Path]) -> tuple[pd.DataFrame, list[str]]:
    """The attempts with the columns of `FIRST_PEAKS`, and a line for each file that could not be read.

    The columns are filled for the rows of `fastest_of_each_kind`.
    """
    wanted = fastest_of_each_kind(attempts)
    folders = {folder.resolve().name: folder for folder in sweeps}
    problems: list[str] = []
    found: dict[str, dict[str, list[int]]] = {}
    for sweep, rows in wanted.groupby("sweep"):
        if (folder := folders.get(str(sweep))) is not None:
            found |= _peaks(folder, list(rows["attempt_id"]), problems)
    known = set(attempts["sweep"].dropna())
    renamed = [folder for name, folder in folders.items() if name not in known]
    homeless = list(wanted.loc[~wanted["sweep"].isin(list(folders)), "attempt_id"])
    for folder in renamed if homeless else ():
        found |= _peaks(folder, homeless, problems)
    columns = {
        name: attempts["attempt_id"].map({key: value[name] for key, value in found.items()}) for name in FIRST_PEAKS
    }
    return attempts.assign(**columns), problems


def _peaks(folder: Path, attempt_ids: list[str], problems: list[str]) -> dict[str, dict[str, list[int]]]:
    """By attempt, the peaks of its first steps. An attempt is in a part of its own, or in the compacted table."""
    parts = [files.part_path(folder, "steps", attempt_id) for attempt_id in attempt_ids]
    tables = [_read(path, attempt_ids, problems) for path in (*parts, files.compacted_path(folder, "steps"))]
    known = [table for table in tables if table is not None and table.num_rows]
    if not known:
        return {}
    rows = pa.concat_tables(known, promote_options="permissive").to_pandas()
    highest = rows.groupby(["attempt_id", "step"], as_index=False)[list(FIRST_PEAKS.values())].max()
    found: dict[str, dict[str, list[int]]] = {}
    for row in records(highest):  # in the order of steps; what follows a gap is not told
        peaks = found.setdefault(str(row["attempt_id"]), {name: [] for name in FIRST_PEAKS})
        for name, column in FIRST_PEAKS.items():
            if row["step"] == len(peaks[name]) and pd.notna(row[column]):
                peaks[name].append(int(row[column]))
    return found


def _read(path: Path, attempt_ids: list[str], problems: list[str]) -> pa.Table | None:
    try:
        return pq.read_table(
            path, columns=list(_READ), filters=[("attempt_id", "in", attempt_ids), ("step", "<", MOST_STEPS)]
        )
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        problems.append(files.unreadable(path, error))
        return None
