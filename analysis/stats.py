"""Small statistics for few numbers: a median and how well it is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MIN_FOR_INTERVAL = 5
"""Fewer values than this say too little about their own spread for a bootstrap."""


@dataclass(frozen=True, slots=True)
class MedianInterval:
    median: float
    low: float | None
    """Lower end of the interval; None when there are too few values for one."""
    high: float | None
    n: int


def median_interval(
    values: Iterable[float], *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> MedianInterval | None:
    """Median with a percentile bootstrap interval (Efron 1979); NaN values are left out, None when none is left."""
    known = np.asarray([value for value in values if value is not None], dtype=float)
    known = known[np.isfinite(known)]
    if known.size == 0:
        return None
    median = float(np.median(known))
    if known.size < MIN_FOR_INTERVAL:
        return MedianInterval(median=median, low=None, high=None, n=int(known.size))
    draws = np.random.default_rng(seed).choice(known, size=(resamples, known.size), replace=True)
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(draws, axis=1), [tail, 1 - tail])
    return MedianInterval(median=median, low=float(low), high=float(high), n=int(known.size))
