"""What one choice does by itself: ratios of throughput and memory over pairs of runs that agree in everything else.

A degree doubled on the same devices at the same batch takes ranks from data parallelism, and a larger micro-batch takes
micro-batches: `analysis.rows.pairs.MAKE_ROOM` may differ there, nothing else. Each doubling stands by itself, since tp
from 1 to 2 and from 8 to 16 are not one effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.rows import metrics, pairs
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MIN_FOR_INTERVAL, MedianInterval, supported_median

FEWEST = MIN_FOR_INTERVAL
"""With fewer pairs an effect is listed as too few, without a number."""
COLUMNS = (
    *("effect", "choice", "from", "to", "pairs", "enough", "slower_share"),
    *("throughput_ratio", "throughput_low", "throughput_high", "throughput_q05", "throughput_q95"),
    *("memory_pairs", "memory_ratio", "memory_low", "memory_high", "memory_q05", "memory_q95", "memory_kind"),
)
_BAND = (0.05, 0.95)
Values = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Effect:
    """``column`` going from one value to another, while ``free`` may differ too."""

    name: str
    column: str
    before: int | str
    after: int | str
    free: tuple[str, ...] = ()


def _effects(rows: pd.DataFrame) -> Iterator[Effect]:
    """Every choice that is asked for, and each doubling that the rows could hold, in the order of the figure."""
    for stage in (1, 2, 3):
        yield Effect(f"ZeRO {stage - 1} → {stage}", "zero_stage", stage - 1, stage)
    for kind in ("selective", "full"):
        yield Effect(f"recompute none → {kind}", "recompute", "none", kind)
    precisions = sorted(name for name in rows["precision"].dropna().unique() if str(name).startswith("fp8"))
    for precision in precisions or ["fp8"]:
        yield Effect(f"bf16 → {precision.replace('_', ' ')}", "precision", "bf16", precision)
    modes = sorted(mode for mode in rows["compile"].dropna().unique() if mode != "none")
    for mode in modes or ["block"]:
        yield Effect("eager → compiled" + (f" ({mode})" if len(modes) > 1 else ""), "compile", "none", mode)
    yield Effect("GPipe → 1F1B", "pp_schedule", "gpipe", "1f1b")
    for axis, names in {
        "cp": pairs.MAKE_ROOM,
        "ep": (),
        "tp": (*pairs.MAKE_ROOM, "sequence_parallel"),
        "pp": (*pairs.MAKE_ROOM, "pp_schedule"),
        "micro_batch_size": ("num_microbatches",),
    }.items():
        present = {int(value) for value in rows[axis].dropna().unique()}
        shown = "micro-batch" if axis == "micro_batch_size" else axis
        for degree in sorted(value for value in present if 2 * value in present) or [1]:
            yield Effect(f"{shown} {degree} → {2 * degree}", axis, degree, 2 * degree, names)


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each effect, `COLUMNS`: medians of after over before with bootstrap intervals and the 5 to 95 %
    range of the pairs. With fewer than `FEWEST` pairs there is no ratio. Pairs that share a run are not independent,
    so an interval is at its narrowest."""
    rows = _once(pairs.comparable(frame))
    memory = metrics.memory_column(frame)
    rates, peaks = (rows[name].to_numpy(dtype=float) for name in (metrics.RANK_BY, memory))
    found = [
        _summary(effect, rates[two] / rates[one], peaks[two] / peaks[one], metrics.MEMORY_NAMES[memory])
        for effect, one, two in _pairs(rows)
    ]
    return pd.DataFrame(found, columns=[*COLUMNS])


def _once(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each setting: of runs that agree in everything (seeds may differ), the middle one by throughput.

    Else two runs before and two after would count as four pairs.
    """
    rows = rows.sort_values([metrics.RANK_BY, "attempt_id"], kind="stable")
    groups = rows.groupby(pairs.Matching(rows).codes([]))[metrics.RANK_BY]
    return rows[groups.cumcount() == (groups.transform("size") - 1) // 2]


def _pairs(rows: pd.DataFrame) -> Iterator[tuple[Effect, Places, Places]]:
    """Each effect with the places of the runs before and after in ``rows`` (of `pairs.comparable`)."""
    matching = pairs.Matching(rows)
    depth, schedule = rows["pp"].to_numpy(), rows["pp_schedule"].to_numpy()
    for effect in _effects(rows):
        before, after = rows[effect.column] == effect.before, rows[effect.column] == effect.after
        if effect.column == "zero_stage":  # with one rank there is nothing to shard
            before, after = before & (rows["dp"] > 1), after & (rows["dp"] > 1)
        one, two = matching.pairs(before, after, [effect.column, *effect.free])
        if effect.column == "pp":  # one stage has no schedule; with several both have the same, 1F1B from one stage
            same = np.where(depth[one] == 1, schedule[two] == "1f1b", schedule[one] == schedule[two])
            one, two = one[same], two[same]
        yield effect, one, two


def _summary(effect: Effect, speed: Values, memory: Values, memory_kind: str) -> dict[str, object]:
    speed, memory = speed[np.isfinite(speed)], memory[np.isfinite(memory)]
    known = supported_median(speed, FEWEST)
    return {
        "effect": effect.name,
        "choice": effect.column,
        "from": str(effect.before),
        "to": str(effect.after),
        "pairs": len(speed),
        "enough": known is not None,
        "slower_share": float((speed < 1).mean()) if known is not None else None,
        **_columns("throughput", speed, known),
        "memory_pairs": len(memory),
        **_columns("memory", memory, supported_median(memory, FEWEST)),
        "memory_kind": memory_kind,
    }


def _columns(name: str, values: Values, found: MedianInterval | None) -> dict[str, float | None]:
    ends = dict.fromkeys(f"{name}_{end}" for end in ("ratio", "low", "high", "q05", "q95"))
    if found is None:
        return {**ends}
    q05, q95 = np.quantile(values, _BAND)
    return dict(zip(ends, (found.median, found.low, found.high, float(q05), float(q95)), strict=True))
