"""By how much measurements have narrowed the intervals of predicted step times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from sweep.predicting.forecast import Forecast
from workloads.spec.experiment import Experiment

_MOST = 64
"""Number of experiments, evenly chosen, whose intervals stand for all."""


class Narrowed(NamedTuple):
    """Half-widths of 90 % intervals as shares of the step time, medians over some experiments."""

    with_measurements: float
    without: float
    """With nothing measured."""

    @property
    def in_words(self) -> str:
        return f"± {100 * self.with_measurements:.0f} % (± {100 * self.without:.0f} % with nothing measured)"


def narrowed(forecast: Forecast, experiments: Sequence[Experiment]) -> Narrowed | None:
    """None: nothing was measured, or no experiment is predicted."""
    if not forecast.used or not experiments:
        return None
    some = experiments[:: -(-len(experiments) // _MOST)]
    widths = [_half_width(one, some) for one in (forecast, Forecast.of(forecast.cluster))]
    return Narrowed(*widths) if all(map(math.isfinite, widths)) else None


def _half_width(forecast: Forecast, experiments: Sequence[Experiment]) -> float:
    """Intervals are symmetric in logarithms; NaN if no experiment is predicted."""
    known = [math.sqrt(time.high_s / time.low_s) - 1 for time in forecast.times(experiments) if time is not None]
    return statistics.median(known) if known else math.nan
