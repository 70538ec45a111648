"""Noise of throughputs: how much they vary by chance, and which layouts cannot be distinguished from the fastest one.

The noise of a layout is the relative standard deviation of one run's throughput. It is computed from repeats:
independent runs of the same layout on the same kind of machine, which include everything that changes from run to run
(placement, clocks, other users of the network). If a layout has too few repeats, its noise is the larger of two values:
the noise of repeats of other layouts, and the spread of one timed step. The latter is not averaged over the steps of a
run, because they share all that changes between runs. If neither is known, the noise is null.

A winner is the set of all layouts that may be the fastest: those behind the best by at most what noise explains. With k
layouts each is compared at a level of 0.05 / (k - 1), so that the set holds the truly fastest one in at least 95 % of
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
"""Minimum degrees of freedom for a standard deviation to be used: five repeats of one layout have four."""
COLUMNS = ("repeats", "noise", "noise_freedom", "noise_from")
"""``noise`` is relative and of one run. ``noise_freedom`` is its number of degrees of freedom. ``noise_from`` describes
its source in words."""
USED = (
    *("experiment_id", "config_json", "timed_steps", "step_time_min_s", "step_time_max_s"),
    *("device_name", "driver_version", "torch_version", "nccl_version"),
)
"""Columns of runs that this module reads in addition to those of the groups."""
_MACHINE = ("device_name", "driver_version", "torch_version", "nccl_version")
"""Runs of one layout may differ in these columns, but the difference that they cause is not chance."""


def layout_key(runs: pd.DataFrame) -> pd.Series:
    """A text for each run that is equal for runs of one layout: all fields of its experiment except the seed.

    Rows of other programs do not hold their experiment in full; they use the ``experiment_id``. Rows that were written
    before a field existed lack it, but share the id of later rows of the same layout and seed, and so get their text.
    """
    codes, distinct = pd.factorize(runs["config_json"])  # repeats share a text, and equal texts are one object
    texts = pd.Series(distinct, dtype=runs["config_json"].dtype).str.replace(r'"seed": -?\d+', "", regex=True)
    text = pd.Series(texts.array.take(codes, allow_fill=True), index=runs.index).fillna(runs["experiment_id"])
    number, names = pd.factorize(text, sort=True)
    place = pd.Series(number, index=runs.index)
    of_id = place.groupby(runs["experiment_id"]).transform("min").fillna(place)
    return pd.Series(names.take(of_id.groupby(place).transform("min").to_numpy(dtype=int)), index=runs.index)


def independent(runs: pd.DataFrame, value: str) -> pd.Series:
    """Whether each of ``runs`` was measured independently, so that it is a repeat of its layout.

    Runs with other seeds, of other sweeps, and points that a user has run again are independent. Two kinds of rows are
    not:

    - If two pilots ran a point at the same time, because one of them had been taken for dead, only the first run counts
      (the other row has ``repeat_of``): the second may have shared its devices.
    - A rehearsal reuses stages that its sweep has rehearsed before, so a further row of the same layout has exactly the
      throughput of the first. An estimate without a device always has.

    ``runs`` are finished runs with ``_layout``, ``method``, ``repeat_of`` and a throughput ``value``.
    """
    first = runs["repeat_of"].isna()
    again = runs.assign(_first=first).duplicated(["_layout", "method", value, "_first"])
    return first & ~(again & (runs["method"] != "measured"))


def of_layouts(runs: pd.DataFrame, group: list[str], value: str) -> pd.DataFrame:
    """`COLUMNS` by layout: the index has the values of ``runs["_layout"]``.

    ``runs`` are finished runs that are `independent`, with `USED`, ``_layout``, the columns of ``group`` (equal for all
    runs of a layout) and a throughput ``value``.

    A layout whose repeats have at least `FEWEST_FREEDOM` degrees of freedom uses their noise. Other layouts use the
    median over the layouts of their group, so that one odd run does not matter, or else that of other groups. Repeats
    of other layouts may have run within a minute and on fewer devices. So borrowed noise is used only if the timed
    steps of the layout itself, or of its group, do not vary more.
    """
    layouts = runs.groupby("_layout", sort=False)
    by_layout = layouts[group].first().assign(repeats=layouts.size())
    if by_layout.empty:
        return by_layout.assign(noise=np.nan, noise_freedom=np.nan, noise_from=None)[[*COLUMNS]]
    repeats, steps = (
        by_layout[group].assign(variance=variance, freedom=freedom)
        for variance, freedom in (_of_repeats(runs, value), _of_steps(runs))
    )
    measured = _first_known((_enough(repeats), "repeats of this layout"))
    borrowed = _first_known(
        (_typical(repeats, group), "repeats of its model and size"),
        (_typical(repeats.assign(_all=0), ["_all"]), "repeats of other models and sizes"),
    )
    timed = _first_known(
        (_enough(steps), "its timed steps"), (_typical(steps, group), "timed steps of its model and size")
    )
    # A few timed steps are not enough to estimate noise, but can show that borrowed noise is too small.
    shown = timed.where(timed["noise"].notna(), _first_known((steps, "its timed steps")))
    louder = shown["noise"] > borrowed["noise"]
    shown["noise_from"] += ", which differ more than " + borrowed["noise_from"]
    rest = shown.where(louder, borrowed.where(borrowed["noise"].notna(), timed))
    return by_layout[["repeats"]].join(measured.where(measured["noise"].notna(), rest))[[*COLUMNS]]


def within(rows: pd.DataFrame, value: str, group: list[str]) -> pd.Series:
    """Whether each row is behind the first one of its group by no more than noise explains; NA if that is not known.

    ``rows`` are sorted by ``value`` within each group, best first, and have `COLUMNS`. The first row itself counts as
    True.
    """
    groups = rows.groupby(group)
    first = groups[[value, "noise", "noise_freedom", "repeats"]].transform("first")
    others = (groups[value].transform("size") - 1).clip(lower=1)
    spread = pair_spread(first, rows)
    level = 1 - (1 - CONFIDENCE) / others
    reach = spread * quantiles(level.to_numpy(dtype=float), fewest_freedom(first, rows))
    inside = (log(first[value] / rows[value]) <= reach).astype("boolean").mask(reach.isna())
    return inside.mask(groups.cumcount() == 0, True)


def pair_spread(one: pd.DataFrame, two: pd.DataFrame) -> pd.Series:
    """Standard deviation of log(ratio) of two pooled throughputs, row by row; NaN if not known."""
    variance = one["noise"] ** 2 * _of_median(one["repeats"]) + two["noise"] ** 2 * _of_median(two["repeats"])
    return variance**0.5


def fewest_freedom(one: pd.DataFrame, two: pd.DataFrame) -> NDArray[np.float64]:
    """The smaller number of degrees of freedom of two noises, row by row."""
    fewest: NDArray[np.float64] = np.fmin(*(rows["noise_freedom"].to_numpy(dtype=float) for rows in (one, two)))
    return fewest


def log(values: pd.Series) -> pd.Series:
    """Natural logarithms; NaN for values that are not above 0."""
    return pd.Series(np.log(values.where(values > 0).to_numpy(dtype=float)), index=values.index)


def quantiles(level: NDArray[np.float64], freedom: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quantiles of Student's t. NaN where ``freedom`` is not known."""
    asked = list(zip(level.tolist(), freedom.tolist(), strict=True))
    known = {pair: _student(*pair) for pair in set(asked) if not math.isnan(pair[1])}
    return np.array([known.get(pair, math.nan) for pair in asked], dtype=float)


def describe(row: Any) -> str:
    """Describes a row with `COLUMNS`, such as ``noise 0.8 %, from its timed steps``."""
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
    """Variance and degrees of freedom as `_of_repeats`, from the fastest and the slowest timed step of each run.

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
    """For each row, the median of the variances of its group, and the sum of their degrees of freedom; NaN if the sum
    is below `FEWEST_FREEDOM`.

    A variance of few values is mostly below the true one: its median is that of chi-squared over its degrees of
    freedom, (1 - 2 / 9 f)^3 (Wilson and Hilferty 1931). Each variance is divided by this value.
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
    """Variances with at least `FEWEST_FREEDOM` degrees of freedom; NaN for the others."""
    return table[["variance", "freedom"]].where(table["freedom"] >= FEWEST_FREEDOM)


def _first_known(*choices: tuple[pd.DataFrame, str]) -> pd.DataFrame:
    """`COLUMNS` without ``repeats``, by layout, from the first of ``choices`` (variances, and their source in words)
    that has a variance."""
    index = choices[0][0].index
    chosen = pd.DataFrame({"noise": np.nan, "noise_freedom": np.nan, "noise_from": None}, index=index)
    chosen["noise_from"] = chosen["noise_from"].astype(object)
    for table, source in choices:
        new = chosen["noise"].isna() & table["variance"].notna()
        chosen.loc[new, "noise"] = table.loc[new, "variance"] ** 0.5
        chosen.loc[new, "noise_freedom"] = table.loc[new, "freedom"].astype(float)
        chosen.loc[new, "noise_from"] = source
    return chosen


def _of_median(repeats: pd.Series) -> pd.Series:
    """Variance of the median of ``repeats`` normal values, divided by that of one: pi/2 / (n + pi/2 - 1), within 3 %
    for odd n."""
    return (math.pi / 2) / (repeats + math.pi / 2 - 1)


def _student(level: float, freedom: float) -> float:
    """Quantile of Student's t by the expansion 26.7.5 of Abramowitz and Stegun: within 1 % for four degrees of freedom
    up to a level of 0.998."""
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
