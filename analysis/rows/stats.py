"""Small statistics for few numbers: a median with its interval, rank correlation, and minimum sample sizes.

Warm-up steps are cut where rows are made: every time and rate of an attempt covers its timed steps only. Neither this
module nor any figure cuts steps again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from results.statistics.errors_of_predictions import rank_correlation

__all__ = [
    "MedianInterval",
    "chance_of_rank_correlation",
    "median_interval",
    "rank_correlation",
    "supported_median",
]

MIN_FOR_INTERVAL = 5
"""Smallest number of values for a bootstrap interval."""
MOST_SHUFFLED = 200
"""Largest number of values for which `chance_of_rank_correlation` shuffles; above it a formula is used."""


@dataclass(frozen=True, slots=True)
class MedianInterval:
    median: float
    low: float | None
    """Lower end of the interval; None if there are too few values."""
    high: float | None
    n: int

    def text(self, show: Callable[[float], str] = lambda value: f"{value:.2f}") -> str:
        """``0.98 (95 % interval 0.97 to 0.99), n = 35``, or ``0.98 (too few for an interval), n = 3``."""
        if self.low is None or self.high is None:
            return f"{show(self.median)} (too few for an interval), n = {self.n:,}"
        return f"{show(self.median)} (95 % interval {show(self.low)} to {show(self.high)}), n = {self.n:,}"


def median_interval(
    values: Iterable[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> MedianInterval | None:
    """Median with a percentile bootstrap interval (Efron 1979). NaN values are left out; None if no value is left.

    A 95 % interval holds the median of the distribution in 92 to 95 % of samples of 5 values or more (87 % for 7, where
    one order statistic carries much of the weight).
    """
    known = np.asarray([value for value in values if value is not None], dtype=float)
    known = np.sort(known[np.isfinite(known)])
    if known.size == 0:
        return None
    median = float(np.median(known))
    if known.size < MIN_FOR_INTERVAL:
        return MedianInterval(median=median, low=None, high=None, n=int(known.size))
    medians = _resampled_medians(known, resamples, np.random.default_rng(seed))
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return MedianInterval(median=median, low=float(low), high=float(high), n=int(known.size))


def supported_median(values: Iterable[float], fewest: int = MIN_FOR_INTERVAL) -> MedianInterval | None:
    """`median_interval` of at least ``fewest`` known values. Returns None with fewer; the figure then says so."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return median_interval(known) if len(known) >= max(fewest, MIN_FOR_INTERVAL) else None


def chance_of_rank_correlation(one: ArrayLike, two: ArrayLike, *, shuffles: int = 1000, seed: int = 0) -> float | None:
    """Share of random orders whose rank correlation is at least as far from 0 (a permutation test); None if undefined.

    Above `MOST_SHUFFLED` values the share comes from the normal approximation with variance 1 / (n - 1) (Kendall and
    Gibbons 1990, section 4.5).
    """
    correlation = rank_correlation(one, two)
    if correlation is None:
        return None
    size = np.asarray(one).size
    if size > MOST_SHUFFLED:
        return math.erfc(abs(correlation) * math.sqrt((size - 1) / 2))
    a, b = ((ranks - ranks.mean()).to_numpy() for ranks in (_ranks(one), _ranks(two)))
    shuffled = np.random.default_rng(seed).permuted(np.broadcast_to(b, (shuffles, b.size)), axis=1)
    others = shuffled @ a / np.sqrt((a @ a) * (b @ b))
    # The observed order is one of the possible ones, so the chance is never 0.
    return float((1 + (np.abs(others) >= abs(correlation) - 1e-12).sum()) / (1 + shuffles))


def _resampled_medians(ordered: NDArray[np.float64], resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Medians of bootstrap samples of n sorted values, computed without drawing the samples.

    A sample picks indices ``floor(n U)`` of n uniform U; its median needs only the middle one or two of them. The k-th
    smallest of n uniforms is Beta(k, n - k + 1), and the next larger one is the minimum of n - k uniforms above it.
    """
    n = ordered.size
    k = (n + 1) // 2
    middle = rng.beta(k, n - k + 1, resamples)
    values: NDArray[np.float64] = ordered[np.minimum((n * middle).astype(int), n - 1)]
    if n % 2:
        return values
    above = middle + (1 - middle) * rng.beta(1, n - k, resamples)
    means: NDArray[np.float64] = (values + ordered[np.minimum((n * above).astype(int), n - 1)]) / 2
    return means


def _ranks(values: ArrayLike) -> pd.Series:
    return pd.Series(np.asarray(values, dtype=float)).rank()
