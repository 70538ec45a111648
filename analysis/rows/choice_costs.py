"""What each value of an axis costs: ratios of throughput and memory over pairs of layouts that differ in it alone.

Each value is compared with the first of its axis (no tp, ZeRO 0, no recomputation ...). A pair agrees in all of
`analysis.rows.pairs.SETTINGS`, batch, precision and engine version included, except for the axis and what makes room
for it on the same devices at the same batch. The page compares the answer with single runs by the same rules
(``changes`` in ``templates/page/answer.js``, which gets `AXES`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.rows import metrics, pairs
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import supported_median
from workloads.spec.updates.words import UPDATE_FIELDS


class Axis(NamedTuple):
    """An axis whose values are compared."""

    free: tuple[str, ...] = ()
    """Settings that may differ with it."""
    first: str | None = None
    """The value with which the others are compared; None: the smallest."""
    needs: str | None = None
    """The degree that is above 1 in both runs of a pair: one rank has nothing to shard."""


AXES = {
    "tp": Axis((*pairs.MAKE_ROOM, "sequence_parallel")),
    "cp": Axis(pairs.MAKE_ROOM),
    "pp": Axis(pairs.MAKE_ROOM),
    "ep": Axis(),
    "micro_batch_size": Axis(("num_microbatches",)),
    "zero_stage": Axis(needs="dp"),
    "recompute": Axis(first="none"),
    "recompute_every": Axis(),
    "activation_offload": Axis(first="none"),
    "precision": Axis(first="bf16"),
    "compile": Axis(first="none"),
    "cuda_graph": Axis(first="none"),
    **{field: Axis(first=usual) for field, usual in UPDATE_FIELDS.items()},
    "pp_schedule": Axis(("virtual_stages",), first="1f1b", needs="pp"),
    "cp_kind": Axis(first="ring", needs="cp"),
}
COLUMNS = (
    *("axis", "first", "value", "pairs", "median", "low", "high", "interval_low", "interval_high"),
    *("memory_pairs", "memory_median", "memory_low", "memory_high"),
)
"""``median``, ``low`` and ``high`` are of throughput with the value over throughput with the first, null without a
pair; ``memory_...`` are of peak memory. ``interval_low`` and ``interval_high`` are the 95 % bootstrap interval of the
median, null with fewer than five pairs; pairs that share a run are not independent, so it is too narrow."""


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each axis and value of a cohort other than the axis's first, `COLUMNS`, values without a pair
    included. Rehearsed rows have no tp and cp, whose steps come out too short."""
    rows = pairs.once(pairs.comparable(frame))
    if rows.empty:
        return pd.DataFrame(columns=[*COLUMNS])
    rates, peaks = (rows[name].to_numpy(dtype=float) for name in (metrics.RANK_BY, metrics.memory_column(frame)))
    matching, rehearsed = pairs.Matching(rows), "rehearsed" in set(rows["method"])
    found: list[dict[str, Any]] = []
    for name, axis in AXES.items():
        enough = rows[axis.needs] > 1 if axis.needs else pd.Series(data=True, index=rows.index)
        values = sorted(rows.loc[enough, name].dropna().unique())
        first = axis.first or (values[0] if values else None)
        if first not in values or (rehearsed and name in ("tp", "cp")):
            continue
        for value in values:
            if value != first:
                one, two = matching.pairs(
                    enough & (rows[name] == first), enough & (rows[name] == value), [name, *axis.free]
                )
                of_pairs = _ratios(rates[two] / rates[one], peaks[two] / peaks[one])
                found.append({"axis": name, "first": _whole(first), "value": _whole(value)} | of_pairs)
    types = {name: int if name.endswith("pairs") else float for name in COLUMNS[3:]}
    # As objects: pandas would make a float of every degree beside an axis of fractions.
    return pd.DataFrame(found, columns=[*COLUMNS], dtype=object).astype(types)


def _whole(value: Any) -> Any:
    """The value of an axis, a whole number as an int: 0 of an axis of fractions."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _ratios(speed: NDArray[np.float64], memory: NDArray[np.float64]) -> dict[str, Any]:
    known, memory = supported_median(speed), memory[np.isfinite(memory)]
    return {
        "pairs": len(speed),
        **_summary(speed),
        "interval_low": known and known.low,
        "interval_high": known and known.high,
        **{f"memory_{name}": value for name, value in {"pairs": len(memory), **_summary(memory)}.items()},
    }


def _summary(ratios: NDArray[np.float64]) -> dict[str, float]:
    if not len(ratios):
        return {}
    return {"median": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max())}
