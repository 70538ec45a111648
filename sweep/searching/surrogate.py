"""Gaussian process on the logarithm of measured over predicted step time, to predict candidates that were not run.

Rows of all cells of the cluster count. Two rows are correlated by what they have in common: the cluster, the model, the
cell, and a similar layout, which counts more within one cell. The prior standard deviation of a candidate is that of
the predictor, times one factor that is chosen by the likelihood of the rows. How much two runs of one layout differ is
learned from repeats. A node on which runs are slow, whatever their layout, gets a slowdown of its own, and an outlier
row gets more noise, so that neither bends the other predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweep.searching.space import Floats, Ints, SearchSpace, Seen

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Factors on the predictor's spreads to choose from."""
FACTOR_SPREAD = 0.5
"""Prior standard deviation of the logarithm of that factor."""
NOISE_RUNS = 2.0
"""Number of repeats for which the kernel's noise counts beside the measured ones."""
SLOW_SPREAD = 0.2
"""Standard deviation of the logarithm of a slow node's slowdown."""
SLOW_ODDS = 0.02
"""Odds that a node is slow before a row says so."""
_MOST_SLOW = 8
_PASSES = 2
"""Noise, factor, outliers and slow nodes depend on one another: how often they are computed in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKernel:
    """Shares of a candidate's variance that it has in common with other candidates, and length scales."""

    cluster: float = 0.15
    model: float = 0.1
    cell: float = 0.15
    layout: float = 0.35
    """Share in common with similar layouts of all cells."""
    layout_in_cell: float = 0.25
    """Share in common with similar layouts of the same cell."""
    sizes: float = 2.0
    """Length scale in doublings of the number of devices."""
    noise: float = 0.025
    """Standard deviation of log step time between two runs of one layout, before any repeat."""


KERNEL = LayoutKernel()


@dataclass(frozen=True, slots=True)
class Belief:
    """Joint normal distribution of the log step times of some candidates."""

    mean: Floats
    covariance: Floats

    @property
    def spread(self) -> Floats:
        standard_deviation: Floats = np.sqrt(np.maximum(1e-12, np.diag(self.covariance)))
        return standard_deviation


def covariance(space: SearchSpace, a: Ints, b: Ints, k: LayoutKernel) -> Floats:
    """Prior covariance, shape (a, b), without noise and without the factor of `FACTORS`."""
    x, y = space.layout[a], space.layout[b]
    square = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :] - 2 * x @ y.T
    near = np.exp(-0.5 * np.maximum(0.0, square))
    sizes = np.log2(space.gpus[a])[:, None] - np.log2(space.gpus[b])[None, :]
    across = np.exp(-0.5 * (sizes / k.sizes) ** 2)
    model = space.model[a][:, None] == space.model[b][None, :]
    cell = space.cell[a][:, None] == space.cell[b][None, :]
    common = k.cluster + k.model * model + k.cell * cell + near * (k.layout * across + k.layout_in_cell * cell)
    if space.engine is not None:
        common = common * (space.engine[a][:, None] == space.engine[b][None, :])
    scaled: Floats = common * space.time_spread[a][:, None] * space.time_spread[b][None, :]
    return scaled


@dataclass(frozen=True, slots=True)
class Fit:
    """What the rows say, of shape (rows)."""

    places: Ints
    weighted: Floats
    """Inverse covariance of the rows times their residuals."""
    inverse: Floats
    """Inverse covariance of the rows, shape (rows, rows)."""
    own: Floats
    """Standard deviation of the own deviation of each row's layout, in which it has nothing in common with others."""
    factor: float
    noise: float
    """Standard deviation of log step time between two runs of one layout."""
    slow: dict[str, float]
    """Logarithm of the slowdown of nodes that are slower than the others."""


def fit(space: SearchSpace, seen: Seen, kernel: LayoutKernel = KERNEL) -> Fit:
    """Weighs the rows: the noise from the repeats, slow nodes from the rows that they have in common, and the factor on
    the prior's spread."""
    places = np.array([row.place for row in seen.rows], np.int64)
    if not len(places):
        return Fit(places, np.empty(0), np.empty((0, 0)), np.empty(0), 1.0, kernel.noise, {})
    residual = np.array([row.residual for row in seen.rows])
    among = covariance(space, places, places, kernel)
    group = np.unique(places, return_inverse=True)[1]
    same = (group[:, None] == group[None, :]).astype(float)
    nodes = [row.nodes for row in seen.rows]
    own, effect, slow = np.zeros(len(places)), np.zeros(len(places)), dict[str, float]()
    for number in range(_PASSES):
        noise = _noise(places, residual - effect, kernel)
        apart = own[:, None] ** 2 * same + noise**2 * np.eye(len(places))
        factor = _factor(among, residual - effect, apart)
        inverse = np.linalg.inv(factor**2 * among + apart)
        inverse, effect, slow = _slow_nodes(inverse, residual, nodes)
        if number < _PASSES - 1:
            own = _own(inverse, residual, group, own)
    return Fit(places, inverse @ residual, inverse, own, factor, noise, slow)


def believe(
    space: SearchSpace,
    seen: Seen,
    places: Ints,
    inflate: float = 1.0,
    kernel: LayoutKernel = KERNEL,
    fitted: Fit | None = None,
) -> Belief:
    """Posterior of the candidates at ``places``. ``inflate``: factor on the variance of those that have not run.
    ``fitted``: `fit` of the same arguments; None: it is computed."""
    fitted = fit(space, seen, kernel) if fitted is None else fitted
    prior = covariance(space, places, places, kernel)
    same = places[:, None] == fitted.places[None, :]
    cross = fitted.factor**2 * covariance(space, places, fitted.places, kernel) + same * fitted.own**2
    mean = space.log_time[places] + cross @ fitted.weighted
    own = np.max(same * fitted.own**2, axis=1, initial=0.0)
    left = fitted.factor**2 * prior + np.diag(own) - cross @ fitted.inverse @ cross.T
    wider = np.where(np.isfinite(seen.residual[places]), 1.0, np.sqrt(inflate))
    return Belief(mean, wider[:, None] * wider[None, :] * (left + left.T) / 2)


def _noise(places: Ints, residual: Floats, kernel: LayoutKernel) -> float:
    """Pooled standard deviation of the runs of one layout; the kernel's noise counts like `NOISE_RUNS` repeats."""
    _, group, count = np.unique(places, return_inverse=True, return_counts=True)
    mean = np.bincount(group, residual) / count
    squares = float(((residual - mean[group]) ** 2).sum())
    repeats = len(places) - len(count)
    return float(np.sqrt((NOISE_RUNS * kernel.noise**2 + squares) / (NOISE_RUNS + repeats)))


def _slow_nodes(
    inverse: Floats, residual: Floats, nodes: Sequence[Sequence[str]]
) -> tuple[Floats, Floats, dict[str, float]]:
    """The inverse covariance with the unknown slowdown of slow nodes added, the slowdown of each row, and of each slow
    node.

    One node after another, the one for which the rows say most: a Bayes factor of a slowdown against none, each by
    itself normal, times the odds that a node is slow. A node of all rows cannot be compared with others.
    """
    names = sorted({name for of_row in nodes for name in of_row})
    uses = np.array([[name in of_row for name in names] for of_row in nodes], dtype=float).reshape(len(nodes), -1)
    some = np.flatnonzero(~uses.all(axis=0))
    uses, names = uses[:, some], [names[one] for one in some]
    effect, slow = np.zeros(len(residual)), dict[str, float]()
    for _ in range(min(_MOST_SLOW, len(names))):
        weighted = inverse @ uses
        toward, precision = weighted.T @ residual, (uses * weighted).sum(axis=0) + SLOW_SPREAD**-2
        gain = 0.5 * toward**2 / precision - 0.5 * np.log(precision * SLOW_SPREAD**2) + np.log(SLOW_ODDS)
        gain[(toward <= 0) | np.isin(names, list(slow))] = -np.inf
        one = int(np.argmax(gain))
        if gain[one] <= 0:
            break
        slow[names[one]] = float(toward[one] / precision[one])
        effect += slow[names[one]] * uses[:, one]
        inverse = inverse - np.outer(weighted[:, one], weighted[:, one]) / precision[one]
    return inverse, effect, slow


def _own(inverse: Floats, residual: Floats, group: Ints, own: Floats) -> Floats:
    """By row: how much further its layout deviates from what all other layouts let expect than the kernel allows.

    It is the standard deviation that makes the layout's rows most likely; 0 if the kernel suffices. ``group``: number
    of each row's layout. ``own``: the same in ``inverse``.
    """
    weighted, found = inverse @ residual, np.zeros(len(residual))
    for one in range(int(group.max()) + 1):
        at = np.flatnonzero(group == one)
        expected = np.linalg.inv(inverse[np.ix_(at, at)])  # covariance of the rows, given those of other layouts
        off = float((expected @ weighted[at]).mean())
        variance = max(0.0, float(expected.mean()) - own[at[0]] ** 2)
        found[at] = np.sqrt(max(0.0, off**2 - variance))
    return found


def _factor(among: Floats, residual: Floats, apart: Floats) -> float:
    """The most likely of `FACTORS`. ``apart``: covariance of the rows that does not depend on the factor."""
    best, likeliest = -np.inf, 1.0
    for factor in FACTORS:
        matrix = factor**2 * among + apart
        sign, size = np.linalg.slogdet(matrix)
        likelihood = -0.5 * (size + residual @ np.linalg.solve(matrix, residual))
        likelihood -= 0.5 * (np.log(factor) / FACTOR_SPREAD) ** 2
        if sign > 0 and likelihood > best:
            best, likeliest = float(likelihood), factor
    return likeliest


def condition(belief: Belief, one: int, noise: float) -> Belief:
    """The belief after a run of entry ``one`` with the expected result, for choosing the next parallel run."""
    column = belief.covariance[:, one]
    gain = np.outer(column, column) / (column[one] + noise**2)
    return Belief(belief.mean, belief.covariance - gain)
