"""How far a throughput moves by chance, and which layouts cannot be told from the fastest one.

The noise of a layout is the relative standard deviation of one run's throughput. It comes from repeats, independent
runs of the same layout on the same kind of machine: what changes from run to run (placement, clocks, the network's
other users) is in them. Where a layout has too few, it is the larger of what repeats of other layouts show and the
spread of one timed step; that is not averaged over the steps of a run, which share all that changes between runs.
Where neither is known, the noise is null.

A winner is the set of all layouts that may be the fastest: those behind the best by at most what noise explains. With
k layouts each is compared at a level of 0.05 / (k - 1), so that the set holds the truly fastest one in at least 95 % of
sweeps (subset selection: Gupta 1965, Technometrics 7, 225; the levels are Bonferroni's).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from results.text.numbers import format_percent

CONFIDENCE = 0.95
FEWEST_FREEDOM = 4
"""Degrees of freedom below which a standard deviation says too little: five repeats of one layout have four."""
COLUMNS = ("repeats", "noise", "noise_freedom", "noise_from")
"""``noise`` is relative, of one run; ``noise_freedom`` are the degrees of freedom it stands on; ``noise_from`` says in
words what it was worked out from."""
USED = (
    *("experiment_id", "config_json", "timed_steps", "step_time_min_s", "step_time_max_s"),
    *("device_name", "driver_version", "torch_version", "nccl_version"),
)
"""Columns of runs that this module reads besides those of the groups."""
_MACHINE = ("device_name", "driver_version", "torch_version", "nccl_version")
"""Runs of one layout that differ in these are one layout, but what sets them apart is not chance."""


def layout_key(runs: pd.DataFrame) -> pd.Series:
    """A text for each run, equal for runs of one layout: everything that its experiment fixes but the seed.

    Rows of other engines do not hold their experiment in full: theirs is the ``experiment_id``.
    """
    return runs["config_json"].str.replace(r'"seed": -?\d+', "", regex=True).fillna(runs["experiment_id"])


def independent(runs: pd.DataFrame, value: str) -> pd.Series:
    """Which of ``runs`` were measured for themselves, so that each of them is a repeat of its layout.

    Other seeds, other sweeps and points that a user has had run again are. Two kinds of rows are not. Of a point that
    two pilots ran at once, because one of them had been taken for dead, the first run counts (the row of the other has
    ``repeat_of``): the second may have shared its devices with it. And a rehearsal takes over the stages that its sweep
    has rehearsed before, so that a further row of the same layout has the throughput of the first to the last digit; an
    estimate without a device always has.

    ``runs`` are finished runs with ``_layout``, ``method``, ``repeat_of`` and a throughput ``value``.
    """
    first = runs["repeat_of"].isna()
    again = runs.assign(_first=first).duplicated(["_layout", "method", value, "_first"])
    return first & ~(again & (runs["method"] != "measured"))


def of_layouts(runs: pd.DataFrame, group: list[str], value: str) -> pd.DataFrame:
    """`COLUMNS` by layout: the index has the values of ``runs["_layout"]``.

    ``runs`` are finished runs that are `independent`, with `USED`, ``_layout``, the columns of ``group`` (the same for
    all runs of a layout) and a throughput ``value``.

    A layout with `FEWEST_FREEDOM` of its own has its own noise. The others take what is typical of their group: the
    median over its layouts, which one odd run does not move; else that of other groups. Repeats of other layouts may
    have run within a minute and on fewer devices, so that borrowed noise counts only where the timed steps of the
    layout itself, or of its group, do not show more.
    """
    layouts = runs.groupby("_layout", sort=False)
    found = layouts[group].first().assign(repeats=layouts.size())
    if found.empty:
        return found.assign(noise=np.nan, noise_freedom=np.nan, noise_from=None)[[*COLUMNS]]
    repeats, steps = (
        found[group].assign(variance=variance, freedom=freedom)
        for variance, freedom in (_of_repeats(runs, value), _of_steps(runs))
    )
    own = _first_known((_enough(repeats), "repeats of this layout"))
    borrowed = _first_known(
        (_typical(repeats, group), "repeats of its model and size"),
        (_typical(repeats.assign(_all=0), ["_all"]), "repeats of other models and sizes"),
    )
    timed = _first_known(
        (_enough(steps), "its timed steps"), (_typical(steps, group), "timed steps of its model and size")
    )
    # Few steps make no noise of their own, but show that borrowed noise is too small.
    shown = timed.where(timed["noise"].notna(), _first_known((steps, "its timed steps")))
    louder = shown["noise"] > borrowed["noise"]
    shown["noise_from"] += ", which differ more than " + borrowed["noise_from"]
    rest = shown.where(louder, borrowed.where(borrowed["noise"].notna(), timed))
    return found[["repeats"]].join(own.where(own["noise"].notna(), rest))[[*COLUMNS]]


def within(rows: pd.DataFrame, value: str, group: list[str]) -> pd.Series:
    """Which rows are behind the first one of their group by no more than noise explains; NA where that is not known.

    ``rows`` come best first in each group, by ``value``, with `COLUMNS`. The first row itself is among them.
    """
    groups = rows.groupby(group)
    first = groups[[value, "noise", "noise_freedom", "repeats"]].transform("first")
    others = (groups[value].transform("size") - 1).clip(lower=1)
    spread = pair_spread(first, rows)
    level = 1 - (1 - CONFIDENCE) / others
    reach = spread * quantiles(level.to_numpy(dtype=float), fewest_freedom(first, rows))
    told = (log(first[value] / rows[value]) <= reach).astype("boolean").mask(reach.isna())
    return told.mask(groups.cumcount() == 0, True)


def pair_spread(one: pd.DataFrame, two: pd.DataFrame) -> pd.Series:
    """Standard deviation of the logarithm of the ratio of two pooled throughputs, row by row; NaN where not known."""
    variance = one["noise"] ** 2 * _of_median(one["repeats"]) + two["noise"] ** 2 * _of_median(two["repeats"])
    return variance**0.5


def fewest_freedom(one: pd.DataFrame, two: pd.DataFrame) -> NDArray[np.float64]:
    """The smaller degrees of freedom of two noises, row by row."""
    fewest: NDArray[np.float64] = np.fmin(*(rows["noise_freedom"].to_numpy(dtype=float) for rows in (one, two)))
    return fewest


def log(values: pd.Series) -> pd.Series:
    """Natural logarithms; NaN where a value is not above 0."""
    return pd.Series(np.log(values.where(values > 0).to_numpy(dtype=float)), index=values.index)


def quantiles(level: NDArray[np.float64], freedom: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quantiles of Student's t. NaN where ``freedom`` is not known."""
    asked = list(zip(level.tolist(), freedom.tolist(), strict=True))
    known = {pair: _student(*pair) for pair in set(asked) if not math.isnan(pair[1])}
    return np.array([known.get(pair, math.nan) for pair in asked], dtype=float)


def describe(row: Any) -> str:
    """``noise 0.8 %, from its timed steps``, of a row with `COLUMNS`."""
    if row["noise_from"] is None or pd.isna(row["noise"]):
        return "noise not known"
    return f"noise {format_percent(row['noise'])}, from {row['noise_from']}"


def _of_repeats(runs: pd.DataFrame, value: str) -> tuple[pd.Series, pd.Series]:
    """Variance of the logarithm of the throughput within runs of one layout and machine, and its degrees of freedom."""
    machines = [name for name in (*_MACHINE, "network_regime") if name in runs]
    rates = log(runs[value])
    same = [runs["_layout"], *(runs[name] for name in machines)]
    apart = (rates - rates.groupby(same, dropna=False).transform("mean")) ** 2
    kinds = runs.drop_duplicates(["_layout", *machines]).groupby("_layout", sort=False).size()
    layouts = runs["_layout"]
    freedom = rates.groupby(layouts, sort=False).count() - kinds
    return apart.groupby(layouts, sort=False).sum() / freedom.where(freedom > 0), freedom


def _of_steps(runs: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The same from the fastest and the slowest timed step of each run.

    The expected range of n normal values is 2 z((n - 0.375) / (n + 0.25)) standard deviations (Blom 1958).
    """
    steps = runs["timed_steps"].where(runs["timed_steps"] > 1).astype(float)
    widths = {n: 2 * NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) for n in steps.dropna().unique()}
    spread = log(runs["step_time_max_s"] / runs["step_time_min_s"]) / steps.map(widths)
    freedom = (steps - 1).where(spread.notna())
    layouts = runs["_layout"]
    summed = (spread**2 * freedom).groupby(layouts, sort=False).sum()
    whole = freedom.groupby(layouts, sort=False).sum()
    return summed / whole.where(whole > 0), whole


def _typical(table: pd.DataFrame, group: list[str]) -> pd.DataFrame:
    """Of the group of each row: the median of the variances, and all degrees of freedom together; NaN below
    `FEWEST_FREEDOM`.

    A variance of few values is mostly below the true one: its median is that of chi-squared over its degrees of
    freedom, (1 - 2 / 9 f)^3 (Wilson and Hilferty 1931), by which each is divided.
    """
    known = table["variance"].notna() & (table["freedom"] > 0)
    freedom = table["freedom"].where(known).astype(float)
    fair = table["variance"].where(known) / (1 - 2 / (9 * freedom)) ** 3
    groups = table[group].assign(variance=fair, freedom=freedom).groupby(group)
    whole = groups["freedom"].transform("sum")
    enough = whole >= FEWEST_FREEDOM
    return pd.DataFrame(
        {"variance": groups["variance"].transform("median").where(enough), "freedom": whole.where(enough)}
    )


def _enough(table: pd.DataFrame) -> pd.DataFrame:
    """Variances that stand on `FEWEST_FREEDOM` of their own; NaN for the others."""
    return table[["variance", "freedom"]].where(table["freedom"] >= FEWEST_FREEDOM)


def _first_known(*choices: tuple[pd.DataFrame, str]) -> pd.DataFrame:
    """`COLUMNS` but ``repeats``, by layout: of the first of ``choices`` (variances, and what they are from) that has a
    variance."""
    index = choices[0][0].index
    found = pd.DataFrame({"noise": np.nan, "noise_freedom": np.nan, "noise_from": None}, index=index)
    found["noise_from"] = found["noise_from"].astype(object)
    for table, source in choices:
        new = found["noise"].isna() & table["variance"].notna()
        found.loc[new, "noise"] = table.loc[new, "variance"] ** 0.5
        found.loc[new, "noise_freedom"] = table.loc[new, "freedom"].astype(float)
        found.loc[new, "noise_from"] = source
    return found


def _of_median(repeats: pd.Series) -> pd.Series:
    """Variance of the median of so many normal values, over that of one: pi/2 / (n + pi/2 - 1), within 3 % for odd
    n."""
    return (math.pi / 2) / (repeats + math.pi / 2 - 1)


def _student(level: float, freedom: float) -> float:
    """By the expansion 26.7.5 of Abramowitz and Stegun: within 1 % for four degrees of freedom up to a level of
    0.998."""
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
