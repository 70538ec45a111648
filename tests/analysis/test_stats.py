"""Medians, their intervals, and saying nothing of too few values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.rows import stats
from analysis.rows.stats import chance_of_rank_correlation, median_interval, rank_correlation, supported_median
from tests.sampling import sampled

TRUE_MEDIANS = {"normal": 0.0, "lognormal": 1.0, "exponential": math.log(2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "least", "distribution"),
    sampled(
        [(*of, name) for of in ((5, 0.9), (6, 0.9), (7, 0.84), (20, 0.91), (50, 0.92)) for name in TRUE_MEDIANS],
        6,
        seconds=0.5,
        kinds=lambda case: (case[0], case[2]),
    ),
)
def test_an_interval_holds_the_true_median_about_as_often_as_it_says(distribution: str, n: int, least: float) -> None:
    rng = np.random.default_rng(1)
    samples = getattr(rng, distribution)(size=(600, n))
    intervals = [median_interval(sample) for sample in samples]
    held = [
        i is not None and i.low is not None and i.high is not None and i.low <= TRUE_MEDIANS[distribution] <= i.high
        for i in intervals
    ]
    assert least <= np.mean(held) <= 0.98


@pytest.mark.parametrize("n", [5, 8, 31])
def test_the_shortcut_is_the_bootstrap_of_whole_samples(n: int) -> None:
    values = np.sort(np.random.default_rng(3).lognormal(size=n))
    whole = np.median(np.random.default_rng(4).choice(values, size=(100_000, n)), axis=1)
    short = stats._resampled_medians(values, 100_000, np.random.default_rng(5))
    for q in (0.1, 0.3, 0.5, 0.7, 0.9):
        # By their mass around a quantile: a bootstrap of few values stands on few different medians.
        at = float(np.quantile(whole, q))
        assert np.mean(short <= at) == pytest.approx(np.mean(whole <= at), abs=0.01)
    assert short.mean() == pytest.approx(whole.mean(), rel=0.01)


def test_intervals_narrow_with_more_values_and_with_less_confidence() -> None:
    values = np.random.default_rng(0).normal(10, 1, size=400)
    few, many, lax = median_interval(values[:20]), median_interval(values), median_interval(values, confidence=0.5)
    assert few is not None
    assert many is not None
    assert lax is not None
    widths = [float(i.high or 0) - float(i.low or 0) for i in (few, many, lax)]
    assert widths[0] > 2 * widths[1] > 4 * widths[2] / 2 > 0


def test_too_few_values_have_no_interval_and_are_no_number_where_one_is_asked_for() -> None:
    four = [1.0, 2.0, float("nan"), 3.0, 5.0]
    found = median_interval(four)
    assert found == stats.MedianInterval(median=2.5, low=None, high=None, n=4)
    assert found.text() == "2.50 (too few for an interval), n = 4"
    assert supported_median(four) is None
    assert supported_median([]) is None
    assert median_interval([]) is None
    five = supported_median([*four, 4.0])
    assert five is not None
    assert (five.median, five.n) == (3.0, 5)
    assert supported_median([*four, 4.0], fewest=6) is None
    assert supported_median([*four, 4.0], fewest=1) is not None
    assert supported_median(four, fewest=1) is None  # an interval is part of what is asked for


def test_equal_values_are_known_exactly() -> None:
    found = median_interval([2.0] * 6)
    assert found == stats.MedianInterval(median=2.0, low=2.0, high=2.0, n=6)
    assert found.text() == "2.00 (95 % interval 2.00 to 2.00), n = 6"


def test_rank_correlation_by_hand() -> None:
    x = np.arange(5.0)
    assert rank_correlation(x, x**3) == pytest.approx(1.0)
    assert rank_correlation(x, -x) == pytest.approx(-1.0)
    # Ranks 1, 2, 3, 4 against 1.5, 1.5, 3.5, 3.5: deviations (−1.5, −.5, .5, 1.5) · (−1, −1, 1, 1) = 4, over √(5 · 4).
    assert rank_correlation(np.arange(4.0), np.array([0.0, 0.0, 7.0, 7.0])) == pytest.approx(4 / math.sqrt(20))
    assert rank_correlation(x, np.ones(5)) is None
    assert rank_correlation(x[:1], x[:1]) is None


def test_chance_of_a_rank_correlation() -> None:
    x = np.arange(30.0)
    rng = np.random.default_rng(0)
    assert chance_of_rank_correlation(x, x + rng.normal(0, 3, 30)) == pytest.approx(1 / 1001)
    chances = [chance_of_rank_correlation(x, rng.normal(size=30), shuffles=200) for _ in range(200)]
    known = [chance for chance in chances if chance is not None]
    assert np.mean(np.array(known) < 0.1) == pytest.approx(0.1, abs=0.06)  # without a trend, chances are uniform
    assert chance_of_rank_correlation(x, np.ones(30)) is None
    # Beyond the border the normal distribution takes over, and the two agree about it.
    slope = np.arange(stats.MOST_SHUFFLED + 1.0)
    noisy = slope + rng.normal(0, 1000, slope.size)
    shuffled, normal = (chance_of_rank_correlation(slope[:n], noisy[:n], shuffles=4000) for n in (-1, None))
    assert shuffled == pytest.approx(normal, abs=0.03)
    assert 0.005 < (normal or 0) < 0.9
    # Three in a row: of six orders two are as far from 0 as the sorted one.
    assert chance_of_rank_correlation(np.arange(3.0), np.arange(3.0), shuffles=6000) == pytest.approx(1 / 3, abs=0.03)
