"""How far numbers are from those that they should be: the one set of statistics of grades, reports and comparisons.

An error is relative: predicted over measured, minus 1. Nothing is filled in: pairs of which one is not known are left
out, and a statistic of too few values is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

FEWEST_IN_A_CELL = 3
"""Fewer layouts than this have no order to speak of."""
CUTS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
"""Of predicted memory over the device's, above which a point would be refused."""


def relative_difference(value: float, reference: float) -> float:
    """How far a value is from its reference, as a share of that; the reference may be 0."""
    return abs(value - reference) / max(abs(reference), 1e-12)


def relative_errors(predicted: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """``predicted / measured - 1`` of the pairs in which both are known and positive."""
    one, two = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    known = np.isfinite(one) & np.isfinite(two) & (one > 0) & (two > 0)
    found: NDArray[np.float64] = one[known] / two[known] - 1
    return found


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors in short; all are shares, and ``bias`` and ``median`` have a sign."""

    n: int
    mape: float
    """Mean size of the error."""
    median: float
    median_size: float
    """Median size of the error."""
    p90: float
    """Nine of ten errors are no larger in size."""
    bias: float
    """Mean error."""


def summary(errors: ArrayLike) -> ErrorSummary | None:
    """None without errors."""
    found = np.asarray(errors, dtype=float)
    if not found.size:
        return None
    size = np.abs(found)
    return ErrorSummary(
        n=int(found.size),
        mape=float(size.mean()),
        median=float(np.median(found)),
        median_size=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        bias=float(found.mean()),
    )


def rank_correlation(one: ArrayLike, two: ArrayLike) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; None where either does not vary."""
    ranks = [pd.Series(np.asarray(values, dtype=float)).rank() for values in (one, two)]
    if any(rank.nunique() < 2 for rank in ranks):
        return None
    return float(ranks[0].corr(ranks[1]))


def regret(predicted: ArrayLike, measured: ArrayLike, tries: int) -> float | None:
    """What is lost by running the ``tries`` points predicted fastest and taking the fastest of them, as a share of the
    rate of the fastest of all. Both are rates, of more points than tries; else None.

    Points predicted alike come in the order in which trying them loses most.
    """
    one, two = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if one.size <= tries:
        return None
    order = np.lexsort((two, -one))
    return float(1 - two[order[:tries]].max() / two.max())


def coverage(low: ArrayLike, high: ArrayLike, measured: ArrayLike) -> float | None:
    """Share of the measurements that lie in their interval, ends included; None without intervals."""
    a, b, found = (np.asarray(values, dtype=float) for values in (low, high, measured))
    known = np.isfinite(a) & np.isfinite(b) & np.isfinite(found)
    return float(((a <= found) & (found <= b))[known].mean()) if known.any() else None


def refusals(ratio: ArrayLike, ran_out: ArrayLike, cuts: Iterable[float] = CUTS) -> pd.DataFrame:
    """The verdict "does not fit" at each cut: ``cut``, ``right`` (share of all verdicts), ``fitting_refused`` and
    ``oom_kept`` (points), ``fitting`` and ``oom`` (of so many).

    ``ratio``: predicted memory over the device's. ``ran_out``: whether the run did. A point is refused above the cut.
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
    return pd.DataFrame(rows)
