"""Peak memory of the first steps, read only for runs whose timeline may be drawn: the fastest run of each model.

A table of steps has a line for each rank and step of every attempt; only the lines of these runs are read.
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
"""Added columns, each with its column in the table of steps. A value is a list over steps from 0 on: the bytes of the
rank with the highest peak."""
KIND = ("method", "cluster", "engine", "measurement_version", "model")
"""Columns that define a kind: one row stands for all rows that agree in them."""
_READ = ("attempt_id", "step", *FIRST_PEAKS.values())


def fastest_of_each_kind(attempts: pd.DataFrame) -> pd.DataFrame:
    """Fastest row of each kind, of the finished rows with memory by category."""
    finished = (attempts["outcome"] == "ok") & attempts[list(MEMORY_CATEGORIES)].notna().all(axis=1)
    rows = attempts.loc[finished, ["sweep", "attempt_id", "tokens_per_s_per_gpu", *KIND]]
    order = rows.sort_values(["tokens_per_s_per_gpu", "attempt_id"], ascending=[False, True], na_position="last")
    return order.drop_duplicates(list(KIND))


def add_first_steps(attempts: pd.DataFrame, sweeps: Sequence[Path]) -> tuple[pd.DataFrame, list[str]]:
    """Attempts with the columns of `FIRST_PEAKS`, and a line for each file that could not be read.

    The columns are filled only for the rows of `fastest_of_each_kind`.
    """
    wanted = fastest_of_each_kind(attempts)
    folders = {folder.resolve().name: folder for folder in sweeps}
    problems: list[str] = []
    peaks_of_attempt: dict[str, dict[str, list[int]]] = {}
    for sweep, rows in wanted.groupby("sweep"):
        if (folder := folders.get(str(sweep))) is not None:
            peaks_of_attempt |= _peaks(folder, list(rows["attempt_id"]), problems)
    known = set(attempts["sweep"].dropna())
    renamed = [folder for name, folder in folders.items() if name not in known]
    homeless = list(wanted.loc[~wanted["sweep"].isin(list(folders)), "attempt_id"])
    for folder in renamed if homeless else ():
        peaks_of_attempt |= _peaks(folder, homeless, problems)
    columns = {
        name: attempts["attempt_id"].map({key: value[name] for key, value in peaks_of_attempt.items()})
        for name in FIRST_PEAKS
    }
    return attempts.assign(**columns), problems


def _peaks(folder: Path, attempt_ids: list[str], problems: list[str]) -> dict[str, dict[str, list[int]]]:
    """Peaks of the first steps by attempt. An attempt is either in its own part file or in the compacted table."""
    parts = [files.part_path(folder, "steps", attempt_id) for attempt_id in attempt_ids]
    tables = [_read(path, attempt_ids, problems) for path in (*parts, files.compacted_path(folder, "steps"))]
    known = [table for table in tables if table is not None and table.num_rows]
    if not known:
        return {}
    rows = pa.concat_tables(known, promote_options="permissive").to_pandas()
    highest = rows.groupby(["attempt_id", "step"], as_index=False)[list(FIRST_PEAKS.values())].max()
    peaks_of_attempt: dict[str, dict[str, list[int]]] = {}
    for row in records(highest):  # in the order of steps; steps after a gap are dropped
        peaks = peaks_of_attempt.setdefault(str(row["attempt_id"]), {name: [] for name in FIRST_PEAKS})
        for name, column in FIRST_PEAKS.items():
            if row["step"] == len(peaks[name]) and pd.notna(row[column]):
                peaks[name].append(int(row[column]))
    return peaks_of_attempt


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
