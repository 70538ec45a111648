"""Step time of one code base as learned from its rows: the fitted closed form, what it still misses, and how far off
predictions of rows are that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from workloads.predict.fit import Fitted, derivatives, fit
from workloads.predict.parameters import time_parameters
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import Kernel, Residuals
from workloads.predict.time_terms import Facts, facts_of, host_bound, step_time

SPREAD = 0.05
"""Of a row's logarithm of time around the closed form, in a fit."""
UNFITTED_SPREAD = 0.15
"""What the closed form misses on a code base and cluster of which no row was seen; with less than `FEW`, half of it."""
FEW = 4
"""Rows below which nothing beside the closed form is learned."""
FOLDS = 10
MANY = 200
"""Rows beyond which half as many folds say enough."""
MODELS = 3
"""Models that rows must have before one of them is left out as a whole."""
NORMAL_90 = 1.645
"""Half the width of a normal distribution's middle 90 %."""


@dataclass(frozen=True, slots=True)
class LearnedTime:
    fitted: Fitted
    rows: int
    residuals: Residuals | None
    defaults: Mapping[str, float]

    def at(self, points: Points, facts: Facts) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of step times."""
        start, jacobian = derivatives(partial(step_time, points, facts), self.fitted.values)
        of_fit = self.fitted.spread_of(jacobian)
        if self.residuals is None:
            return start, np.hypot(UNFITTED_SPREAD / (2 if self.rows else 1), of_fit)
        mean, spread = self.residuals.at(points, noise_of(points, facts, self.defaults))
        return start + mean, np.hypot(spread, of_fit)

    def correction(self, points: Points, facts: Facts) -> Floats:
        """What the rows taught beside the fitted form, as a factor on its seconds."""
        if self.residuals is None:
            return np.ones(len(points))
        factor: Floats = np.exp(self.residuals.at(points, noise_of(points, facts, self.defaults))[0])
        return factor


def learn_time(
    points: Points,
    target: Floats,
    profiles: Mapping[str, Profile],
    name: str,
    kernel: Kernel,
    near: Mapping[str, float] | None = None,
) -> LearnedTime:
    """``target``: measured seconds of the points, all of the code base ``name``. ``near``: see `fit`."""
    facts = facts_of(points, profiles)
    parameters = time_parameters(profiles[name])
    defaults = {key: one.value for key, one in parameters.items()}
    noise = noise_of(points, facts, defaults)
    fitted = fit(partial(step_time, points, facts), target, parameters, SPREAD, 1 / noise**2, near)
    if len(target) < FEW:
        return LearnedTime(fitted, len(target), None, defaults)
    left = np.log(target / step_time(points, facts, fitted.values))
    return LearnedTime(fitted, len(target), Residuals.learn(points, left, kernel, noise), defaults)


def noise_of(points: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Factor of a row's noise: hosts differ more from run to run than devices do, and what a row was divided by may be
    off (`Points.doubt`)."""
    factor: Floats = np.hypot(1 + facts.host_noise * host_bound(points, facts, p), points.doubt / SPREAD)
    return factor


@dataclass(frozen=True, slots=True)
class Widening:
    """Factors of the standard deviation with which 90 % of rows are covered that were left out."""

    known: float
    """Of a model that is among the rows."""
    new: float
    """Of one that is not."""
    models: frozenset[tuple[float, float]]

    def at(self, points: Points) -> Floats:
        return np.array([self.known if one in self.models else self.new for one in models_of(points)])


def models_of(points: Points) -> list[tuple[float, float]]:
    """Layers and hidden size of each row."""
    return list(zip(points.layers.tolist(), points.hidden.tolist(), strict=True))


def widening(
    points: Points,
    target: Floats,
    profiles: Mapping[str, Profile],
    name: str,
    kernel: Kernel,
    near: Mapping[str, float],
) -> Widening:
    """Fits again without a tenth of the rows each, and, with enough models, without one model each."""
    count = len(target)
    folds = FOLDS if count <= MANY else FOLDS // 2
    # By size, so that the folds do not depend on the order of the rows.
    place = np.empty(count, dtype=int)
    place[np.lexsort((points.tokens, points.dp, points.tp, points.hidden, target))] = np.arange(count)
    known = _missed(points, target, profiles, name, kernel, near, (place * 7919 % count) % folds)
    kinds = models_of(points)
    names = sorted(set(kinds))
    new = known
    if len(names) >= MODELS:
        groups = np.array([names.index(kind) % folds for kind in kinds])
        new = max(known, _missed(points, target, profiles, name, kernel, near, groups))
    return Widening(known, new, frozenset(names))


def _missed(
    points: Points,
    target: Floats,
    profiles: Mapping[str, Profile],
    name: str,
    kernel: Kernel,
    near: Mapping[str, float],
    fold: Floats,
) -> float:
    """The factor for rows that were left out, fold by fold; at least a half."""
    found = []
    for one in sorted(set(fold.tolist())):
        out = fold == one
        if (~out).sum() < 1:
            continue
        learned = learn_time(points.take(~out), target[~out], profiles, name, kernel, near)
        part = points.take(out)
        mean, spread = learned.at(part, facts_of(part, profiles))
        found.append(np.abs(np.log(target[out]) - mean) / spread)
    if not found:
        return 1.0
    z = np.concatenate(found)
    # Few rows say little of the tails: nine tenths of (n + 1), the largest of them where that is more than there are.
    return max(0.5, float(np.quantile(z, min(1.0, 0.9 * (len(z) + 1) / len(z)))) / NORMAL_90)
