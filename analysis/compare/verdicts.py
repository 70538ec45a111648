"""What a movement between two matched points means: one verdict each, with its reason in a few words.

`decide` asks in this order, and the first answer counts:

1. The point finished on neither side: there is no movement and no verdict.
2. *method changed*: the two numbers were not obtained in one way (`METHOD`), so neither a difference nor its absence
   says anything about training.
3. *noise*: the throughput moved by no more than noise, or the point's own interval holds no change.
4. *hardware changed*: the machine is another one (`HARDWARE`), its power limit differs, or its clocks account for all
   that moved.
5. *unknown*: how far runs spread is not known; a run was ended from outside; or B is faster with other losses.
6. *regression* or *improvement*: slower or faster, no longer finishes or finishes now. What changed in the software
   (`SOFTWARE`) is named in the reason: a slower release of PyTorch is a regression.

A fact that one side does not record is no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare import moved
from analysis.compare.facts import HARDWARE, METHOD, SOFTWARE
from analysis.compare.moved import change
from analysis.rows import labels
from results.text.numbers import listed, plural

REGRESSION, IMPROVEMENT, NOISE, UNKNOWN = "regression", "improvement", "noise", "unknown"
METHOD_CHANGED, HARDWARE_CHANGED = "method changed", "hardware changed"
VERDICTS = (REGRESSION, IMPROVEMENT, METHOD_CHANGED, HARDWARE_CHANGED, NOISE, UNKNOWN)
FAULTS = ("oom", "hang", "timeout", "crash", "nccl_error", "diverged")
"""Ways to fail that are the point's own, not the machine's or the user's."""
LIMITS_APART, CLOCKS_APART = 0.01, 0.02
"""Relative differences of power limits and of mean SM clocks up to which they count as the same."""
_LONGEST = 100
"""Characters of a difference that is said with its values."""
_WORSE, _BETTER, _STILL, _OPEN = "worse", "better", "still", "open"


def with_verdicts(pairs: pd.DataFrame, noise: moved.Noise) -> pd.DataFrame:
    """``pairs`` of `moved.judged` with ``verdict`` (of `VERDICTS`; None where nothing finished) and
    ``verdict_reason``."""
    found = [decide(row, noise.fraction) for row in labels.records(pairs)]
    columns = ("verdict", "verdict_reason")
    return pairs.assign(
        **{
            name: pd.Series([one[i] for one in found], index=pairs.index, dtype=object)
            for i, name in enumerate(columns)
        }
    )


def decide(pair: Mapping[str, Any], noise: float) -> tuple[str | None, str]:
    """The verdict on one judged pair and its reason. ``noise``: relative change that is nothing."""
    movement, what = _movement(pair, noise)
    if movement is None:
        return None, what
    if changed := differences(pair, METHOD):
        return METHOD_CHANGED, f"{listed(changed)}: the two numbers are not of one kind"
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
        return UNKNOWN, f"{what}, but losses differ: B does not compute the same"
    told = [what, *(["losses differ, too"] if other_losses else []), *differences(pair, SOFTWARE)]
    return (REGRESSION if movement == _WORSE else IMPROVEMENT), "; ".join(told)


def counts(pairs: pd.DataFrame) -> list[tuple[str, int]]:
    """How many of the pairs have each verdict, in the order of `VERDICTS`; those without any are left out."""
    found = pairs["verdict"].value_counts()
    return [(verdict, int(found[verdict])) for verdict in VERDICTS if verdict in found]


def sentence(pairs: pd.DataFrame) -> str | None:
    """``Verdicts on 12 matched points: 2 regression, 10 noise.``; None without a pair."""
    if pairs.empty:
        return None
    told = [f"{count:,} {verdict}" for verdict, count in counts(pairs)]
    if rest := int(pairs["verdict"].isna().sum()):
        told.append(f"{rest:,} finished on neither side")
    return f"Verdicts on {plural(len(pairs), 'matched point')}: {listed(told, 9)}."


def differences(pair: Mapping[str, Any], facts: Mapping[str, str]) -> list[str]:
    """``driver A → B`` for each of ``facts`` that both sides of a pair record and that differs."""
    told = []
    for column, word in facts.items():
        one, two = pair.get(f"{column}_a"), pair.get(f"{column}_b")
        if _known(one) and _known(two) and one != two:
            values = f"{word} {_short(column, one)} → {_short(column, two)}"
            told.append(values if len(values) <= _LONGEST else f"{word} differ")
    return told


def _movement(pair: Mapping[str, Any], noise: float) -> tuple[str | None, str]:
    """Which way a pair moved (None: finished on neither side), and that in words."""
    before, after = str(pair["outcome_a"]), str(pair["outcome_b"])
    names = labels.OUTCOME_NAMES
    if before != "ok" and after != "ok":
        return None, f"finished on neither side ({names.get(before, before)}, {names.get(after, after)})"
    if after != "ok":
        ended = names.get(after, after)
        if after in FAULTS:
            return _WORSE, f"no longer finishes: {ended}"
        return _OPEN, f"did not finish in B ({ended}), which is not the layout's doing"
    if before != "ok":
        ended = names.get(before, before)
        if before in FAULTS:
            return _BETTER, f"finishes now (before: {ended})"
        return _OPEN, f"did not finish in A ({ended}), which is not the layout's doing"
    if not np.isfinite(pair["ratio"]):
        return _OPEN, "no throughput on one side"
    moving, band = f"throughput {change(pair['ratio'])}", f"noise of ± {100 * noise:.2g} %"
    match pair["speed"]:
        case moved.SLOWER | moved.FASTER as speed:
            return (_WORSE if speed == moved.SLOWER else _BETTER), f"{moving}, beyond {band}"
        case moved.SAME if abs(pair["ratio"] - 1) <= noise:
            return _STILL, f"{moving}, within {band}"
        case moved.SAME:
            low, high = change(pair["ratio_low"]), change(pair["ratio_high"])
            return _STILL, f"{moving}, but its own interval ({low} to {high}) holds no change"
    return _OPEN, f"{moving}, of unknown spread: one timed step and no repeat"


def _limit(pair: Mapping[str, Any]) -> list[str]:
    one, two = _number(pair, "power_limit_w_a"), _number(pair, "power_limit_w_b")
    if one is None or two is None or abs(two / one - 1) <= LIMITS_APART:
        return []
    return [f"power limit {one:,.0f} → {two:,.0f} W"]


def _clock(pair: Mapping[str, Any], noise: float) -> str | None:
    """What the clocks account for, where that leaves no more than noise of the movement."""
    one, two, ratio = (_number(pair, name) for name in ("sm_clock_mhz_a", "sm_clock_mhz_b", "ratio"))
    if one is None or two is None or ratio is None:
        return None
    clocks = two / one
    if abs(clocks - 1) <= CLOCKS_APART or (clocks > 1) != (ratio > 1):
        return None
    within = abs(ratio / clocks - 1) <= noise
    beyond = (clocks < ratio) == (clocks < 1)  # clocks moved further than the throughput
    return f"SM clock {one:,.0f} → {two:,.0f} MHz accounts for it" if within or beyond else None


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and np.isnan(value)) and value is not pd.NA


def _number(pair: Mapping[str, Any], name: str) -> float | None:
    value = pair.get(name)
    return float(value) if value is not None and _known(value) else None


def _short(column: str, value: Any) -> str:
    if column == "git_commit":
        return ", ".join(commit[:8] for commit in str(value).split(", "))
    return f"{value:g}" if isinstance(value, float) else str(value)
