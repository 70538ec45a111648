"""What each value of an axis costs: throughput ratios over pairs of layouts that differ in that axis alone.

Each value is compared with the first of its axis (no tp, ZeRO 0, no recomputation ...). A pair agrees in all of
`analysis.rows.pairs.SETTINGS`, batch, precision and engine version included, except for the axis and what makes room
for it on the same devices at the same batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.rows import metrics, pairs
from analysis.rows.frame_cache import cache_per_frame

AXES: dict[str, tuple[str, ...]] = {
    "tp": (*pairs.MAKE_ROOM, "sequence_parallel"),
    "cp": pairs.MAKE_ROOM,
    "pp": (*pairs.MAKE_ROOM, "pp_schedule"),
    "ep": (),
    "micro_batch_size": ("num_microbatches",),
    "zero_stage": (),
    "recompute": (),
    "precision": (),
    "compile": (),
    "pp_schedule": ("virtual_stages",),
}
"""Axes, and the settings that may differ with each."""
FIRST = {"recompute": "none", "precision": "bf16", "compile": "none", "pp_schedule": "1f1b"}
"""The value of a named axis with which the others are compared; of a number, the smallest."""
COLUMNS = ("axis", "first", "value", "pairs", "median", "low", "high")
"""``median``, ``low`` and ``high`` are of throughput with the value over throughput with the first; null without a
pair."""


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each axis and value of a cohort other than the axis's first, `COLUMNS`, values without a pair
    included. Rehearsed rows have no tp and cp, whose steps come out too short."""
    rows = pairs.once(pairs.comparable(frame))
    if rows.empty:
        return pd.DataFrame(columns=[*COLUMNS])
    rates, matching = rows[metrics.RANK_BY].to_numpy(dtype=float), pairs.Matching(rows)
    several, depth, schedule = rows["dp"] > 1, rows["pp"].to_numpy(), rows["pp_schedule"].to_numpy()
    rehearsed = "rehearsed" in set(rows["method"])
    found: list[dict[str, Any]] = []
    for axis, free in AXES.items():
        values = sorted(rows.loc[rows["pp"] > 1 if axis == "pp_schedule" else slice(None), axis].dropna().unique())
        first = FIRST.get(axis, values[0] if values else None)
        if first not in values or (rehearsed and axis in ("tp", "cp")):
            continue
        for value in values:
            if value == first:
                continue
            before, after = rows[axis] == first, rows[axis] == value
            if axis == "zero_stage":  # one rank has nothing to shard
                before, after = before & several, after & several
            one, two = matching.pairs(before, after, [axis, *free])
            if axis == "pp":  # one stage has no schedule: the other run has 1F1B
                same = schedule[two] == "1f1b" if first == 1 else schedule[one] == schedule[two]
                one, two = one[same & (depth[two] > 1)], two[same & (depth[two] > 1)]
            found.append({"axis": axis, "first": first, "value": value} | _summary(rates[two] / rates[one]))
    return pd.DataFrame(found, columns=[*COLUMNS])


def _summary(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    if not len(ratios):
        return {"pairs": 0, "median": None, "low": None, "high": None}
    return {
        "pairs": len(ratios),
        "median": float(np.median(ratios)),
        "low": float(ratios.min()),
        "high": float(ratios.max()),
    }
