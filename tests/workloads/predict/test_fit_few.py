"""Fits to few rows: generalized least squares by hand, and broken runs among them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests.workloads.predict.test_predictor import PROFILES, made_up, measured
from workloads.predict.fit_few import fit_few
from workloads.predict.learned_time import LearnedTime
from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats
from workloads.predict.predictor import Predictor

SLOPES = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 0.5], [1.0, 1.5], [1.0, 1.0]])
"""Derivatives of six rows by two parameters, in logarithms."""
PRIORS = {"rate": Parameter(1.0, 0.2, ""), "share": Parameter(1.0, 0.5, "")}


def powers(p: Mapping[str, float]) -> Floats:
    """A model that is linear in logarithms."""
    times: Floats = np.exp(SLOPES @ np.log([p["rate"], p["share"]]))
    return times


def test_rows_without_outliers_are_fitted_by_generalized_least_squares() -> None:
    """Weights of Student's distribution are next to equal if every residual is well inside the noise."""
    left = SLOPES @ np.array([0.1, -0.2]) + 0.06
    common, noise = np.full((6, 6), 0.08**2), np.full(6, 0.05)
    found = fit_few(powers, np.exp(left), PRIORS, common, noise)
    inverse = np.linalg.inv(common + np.diag(found.noise**2))
    prior = np.diag([1 / 0.2**2, 1 / 0.5**2])
    expected = np.linalg.solve(SLOPES.T @ inverse @ SLOPES + prior, SLOPES.T @ inverse @ left)
    assert np.log([found.fitted.values[name] for name in PRIORS]) == pytest.approx(expected, abs=1e-4)
    assert found.residual == pytest.approx(left - SLOPES @ expected, abs=1e-4)
    assert found.fitted.covariance == pytest.approx(np.linalg.inv(SLOPES.T @ inverse @ SLOPES + prior), rel=1e-4)
    assert (0.7 * noise < found.noise).all() and (found.noise < 1.3 * noise).all()


def test_what_rows_have_in_common_moves_no_parameter_that_tells_them_apart() -> None:
    """All six take 1.3 times as long. With noise of each by itself the second parameter takes a part of it."""
    left, noise = np.full(6, np.log(1.3)), np.full(6, 0.05)
    tight = {**PRIORS, "rate": Parameter(1.0, 0.02, "")}
    apart = fit_few(powers, np.exp(left), tight, np.zeros((6, 6)), noise)
    together = fit_few(powers, np.exp(left), tight, np.full((6, 6), 0.15**2), noise)
    assert abs(np.log(together.fitted.values["share"])) < 0.3 * abs(np.log(apart.fitted.values["share"]))


@pytest.mark.parametrize("stuck", [0, 3])
def test_a_stuck_run_among_six_has_next_to_no_weight(stuck: int) -> None:
    left = SLOPES @ np.array([0.1, -0.2])
    common, noise = np.full((6, 6), 0.08**2), np.full(6, 0.05)
    sound = fit_few(powers, np.exp(left), PRIORS, common, noise)
    broken = left.copy()
    broken[stuck] += np.log(20)
    found = fit_few(powers, np.exp(broken), PRIORS, common, noise)
    assert found.noise[stuck] > 10 * noise[0] > 5 * np.delete(found.noise, stuck).max()
    assert np.flatnonzero(found.broken).tolist() == [stuck] and not sound.broken.any()
    moved = SLOPES @ np.log([found.fitted.values[name] / sound.fitted.values[name] for name in PRIORS])
    assert np.abs(moved).max() < 0.06


def test_a_parameter_does_not_follow_a_stuck_run_that_only_it_can_tell() -> None:
    """The last row alone has the second parameter, whose default it would leave by 6 spreads."""
    slopes = np.array([[1.0, 0.0]] * 5 + [[1.0, 1.0]])

    def model(p: Mapping[str, float]) -> Floats:
        times: Floats = np.exp(slopes @ np.log([p["rate"], p["share"]]))
        return times

    common, noise = np.full((6, 6), 0.08**2), np.full(6, 0.05)
    shares = {}
    for off in (0.8, 3.0):  # 1.6 and 6 spreads
        left = np.array([0.02, -0.03, 0.01, 0.0, -0.01, off])
        found = fit_few(model, np.exp(left), PRIORS, common, noise)
        assert found.broken.tolist() == [False] * 5 + [off > 2]
        shares[off] = float(np.log(found.fitted.values["share"]))
    assert shares[0.8] == pytest.approx(0.8, abs=0.1) and abs(shares[3.0]) < 0.5


@pytest.mark.slow
def test_two_stuck_runs_among_twelve_do_not_bend_the_rest() -> None:
    _, found, times = made_up(5, matmul=0.6)
    given, rest = np.arange(12), np.arange(12, 120)
    stuck = times.copy()
    stuck[[3, 8]] *= 20

    def learned(of: Floats) -> tuple[LearnedTime, float]:
        predictor = Predictor.learn(measured(found.take(given), of[given]), PROFILES, widened=False)
        error = np.abs(np.log(predictor.predict(found.take(rest)).step_time_s / times[rest])).mean()
        return next(iter(predictor.time.values())), float(error)

    (few, sound), (_, bent) = learned(times), learned(stuck)
    assert few.jacobian is not None and few.jacobian.shape == (12, len(few.fitted.names))
    assert sound < 0.06 and bent < sound + 0.004
