"""What a plan has still to run: its points without a result, the predicted fastest of them, their price, the command.

As points are measured they leave this list, and their rows join the ranked layouts of the page. The predictions of
those that are left follow what the measured ones reached of theirs.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.rows import labels
from analysis.rows.load import LoadedResults, waiting
from results.errors import InvalidResults
from results.tables import store
from results.text.numbers import plural

TOP = 10
"""Number of points listed for each model and size."""
_RATE = "predicted_tokens_per_s_per_gpu"
_DIGITS = 4


def of_cells(results: LoadedResults, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Points without a result by model and size, of the sweeps of ``frame``, and with measured rows also of sweeps
    without any row.

    Each entry has the number of points, the expected device-hours of all (None if one is unknown), ``corrected``: in
    words, by how much the finished runs of ``frame`` change the predictions (None without one), and ``first``: the
    points with the most predicted tokens/s/device that fit, then those that may not fit (see `_point`).
    """
    rows = waiting(results)
    if rows.empty:
        return []
    shown = rows["sweep"].isin(frame["sweep"].unique())
    if frame["method"].iloc[0] == "measured":
        shown |= ~rows["sweep"].isin(results.attempts["sweep"].unique())
    rows = rows[shown]
    if rows.empty:
        return []
    rows = labels.add_labels(rows.reset_index(drop=True))
    rows["workload"] = labels.workloads(rows, lengths_of=frame)
    rows["tight"] = rows["predicted_peak_bytes"].gt(rows["limit_bytes"]).fillna(False).astype(bool)
    rows = rows.sort_values(["tight", _RATE], ascending=[True, False], na_position="last", kind="stable")
    cells, finished = [], _finished(frame)
    for (workload, _), group in rows.groupby(["workload", "world_size"], sort=True):
        hours = group["expected_gpu_hours"]
        factor, corrected = _correction(finished, str(workload), int(group["world_size"].iloc[0]))
        cells.append(
            {
                "workload": workload,
                "world_size": int(group["world_size"].iloc[0]),
                "points": len(group),
                "tight": int(group["tight"].sum()),
                "hours": None if hours.isna().any() else _short(hours.sum()),
                "basis": _only(group["predicted_with"]),
                "corrected": corrected,
                "first": [_point(row, factor) for row in labels.records(group.head(TOP))],
            }
        )
    return cells


def _finished(frame: pd.DataFrame) -> pd.DataFrame:
    """Finished runs that had a predicted time: workload, size, and predicted over measured step time."""
    ok = frame[frame["outcome"].eq("ok")]
    ratios = (ok["predicted_step_time_s"] / ok["step_time_s"]).astype(float)
    return ok[["workload", "world_size"]].assign(ratio=ratios).dropna()


def _correction(finished: pd.DataFrame, workload: str, size: int) -> tuple[float, str | None]:
    """By what throughput predictions of a model on a number of devices are multiplied, and that in words: the median of
    what runs of this model and size reached of their predictions, without one those of the model, without one all."""
    of_model = finished[finished["workload"].eq(workload)]
    of_size = of_model[of_model["world_size"].eq(size)]
    for runs, of in ((of_size, "of this model and size"), (of_model, "of this model on other sizes"), (finished, "")):
        if len(runs):
            factor = float(runs["ratio"].median())
            reached = f"what the {plural(len(runs), 'finished run')} {of}".rstrip()
            return factor, f"They are multiplied by {factor:.2f}, the median of {reached} reached of their predictions."
    return 1.0, None


def _point(row: dict[str, Any], factor: float) -> dict[str, Any]:
    """Layout, predicted tokens/s/device with its 90 % interval, both times ``factor``, predicted peak in bytes, whether
    that exceeds the device's memory, and expected device-hours; None if unknown."""
    tokens = factor * row["tokens_per_step"] / row["world_size"]
    low_s, high_s = row["predicted_step_time_low_s"], row["predicted_step_time_high_s"]
    return {
        "layout": row["layout"],
        "rate": _short(row[_RATE] * factor),
        "low": None if pd.isna(high_s) else _short(tokens / high_s),
        "high": None if pd.isna(low_s) else _short(tokens / low_s),
        "peak": None if pd.isna(row["predicted_peak_bytes"]) else int(row["predicted_peak_bytes"]),
        "tight": bool(row["tight"]),
        "hours": _short(row["expected_gpu_hours"]),
    }


def command(results: LoadedResults) -> str | None:
    """The command that runs the plan, or goes on with the sweep, as one line for a shell; None if it is not known, or
    if there are several sweeps."""
    if results.path.is_file():
        try:
            found = (pq.read_schema(results.path).metadata or {}).get(store.RUN_WORDS)
        except (OSError, pa.ArrowException):
            return None
        return f"python -m sweep run {found.decode()}" if found else None
    try:
        folders = store.sweep_dirs(results.path)
        if len(folders) != 1:
            return None
        words = json.loads((folders[0] / "sweep.json").read_text())["settings"]["command"]
    except (OSError, ValueError, KeyError, TypeError, InvalidResults):
        return None
    started = isinstance(words, list) and words[:1] == ["run"]
    return f"python -m sweep {shlex.join(map(str, words))}" if started else None


def _only(values: pd.Series) -> str | None:
    known = values.dropna().unique()
    return "; ".join(map(str, known)) if len(known) else None


def _short(value: Any) -> float | None:
    return None if pd.isna(value) else float(f"{value:.{_DIGITS}g}")
