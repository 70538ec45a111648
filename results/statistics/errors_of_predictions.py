"""Statistics of the relative errors of predictions: the one set used by grades, reports and comparisons.

An error is relative: predicted / measured - 1. Missing values are not filled in: pairs with an unknown value are left
out, and a statistic of too few values is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pandas as pd

FEWEST_IN_A_CELL = 3
"""Minimum number of layouts in a cell: the order of fewer layouts is not meaningful."""
CUTS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
"""Ratios of predicted memory to the device's memory above which a point would be refused."""


def relative_difference(value: float, reference: float) -> float:
    """Distance of a value from its reference, divided by the reference; the reference may be 0."""
    return abs(value - reference) / max(abs(reference), 1e-12)


def relative_errors(predicted: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """``predicted / measured - 1`` of the pairs in which both values are known and positive."""
    one, two = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    known = np.isfinite(one) & np.isfinite(two) & (one > 0) & (two > 0)
    errors: NDArray[np.float64] = one[known] / two[known] - 1
    return errors


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Summary of relative errors. All values are fractions; ``bias`` and ``median`` have a sign."""

    n: int
    mape: float
    """Mean absolute error."""
    median: float
    median_size: float
    """Median absolute error."""
    p90: float
    """90th percentile of the absolute errors."""
    bias: float
    """Mean error."""


def summary(errors: ArrayLike) -> ErrorSummary | None:
    """Summary of the errors; None if there are none."""
    values = np.asarray(errors, dtype=float)
    if not values.size:
        return None
    size = np.abs(values)
    return ErrorSummary(
        n=int(values.size),
        mape=float(size.mean()),
        median=float(np.median(values)),
        median_size=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        bias=float(values.mean()),
    )


def rank_correlation(one: ArrayLike, two: ArrayLike) -> float | None:
    """Spearman's rank correlation; ties share their mean rank. None if either does not vary."""
    import pandas as pd  # pilots and status, which import this module, do without it

    ranks = [pd.Series(np.asarray(values, dtype=float)).rank() for values in (one, two)]
    if any(rank.nunique() < 2 for rank in ranks):
        return None
    return float(ranks[0].corr(ranks[1]))


def regret(predicted: ArrayLike, measured: ArrayLike, tries: int) -> float | None:
    """Regret of running the ``tries`` points predicted fastest and taking the fastest of them: the loss as a fraction
    of the rate of the fastest of all points. Both arguments are rates. None if there are not more points than tries.

    Points with equal predictions are ordered so that the regret is largest.
    """
    one, two = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if one.size <= tries:
        return None
    order = np.lexsort((two, -one))
    return float(1 - two[order[:tries]].max() / two.max())


def coverage(low: ArrayLike, high: ArrayLike, measured: ArrayLike) -> float | None:
    """Share of the measurements that lie in their interval, ends included; None without intervals."""
    a, b, real = (np.asarray(values, dtype=float) for values in (low, high, measured))
    known = np.isfinite(a) & np.isfinite(b) & np.isfinite(real)
    return float(((a <= real) & (real <= b))[known].mean()) if known.any() else None


def refusals(ratio: ArrayLike, ran_out: ArrayLike, cuts: Iterable[float] = CUTS) -> pd.DataFrame:
    """Verdicts "does not fit" at each cut: ``cut``, ``right`` (share of correct verdicts), ``fitting_refused`` and
    ``oom_kept`` (numbers of wrong verdicts), ``fitting`` and ``oom`` (numbers of points that fit and that do not).

    ``ratio``: predicted memory divided by the device's memory. ``ran_out``: whether the run ran out of memory. A point
    is refused above the cut.
    """
    predicted, oom = np.asarray(ratio, dtype=float), np.asarray(ran_out, dtype=bool)
    known = np.isfinite(predicted)
    predicted, oom = predicted[known], oom[known]
    rows = []
    for cut in cuts:
        refused = predicted > cut
        wrong, kept = int((refused & ~oom).sum()), int((~refused & oom).sum())
        rows.append(
            {
                "cut": cut,
                "right": 1 - (wrong + kept) / oom.size if oom.size else None,
                "fitting_refused": wrong,
                "fitting": int((~oom).sum()),
                "oom_kept": kept,
                "oom": int(oom.sum()),
            }
        )
    import pandas as pd

    return pd.DataFrame(rows)
