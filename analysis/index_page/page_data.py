"""Data for the page's scripts besides the rows: ranked layouts, planned points, choices and device of each part.

The rows are those of `analysis.explorer.row_data`; row numbers are indices into that table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.explorer import plan_rows, row_data
from analysis.explorer.model_data import power_limit_w
from analysis.index_page import next_runs
from analysis.rows import choice_costs, labels, metrics, pairs
from analysis.rows.cohorts import Cohort
from analysis.rows.load import LoadedResults, last_attempts, not_run_yet
from results.errors import InvalidResults
from results.text.numbers import format_setting

OPENS_AT = "opens_at.json"
"""Name of the file with the cell that a page shows at first."""
_OPENS = {"workload": str, "world_size": int, "tokens_per_step": int}
_DIGITS = 7
"""Significant digits of a stored number, as in the rows."""
_CHOICE = ("axis", "first", "value", "pairs", "median", "low", "high")
"""Columns of `choice_costs.table` that the page shows."""


def of_parts(results: LoadedResults, parts: Sequence[Cohort], price: float | None) -> dict[str, Any]:
    """Data of ``parts``, in the order of the rows' table; ``price`` is that of a device-hour, None if not given."""
    first = 0
    made = []
    for part in parts:
        made.append(_part(part, first, results))
        first += len(part.frame)
    return {"parts": made, "price": price, "command": next_runs.command(results), "opens": opens_at(results.path)}


def opens_at(folder: Path) -> dict[str, Any] | None:
    """The model, number of devices and tokens per step with which the page of these results opens: those of the file
    `OPENS_AT` in their folder; None without the file. Raises `InvalidResults` if it has other contents."""
    path = folder / OPENS_AT
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        kinds = {name: type(told[name]) for name in _OPENS}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidResults(f"{path}: expected an object with {', '.join(_OPENS)}; found {error!r}") from None
    if kinds != _OPENS:
        raise InvalidResults(f"{path}: {', '.join(f'{name} is a {kind.__name__}' for name, kind in _OPENS.items())}")
    return {name: told[name] for name in _OPENS}


def _part(part: Cohort, first: int, results: LoadedResults) -> dict[str, Any]:
    frame = part.frame
    about = {
        "slug": part.slug,
        "title": part.title,
        "meaning": part.meaning,
        "stamp": part.stamp,
        "method": "planned" if part.slug == plan_rows.SLUG else str(frame["method"].iloc[0]),
        "first": first,
        "rows": len(frame),
        "noun": "GPUs" if "backend" not in frame else labels.device_noun(frame),
        "workloads": labels.workload_order(frame) if "num_params" in frame else list(frame["workload"].unique()),
        "device": _device(frame),
        "power_limit_w": power_limit_w(_device(frame)),
        "capacity": capacity(frame),
    }
    if part.slug == plan_rows.SLUG:
        return about | {"memory": "predicted_peak_bytes", "points": _points(frame, first), "waiting": []}
    return about | {
        "memory": metrics.memory_column(frame),
        "points": _points(last_attempts(frame), first),
        "ranked": _ranked(frame, first),
        "choices": choices_of(frame, _CHOICE),
        "settings": _settings(frame),
        "waiting": next_runs.of_cells(results, frame),
    }


def capacity(frame: pd.DataFrame) -> float | None:
    """Memory of the device in bytes, the smallest of several; for a plan the memory usable for training; None if
    unknown."""
    for name in ("device_memory_bytes", "limit_bytes"):
        if name in frame and frame[name].notna().any():
            return float(frame[name].min())
    return None


def _device(frame: pd.DataFrame) -> str | None:
    names = list(frame["device_name"].dropna().unique()) if "device_name" in frame else []
    return str(names[0]) if len(names) == 1 else None


def _points(final: pd.DataFrame, first: int) -> dict[str, Any]:
    """The last attempt of each point, as row numbers, and whether its point still has to run."""
    again = [int(again) for again in not_run_yet(final)]
    return {"rows": [first + int(place) for place in final.index], "again": again}


def _ranked(frame: pd.DataFrame, first: int) -> dict[str, Any]:
    """The layouts of `metrics.ranked` that have a rank: row number, pooled throughput and noise."""
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna()]
    places = dict(zip(frame["attempt_id"], range(len(frame)), strict=True))
    sources, from_codes = np.unique(rows["noise_from"].fillna("").to_numpy(dtype=str), return_inverse=True)
    return {
        "row": [first + places[attempt] for attempt in rows["attempt_id"]],
        "rate": numbers(rows[metrics.RANK_BY]),
        "repeats": numbers(rows["repeats"]),
        "noise": numbers(rows["noise"]),
        "freedom": numbers(rows["noise_freedom"]),
        "from": [int(code) for code in from_codes],
        "sources": [str(source) for source in sources],
    }


def _settings(frame: pd.DataFrame) -> dict[str, Any]:
    """How the page finds layouts that differ in one axis alone: ``axes`` (name, the degree that it needs, what may
    differ with it), ``same``, the settings that the page has as columns, and ``codes`` of the other settings by ranked
    layout, equal where layouts agree. Settings in which no layouts differ are left out."""
    varying = pairs.Matching(pairs.comparable(frame)).varying
    same = [name for name in varying if name in frame and name not in {*row_data.NOT_SHOWN, *pairs.USUAL}]
    return {
        "axes": [[name, axis.needs, *axis.free] for name, axis in choice_costs.AXES.items()],
        "same": same,
        "codes": {name: codes.tolist() for name, codes in varying.items() if name not in same},
    }


def choices_of(frame: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """What each value of each axis costs: columns of `choice_costs.table`; ratios are null without a pair."""
    table = choice_costs.table(frame)
    texts = ("axis", "first", "value")
    values = {
        name: [format_setting(v) for v in table[name]] if name in texts else numbers(table[name]) for name in columns
    }
    return [{name: of[place] for name, of in values.items()} for place in range(len(table))]


def numbers(values: pd.Series) -> list[float | int | None]:
    """Numbers with `_DIGITS` significant digits, null if unknown."""
    array = values.to_numpy(dtype=float, na_value=np.nan)
    return [None if np.isnan(value) else _short(value) for value in array]


def _short(value: float) -> float | int:
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
