"""Changes between matched points beyond noise: throughput, peak memory, outcomes, losses.

All functions start from `analysis.compare.matching.Matching.pairs`. Ratios are B over A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np
import pandas as pd

from analysis.rows import labels
from analysis.rows.labels import DOCUMENTS, ROUTING
from analysis.rows.stats import median_interval
from results.statistics.agreement import TOLERANCES, largest_difference
from results.text.numbers import plural
from workloads.spec.updates.words import UPDATE_FIELDS

FASTER, SLOWER, SAME = "faster", "slower", "within noise"
DIFFERS, UNKNOWN, UNFINISHED = "differs, spread unknown", "cannot say", "not finished in both"
CLASSES = (FASTER, SLOWER, SAME, DIFFERS, UNKNOWN, UNFINISHED)
DEFAULT_THRESHOLD = 0.05
"""Change of throughput that is reported if the spread of runs is unknown, as a fraction."""
LOUDEST = 0.5
"""Largest estimated noise at which changes are judged. If equal runs differ by more, too little is known of either side
to call a change real, or to call it none."""
GRANULARITY_BYTES = {"allocated": 2 * 2**20, "reserved": 20 * 2**20}
"""Differences up to this come from the allocator: PyTorch's caching allocator takes 2 MiB from the device for small
blocks and at least 20 MiB for large ones, and splits them into blocks (``kSmallBuffer`` and ``kLargeBuffer``)."""
_COMPARED = ("losses", "grad_norms")
SAME_NUMBERS = (
    *("global_batch_size", "seq_len", "seed", "precision", "vocab_size", "num_layers", "hidden_size"),
    *("grad_reduce", "optimizer", "optimizer_states", "master_weights"),
    *ROUTING,
    DOCUMENTS,
)
"""Settings that change the losses; losses are not compared if partners may differ in one of them."""
AXES = (
    *("model", "world_size", "dp", "zero_stage", "tp", "cp", "pp", "ep", "etp", "micro_batch_size", "num_microbatches"),
    *("seq_len", "recompute", "recompute_every", "pp_schedule", "virtual_stages", "precision", "attention", "compile"),
    "recurrence",
    "cuda_graph",
    "activation_offload",
    "gradient_accumulation_fusion",
    *UPDATE_FIELDS,
    DOCUMENTS,
    "document_balance",
    *ROUTING,
)
"""Axes by which changes are grouped."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative change of throughput that counts as no change."""

    fraction: float
    why: str
    """Sentence on the origin of the number."""
    asked: bool = False
    """Whether the user gave the number; it then also judges points of unknown spread."""

    @property
    def judges(self) -> bool:
        """Whether changes can be judged by it: the user gave it, or it is at most `LOUDEST`."""
        return self.asked or self.fraction <= LOUDEST


@dataclass(frozen=True, slots=True)
class MemoryKind:
    name: str
    """``allocated`` or ``reserved``."""

    @property
    def granularity_bytes(self) -> int:
        return GRANULARITY_BYTES[self.name]


def noise_of(a: pd.DataFrame, b: pd.DataFrame, asked: float | None = None) -> Noise:
    """Noise of two frames of `matching.points`, from repeats and from timed steps; ``asked``, a fraction, replaces it.

    From repeats: the relative difference below which 95 % of the pairs of runs of one point stay. From timed steps: the
    median over runs of slowest over fastest minus 1, at the upper end of its bootstrap interval. The larger one counts.
    """
    if asked is not None:
        return Noise(asked, f"Noise: {percent(asked)}, as asked.", asked=True)
    reasons, fraction = [], 0.0
    pairs = [
        abs(log(one / two))
        for side in (a, b)
        for rates in side["rates"]
        for one, two in combinations((rate for rate in rates if rate > 0), 2)
    ]
    if pairs:
        fraction = float(np.quantile(pairs, 0.95))
        reasons.append(f"95 % of {plural(len(pairs), 'pair')} of repeated runs differ by less than {percent(fraction)}")
    spread = median_interval([*a["step_spread"], *b["step_spread"]])
    if spread is not None:
        typical = spread.high if spread.high is not None else spread.median
        fraction = max(fraction, typical)
        interval = "" if spread.low is None else f", 95 % interval {percent(spread.low)} to {percent(typical)}"
        reasons.append(
            f"the timed steps of a run typically spread by {percent(spread.median)} (median of "
            f"{plural(spread.n, 'point')}{interval})"
        )
    if not reasons:
        return Noise(
            DEFAULT_THRESHOLD,
            "Noise: unknown, because runs have one timed step (or no recorded spread) and no repeats. Changes above "
            f"{percent(DEFAULT_THRESHOLD)} are listed as differing, none as faster or slower; --noise "
            "PERCENT sets the noise.",
        )
    unseen = "" if pairs else " Neither side has repeats, so variation between runs is not included."
    noise = Noise(fraction, f"Noise: {percent(fraction)}; {'; '.join(reasons)}.{unseen}")
    if noise.judges:
        return noise
    return Noise(
        fraction,
        f"{noise.why} That is more than {percent(LOUDEST)}: no change of throughput is judged. Runs with more timed "
        "steps or repeats may be steadier; --noise PERCENT sets the noise.",
    )


def memory_kind(pairs: pd.DataFrame) -> MemoryKind:
    """The kind of peak that both sides have for more pairs; allocated memory if equal."""
    known = {
        kind: int((pairs[f"peak_{kind}_a"].notna() & pairs[f"peak_{kind}_b"].notna()).sum())
        for kind in GRANULARITY_BYTES
    }
    return MemoryKind("reserved" if known["reserved"] > known["allocated"] else "allocated")


def judged(pairs: pd.DataFrame, noise: Noise, compare_losses: bool = True) -> pd.DataFrame:
    """``pairs`` with ratios, changes and classes of throughput, peak memory and losses.

    ``ratio`` with ``ratio_low`` and ``ratio_high`` (every rate of one side's interval over every one of the other's);
    ``speed``: one of `CLASSES`. ``peak_change_bytes``, ``peak_ratio``, ``memory``: more, less, same or unknown.
    ``loss_difference``, ``norm_difference``: largest relative differences of the first steps; ``same_losses``: whether
    both are within `results.statistics.agreement.TOLERANCES`, None if they cannot be compared.
    """
    ratio = pairs["rate_b"] / pairs["rate_a"]
    low, high = pairs["rate_low_b"] / pairs["rate_high_a"], pairs["rate_high_b"] / pairs["rate_low_a"]
    both = (pairs["outcome_a"] == "ok") & (pairs["outcome_b"] == "ok")
    spread_known = low.notna() & high.notna()
    up = (ratio > 1 + noise.fraction) & ~(low <= 1)
    down = (ratio < 1 - noise.fraction) & ~(high >= 1)
    sure = spread_known | noise.asked
    loud = pd.Series(not noise.judges, index=pairs.index)
    threshold = max(noise.fraction, DEFAULT_THRESHOLD)
    speed = np.select(
        [~both, ratio.isna() | loud, sure & up, sure & down, sure, (ratio - 1).abs() > threshold],
        [UNFINISHED, UNKNOWN, FASTER, SLOWER, SAME, DIFFERS],
        UNKNOWN,
    )
    kind = memory_kind(pairs)
    peaks = {end: pairs[f"peak_{kind.name}_{end}"] for end in "ab"}
    change = peaks["b"] - peaks["a"]
    # If repeats differ among themselves, a change must exceed the ranges of both sides.
    repeat_range = sum(
        (pairs[f"peak_{kind.name}_high_{end}"] - pairs[f"peak_{kind.name}_low_{end}"] for end in "ab"), 0 * change
    )
    moved = change.abs() > repeat_range.clip(lower=kind.granularity_bytes)
    memory = np.select([change.isna(), moved & (change > 0), moved], ["unknown", "more", "less"], "same")
    result = pairs.assign(ratio=ratio, ratio_low=low, ratio_high=high, speed=speed)
    result = result.assign(peak_change_bytes=change, peak_ratio=peaks["b"] / peaks["a"], memory=memory)
    losses = [_loss_verdict(row) if compare_losses else _NOT_COMPARED for row in labels.records(pairs[[*_OF_LOSSES]])]
    return pd.concat([result, pd.DataFrame(losses, columns=list(_LOSS_COLUMNS), index=result.index)], axis=1)


def transitions(pairs: pd.DataFrame) -> pd.DataFrame:
    """Number of pairs by A's outcome (rows) and B's (columns)."""
    return pd.crosstab(pairs["outcome_a"], pairs["outcome_b"])


def changed_outcomes(pairs: pd.DataFrame) -> pd.Series:
    """Number of pairs whose outcome changed, by (A's, B's), most frequent first."""
    changed = pairs[pairs["outcome_a"] != pairs["outcome_b"]]
    return changed.groupby(["outcome_a", "outcome_b"]).size().sort_values(ascending=False, kind="stable")


def by_axis(pairs: pd.DataFrame) -> pd.DataFrame:
    """Changes for each value of each of `AXES` that has several: one row per value, from judged ``pairs`` that
    finished.

    Columns: medians of the ratios of throughput (``ratio``, with its bootstrap interval) and of peaks (``peak_ratio``);
    how many are faster, slower, need more and less; ``explains`` and ``explains_peak``: how much of the order of the
    ratios the axis's values explain (see `_explained`). An axis in which partners differ is left out.
    """
    rows = pairs[(pairs["outcome_a"] == "ok") & (pairs["outcome_b"] == "ok") & pairs["ratio"].notna()]
    table_rows = []
    for axis in AXES:
        values = rows[f"{axis}_a"]
        groups = rows.groupby(f"{axis}_a", sort=True)
        if groups.ngroups < 2 or not values.eq(rows[f"{axis}_b"]).all():
            continue
        explains = {name: _explained(rows[column], values) for name, column in _EXPLAINED.items()}
        for value, group in groups:
            ratio, peak = median_interval(group["ratio"]), median_interval(group["peak_ratio"])
            assert ratio is not None
            counts = {name: int((group[column] == name).sum()) for name, column in _COUNTED.items()}
            table_rows.append(
                {"axis": axis, "value": value, "points": len(group), "ratio": ratio.median, "ratio_low": ratio.low}
                | {"ratio_high": ratio.high, "peak_ratio": np.nan if peak is None else peak.median}
                | counts
                | explains
            )
    columns = ["axis", "value", "points", "ratio", "ratio_low", "ratio_high", "peak_ratio", *_COUNTED, *_EXPLAINED]
    return pd.DataFrame(table_rows, columns=columns)


_COUNTED = {FASTER: "speed", SLOWER: "speed", "more": "memory", "less": "memory"}
_EXPLAINED = {"explains": "ratio", "explains_peak": "peak_ratio"}
_OF_LOSSES = ("losses_a", "losses_b", "grad_norms_a", "grad_norms_b", "precision_a")
_LOSS_COLUMNS = ("loss_difference", "norm_difference", "same_losses")
_NOT_COMPARED: tuple[float | None, float | None, bool | None] = (None, None, None)


def _loss_verdict(row: dict[str, object]) -> tuple[float | None, float | None, bool | None]:
    loss, norm = (largest_difference(_steps(row[f"{name}_b"]), _steps(row[f"{name}_a"])) for name in _COMPARED)
    tolerance = TOLERANCES.get(str(row["precision_a"]))
    if tolerance is None or (loss is None and norm is None):
        return loss, norm, None
    within = [
        difference <= allowed
        for difference, allowed in zip((loss, norm), tolerance, strict=True)
        if difference is not None
    ]
    return loss, norm, all(within)


def _steps(values: object) -> Sequence[float]:
    """Values of a list column's cell; empty if it is missing."""
    return list(values) if isinstance(values, (list, tuple, np.ndarray)) else []


def _explained(values: pd.Series, groups: pd.Series) -> float:
    """Share of the variance of the values' ranks that lies between the groups, adjusted for their number (adjusted R²).

    Ranks keep a few outliers from deciding. NaN with fewer than three values per group, or if all values are equal.
    """
    known = values.notna() & np.isfinite(values)
    values, groups = values[known].rank(), groups[known]
    total, count, kinds = float(((values - values.mean()) ** 2).sum()), len(values), groups.nunique()
    if total <= 0 or count < 3 * kinds:
        return float("nan")
    within = float(((values - values.groupby(groups).transform("mean")) ** 2).sum())
    return 1 - within / total * (count - 1) / (count - kinds)


def change(ratio: float | None) -> str:
    """A ratio as a signed change: 1.039 is ``+3.9 %``; below 0.1 % with one significant digit."""
    if ratio is None or not np.isfinite(ratio):
        return "–"
    percent = 100 * (ratio - 1)
    if abs(percent) < 5e-4:
        return "0 %"
    text = f"{abs(percent):.1g}" if abs(percent) < 0.095 else f"{abs(percent):.1f}"
    return f"{'+' if percent > 0 else '−'}{text} %"


def interval(low: float | None, high: float | None) -> str:
    """An interval of ratios as signed changes: ``+1.4 % to +5.8 %``; a dash if an end is unknown."""
    if low is None or high is None or not (np.isfinite(low) and np.isfinite(high)):
        return "–"
    return f"{change(low)} to {change(high)}"


def percent(fraction: float) -> str:
    """A fraction as a percentage of two digits, or as a whole one."""
    return f"{round(100 * fraction):,} %" if fraction >= 1 else f"{100 * fraction:.2g} %"


def leading_axes(table: pd.DataFrame, least: float = 0.1, most: int = 2) -> Sequence[str]:
    """Axes of `by_axis` that explain most of the changes: the best for throughput, then the best for memory. Axes below
    ``least`` are left out."""
    if table.empty:
        return []
    best = table.drop_duplicates("axis").set_index("axis")
    leaders: list[str] = []
    for column in _EXPLAINED:
        ordered = best[column][best[column] >= least].sort_values(ascending=False, kind="stable")
        leaders += [str(axis) for axis in ordered.index[:1] if axis not in leaders]
    return leaders[:most]
