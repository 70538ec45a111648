"""Step time of one code base as learned from its rows: the fitted closed form, its learned residuals, and the width of
intervals that covers held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from workloads.predict.facts import Facts, facts_of
from workloads.predict.fit import Fitted, derivatives, fit
from workloads.predict.fit_few import fit_few
from workloads.predict.layouts import planned_doubt
from workloads.predict.parameters import time_parameters
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import Profile
from workloads.predict.residuals import ResidualKernel, Residuals, covariance
from workloads.predict.time_terms import host_bound, step_time

SPREAD = 0.05
"""Standard deviation of a row's log(time) around the closed form, in a fit."""
UNFITTED_WIDTH = 0.6
"""Factor on the spread of the form's parameters without rows, since what may be wrong is not wrong at once: with it,
90 % intervals have 93 % of 116 published runs and 94 % of the study's 1,765, nothing fitted (docs/accuracy.md)."""
FEW = 4
"""Number of rows below which only the closed form is fitted."""
FOLDS = 10
MANY = 200
"""Number of rows beyond which half as many folds suffice."""
MODELS = 3
"""Number of models that rows must have before whole models are held out."""
NORMAL_90 = 1.645
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True)
class LearnedTime:
    fitted: Fitted
    rows: int
    residuals: Residuals | None
    defaults: Mapping[str, float]
    jacobian: Floats | None = None
    """Derivatives at the rows, shape (rows, parameters), where parameters and residuals were fitted together."""
    broken: Floats | None = None
    """Rows that the fit takes for broken runs, as a mask; None: it tells none."""

    def at(self, points: Points, facts: Facts) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log(step seconds)."""
        start, jacobian = derivatives(partial(step_time, points, facts), self.fitted.values)
        of_fit = self.fitted.spread_of(jacobian)
        if self.residuals is None:
            width, part = (1.0, 0.5) if self.rows else (UNFITTED_WIDTH, 1.0)  # a few rows say half of it
            of_form = width * np.hypot(part * facts.form_spread, of_fit)
            of_host = part * facts.host_doubt * host_bound(points, facts, self.fitted.values)
            return start, np.sqrt(of_form**2 + of_host**2 + planned_doubt(points.structure_doubt) ** 2)
        mean, spread = self.residuals.at(points, noise_of(points, facts, self.defaults))
        if self.jacobian is not None:
            of_fit = self.fitted.spread_of(jacobian - self.residuals.explained(points, self.jacobian))
        return start + mean, np.hypot(spread, of_fit)

    def correction(self, points: Points, facts: Facts) -> Floats:
        """Factor of the learned residuals on the fitted form's seconds."""
        if self.residuals is None:
            return np.ones(len(points))
        factor: Floats = np.exp(self.residuals.at(points, noise_of(points, facts, self.defaults))[0])
        return factor


def learn_time(
    points: Points,
    target: Floats,
    profiles: Mapping[str, Profile],
    name: str,
    kernel: ResidualKernel,
    near: Mapping[str, float] | None = None,
) -> LearnedTime:
    """Fits the form and learns its residuals, of few rows both together.

    ``target``: measured seconds of the points, all of the code base ``name``. ``near``: see `fit`.
    """
    facts = facts_of(points, profiles)
    parameters = time_parameters(profiles[name])
    defaults = {key: one.value for key, one in parameters.items()}
    noise = noise_of(points, facts, defaults)
    form = partial(step_time, points, facts)
    if FEW <= len(target) <= len(parameters):
        few = fit_few(form, target, parameters, covariance(points, points, kernel), kernel.noise * noise, near)
        residuals = Residuals.of_noise(points, few.residual, kernel, few.noise)
        return LearnedTime(few.fitted, len(target), residuals, defaults, few.jacobian, few.broken)
    fitted = fit(form, target, parameters, SPREAD, 1 / noise**2, near, stuck=True)
    if len(target) < FEW:
        return LearnedTime(fitted, len(target), None, defaults)
    left = np.log(target / form(fitted.values))
    return LearnedTime(fitted, len(target), Residuals.learn(points, left, kernel, noise), defaults)


def noise_of(points: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Factor on a row's noise: hosts vary more from run to run than devices, and the factor by which a row's time was
    divided may be off (`Points.doubt`)."""
    factor: Floats = np.hypot(1 + facts.host_noise * host_bound(points, facts, p), points.doubt / SPREAD)
    return factor


@dataclass(frozen=True, slots=True)
class Widening:
    """Factors on the standard deviation such that intervals cover 90 % of held-out rows."""

    known: float
    """Factor for a model that is among the rows."""
    new: float
    """Factor for a model that is not among the rows."""
    models: frozenset[tuple[float, float]]

    def at(self, points: Points) -> Floats:
        return np.array([self.known if one in self.models else self.new for one in models_of(points)])


def models_of(points: Points) -> list[tuple[float, float]]:
    """(layers, hidden size) of each row."""
    return list(zip(points.layers.tolist(), points.hidden.tolist(), strict=True))


def widening(
    points: Points,
    target: Floats,
    profiles: Mapping[str, Profile],
    name: str,
    kernel: ResidualKernel,
    near: Mapping[str, float],
    broken: Floats | None = None,
) -> Widening:
    """Refits without a tenth of the rows at a time and, with enough models, without one group of models at a time.
    Intervals need not cover ``broken`` rows, one of which among ten would decide their width."""
    count = len(target)
    kept = np.ones(count, dtype=bool) if broken is None else ~broken
    folds = FOLDS if count <= MANY else FOLDS // 2
    # Folds are made by size, so that they do not depend on the order of the rows.
    place = np.empty(count, dtype=int)
    place[np.lexsort((points.tokens, points.dp, points.tp, points.hidden, target))] = np.arange(count)
    known = _missed(points, target, profiles, name, kernel, near, (place * 7919 % count) % folds, kept)
    kinds = models_of(points)
    names = sorted(set(kinds))
    new = known
    if len(names) >= MODELS:
        groups = np.array([names.index(kind) % folds for kind in kinds])
        new = max(known, _missed(points, target, profiles, name, kernel, near, groups, kept))
    return Widening(known, new, frozenset(names))


def _missed(
    points: Points,
    target: Floats,
    profiles: Mapping[str, Profile],
    name: str,
    kernel: ResidualKernel,
    near: Mapping[str, float],
    fold: Floats,
    kept: Floats,
) -> float:
    """Factor for held-out rows over all folds, of those ``kept``; at least 0.5."""
    missed = []
    for one in sorted(set(fold.tolist())):
        out = fold == one
        if (~out).sum() < 1:
            continue
        learned = learn_time(points.take(~out), target[~out], profiles, name, kernel, near)
        part = points.take(out)
        mean, spread = learned.at(part, facts_of(part, profiles))
        missed.append((np.abs(np.log(target[out]) - mean) / spread)[kept[out]])
    z = np.concatenate(missed) if missed else np.empty(0)
    if not len(z):
        return 1.0
    # Few rows determine the tails badly: take the quantile 0.9 (n + 1) / n, at most the maximum.
    return max(0.5, float(np.quantile(z, min(1.0, 0.9 * (len(z) + 1) / len(z)))) / NORMAL_90)
