"""The verdict on the change between two matched points, with its reason in a few words.

`decide` checks in this order, and the first match counts:

1. The point finished on neither side: no change and no verdict.
2. *method changed*: the two numbers were not obtained in the same way (`METHOD`), so neither a difference nor its
   absence says anything about training.
3. *noise*: the throughput changed by no more than noise, or the point's interval includes no change.
4. *hardware changed*: the machine differs (`HARDWARE`), its power limit differs, or its clocks account for the whole
   change.
5. *unknown*: the spread of runs is unknown, or so large that no change can be judged (`moved.LOUDEST`); a run was
   ended from outside; or B is faster with other losses.
6. *regression* or *improvement*: slower or faster, no longer finishes or finishes now. The reason names what changed in
   the software (`SOFTWARE`): a slower release of PyTorch is a regression.

A fact that only one side records is not a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare import moved
from analysis.compare.facts import HARDWARE, METHOD, SOFTWARE
from analysis.compare.moved import change, percent
from analysis.rows import labels
from results.text.numbers import format_setting, listed, plural

REGRESSION, IMPROVEMENT, NOISE, UNKNOWN = "regression", "improvement", "noise", "unknown"
METHOD_CHANGED, HARDWARE_CHANGED = "method changed", "hardware changed"
VERDICTS = (REGRESSION, IMPROVEMENT, METHOD_CHANGED, HARDWARE_CHANGED, NOISE, UNKNOWN)
FAULTS = ("oom", "hang", "timeout", "crash", "nccl_error", "diverged")
"""Outcomes that a point causes itself, not the machine or the user."""
LIMITS_APART, CLOCKS_APART = 0.01, 0.02
"""Relative differences of power limits and of mean SM clocks up to which they count as equal."""
_LONGEST = 100
"""Length in characters up to which a difference is shown with its values."""
_WORSE, _BETTER, _STILL, _OPEN = "worse", "better", "still", "open"


def with_verdicts(pairs: pd.DataFrame, noise: moved.Noise) -> pd.DataFrame:
    """``pairs`` of `moved.judged` with ``verdict`` (of `VERDICTS`; None if it finished on neither side) and
    ``verdict_reason``."""
    decisions = [decide(row, noise) for row in labels.records(pairs)]
    columns = ("verdict", "verdict_reason")
    return pairs.assign(
        **{
            name: pd.Series([one[i] for one in decisions], index=pairs.index, dtype=object)
            for i, name in enumerate(columns)
        }
    )


def decide(pair: Mapping[str, Any], noise: moved.Noise) -> tuple[str | None, str]:
    """Verdict on one judged pair and its reason."""
    movement, what = _movement(pair, noise)
    if movement is None:
        return None, what
    if changed := differences(pair, METHOD):
        return METHOD_CHANGED, f"{listed(changed)}: the two numbers are not comparable"
    if movement == _STILL:
        return NOISE, what
    if changed := [*differences(pair, HARDWARE), *_limit(pair)]:
        return HARDWARE_CHANGED, f"{what}; {listed(changed)}"
    if clock := _clock(pair, noise):
        return HARDWARE_CHANGED, f"{what}; {clock}"
    if movement == _OPEN:
        return UNKNOWN, what
    other_losses = pair["same_losses"] is False
    if other_losses and movement == _BETTER:
        return UNKNOWN, f"{what}, but losses differ: B computes something else"
    reasons = [what, *(["losses differ, too"] if other_losses else []), *differences(pair, SOFTWARE)]
    return (REGRESSION if movement == _WORSE else IMPROVEMENT), "; ".join(reasons)


def counts(pairs: pd.DataFrame) -> list[tuple[str, int]]:
    """Number of pairs with each verdict, in the order of `VERDICTS`; verdicts without pairs are left out."""
    verdict_counts = pairs["verdict"].value_counts()
    return [(verdict, int(verdict_counts[verdict])) for verdict in VERDICTS if verdict in verdict_counts]


def sentence(pairs: pd.DataFrame) -> str | None:
    """``Verdicts on 12 matched points: 2 regression, 10 noise.``; None without a pair."""
    if pairs.empty:
        return None
    verdict_counts = [f"{count:,} {verdict}" for verdict, count in counts(pairs)]
    if rest := int(pairs["verdict"].isna().sum()):
        verdict_counts.append(f"{rest:,} finished on neither side")
    return f"Verdicts on {plural(len(pairs), 'matched point')}: {listed(verdict_counts, 9)}."


def differences(pair: Mapping[str, Any], facts: Mapping[str, str]) -> list[str]:
    """``driver A → B`` for each of ``facts`` that both sides of a pair record and that differs."""
    changes = []
    for column, word in facts.items():
        one, two = pair.get(f"{column}_a"), pair.get(f"{column}_b")
        if _known(one) and _known(two) and one != two:
            values = f"{word} {_short(column, one)} → {_short(column, two)}"
            changes.append(values if len(values) <= _LONGEST else f"{word} differ")
    return changes


def _movement(pair: Mapping[str, Any], noise: moved.Noise) -> tuple[str | None, str]:
    """Direction of a pair's change (None: finished on neither side) and its description."""
    before, after = str(pair["outcome_a"]), str(pair["outcome_b"])
    names = labels.OUTCOME_NAMES
    if before != "ok" and after != "ok":
        return None, f"finished on neither side ({names.get(before, before)}, {names.get(after, after)})"
    if after != "ok":
        ended = names.get(after, after)
        if after in FAULTS:
            return _WORSE, f"no longer finishes: {ended}"
        return _OPEN, f"did not finish in B ({ended}), which the layout did not cause"
    if before != "ok":
        ended = names.get(before, before)
        if before in FAULTS:
            return _BETTER, f"finishes now (before: {ended})"
        return _OPEN, f"did not finish in A ({ended}), which the layout did not cause"
    if not np.isfinite(pair["ratio"]):
        return _OPEN, "no throughput on one side"
    moving, band = f"throughput {change(pair['ratio'])}", f"noise of ± {percent(noise.fraction)}"
    if not noise.judges:
        return _OPEN, f"{moving}, not judged: {band}, more than {percent(moved.LOUDEST)}, would hide nearly any change"
    match pair["speed"]:
        case moved.SLOWER | moved.FASTER as speed:
            return (_WORSE if speed == moved.SLOWER else _BETTER), f"{moving}, beyond {band}"
        case moved.SAME if abs(pair["ratio"] - 1) <= noise.fraction:
            return _STILL, f"{moving}, within {band}"
        case moved.SAME:
            low, high = change(pair["ratio_low"]), change(pair["ratio_high"])
            return _STILL, f"{moving}, but its interval ({low} to {high}) includes no change"
    return _OPEN, f"{moving}, of unknown spread: one timed step and no repeat"


def _limit(pair: Mapping[str, Any]) -> list[str]:
    one, two = _number(pair, "power_limit_w_a"), _number(pair, "power_limit_w_b")
    if one is None or two is None or abs(two / one - 1) <= LIMITS_APART:
        return []
    return [f"power limit {one:,.0f} → {two:,.0f} W"]


def _clock(pair: Mapping[str, Any], noise: moved.Noise) -> str | None:
    """Sentence on the clocks if they account for the change up to noise; otherwise None."""
    one, two, ratio = (_number(pair, name) for name in ("sm_clock_mhz_a", "sm_clock_mhz_b", "ratio"))
    if one is None or two is None or ratio is None:
        return None
    clocks = two / one
    if abs(clocks - 1) <= CLOCKS_APART or (clocks > 1) != (ratio > 1):
        return None
    within = abs(ratio / clocks - 1) <= noise.fraction
    beyond = (clocks < ratio) == (clocks < 1)  # the clocks changed more than the throughput
    return f"SM clock {one:,.0f} → {two:,.0f} MHz accounts for it" if within or beyond else None


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and np.isnan(value)) and value is not pd.NA


def _number(pair: Mapping[str, Any], name: str) -> float | None:
    value = pair.get(name)
    return float(value) if value is not None and _known(value) else None


def _short(column: str, value: Any) -> str:
    if column == "git_commit":
        return ", ".join(commit[:8] for commit in str(value).split(", "))
    return format_setting(value)
