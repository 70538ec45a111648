"""Gaussian process on the logarithm of measured over predicted step time, to predict candidates that were not run.

Rows of all cells of the cluster count. Two rows are correlated by what they have in common: the cluster, the model, the
cell, and a similar layout, which counts more within one cell. The prior standard deviation of a candidate is that of
the predictor, times one factor that is chosen by the likelihood of the rows. How much two runs of one layout differ is
learned from repeats. A node on which runs are slow, whatever their layout, gets a slowdown of its own, and an outlier
row gets more noise, so that neither bends the other predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweep.searching.space import Floats, Ints, Row, SearchSpace, Seen

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
REFIT = 0.2
"""Share by which the rows grow before `extend` fits everything again."""
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
    fitted_rows: int = 0
    """Rows from which the factor, the noise, the own deviations and the slow nodes come; rows were added since."""


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
        factor = _factor(among, residual - effect, apart, noise)
        inverse = np.linalg.inv(factor**2 * among + apart)
        inverse, effect, slow = _slow_nodes(inverse, residual, nodes)
        if number < _PASSES - 1:
            own = _own(inverse, residual, group, own)
    return Fit(places, inverse @ residual, inverse, own, factor, noise, slow, len(places))


def extend(space: SearchSpace, seen: Seen, fitted: Fit, kernel: LayoutKernel = KERNEL) -> Fit:
    """`fit` of all rows, from that of the first of them: a step of quadratic cost for each row that was added.

    The factor, the noise, the own deviations and the slow nodes are those of ``fitted`` until the rows have grown by
    `REFIT`; then all are fitted again.
    """
    rows = seen.rows
    if len(rows) > (1 + REFIT) * fitted.fitted_rows:
        return fit(space, seen, kernel)
    for count in range(len(fitted.places), len(rows)):
        fitted = _with_row(space, rows[: count + 1], fitted, kernel)
    return fitted


def _with_row(space: SearchSpace, rows: Sequence[Row], fitted: Fit, kernel: LayoutKernel) -> Fit:
    """Adds the last of ``rows`` to a fit of the others: the inverse of a matrix with one more row and column."""
    place = np.array([rows[-1].place], np.int64)
    same = fitted.places == place[0]
    own = float(np.max(fitted.own, where=same, initial=0.0))
    on_slow = [SLOW_SPREAD**2 * sum(one in row.nodes for one in fitted.slow if one in rows[-1].nodes) for row in rows]
    column = fitted.factor**2 * covariance(space, place, fitted.places, kernel)[0] + same * own**2 + on_slow[:-1]
    alone = fitted.factor**2 * float(covariance(space, place, place, kernel)[0, 0]) + own**2 + on_slow[-1]
    weights = fitted.inverse @ column
    precision = 1 / (alone + fitted.noise**2 - column @ weights)
    inverse = np.empty((len(rows), len(rows)))
    inverse[:-1, :-1] = fitted.inverse + precision * np.outer(weights, weights)
    inverse[-1, :-1] = inverse[:-1, -1] = -precision * weights
    inverse[-1, -1] = precision
    residual = np.array([row.residual for row in rows])
    return dataclasses.replace(
        fitted,
        places=np.append(fitted.places, place),
        weighted=inverse @ residual,
        inverse=inverse,
        own=np.append(fitted.own, own),
    )


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
    number = {name: place for place, name in enumerate(names)}
    uses = np.zeros((len(nodes), len(names)))
    for row, of_row in enumerate(nodes):
        uses[row, [number[name] for name in of_row]] = 1.0
    some = np.flatnonzero(~uses.all(axis=0))
    uses, names = uses[:, some], [names[one] for one in some]
    effect, slow = np.zeros(len(residual)), dict[str, float]()
    weighted = inverse @ uses
    for _ in range(min(_MOST_SLOW, len(names))):
        toward, precision = weighted.T @ residual, (uses * weighted).sum(axis=0) + SLOW_SPREAD**-2
        gain = 0.5 * toward**2 / precision - 0.5 * np.log(precision * SLOW_SPREAD**2) + np.log(SLOW_ODDS)
        gain[(toward <= 0) | np.isin(names, list(slow))] = -np.inf
        one = int(np.argmax(gain))
        if gain[one] <= 0:
            break
        slow[names[one]] = float(toward[one] / precision[one])
        effect += slow[names[one]] * uses[:, one]
        column = weighted[:, one].copy()
        inverse = inverse - np.outer(column, column) / precision[one]
        weighted -= np.outer(column, column @ uses) / precision[one]
    return inverse, effect, slow


def _own(inverse: Floats, residual: Floats, group: Ints, own: Floats) -> Floats:
    """By row: how much further its layout deviates from what all other layouts let expect than the kernel allows.

    It is the standard deviation that makes the layout's rows most likely; 0 if the kernel suffices. ``group``: number
    of each row's layout. ``own``: the same in ``inverse``.
    """
    weighted, count = inverse @ residual, np.bincount(group)
    off, expected = weighted / np.diag(inverse), 1 / np.diag(inverse)  # of a row, given those of other layouts
    for one in np.flatnonzero(count > 1):
        at = np.flatnonzero(group == one)
        among = np.linalg.inv(inverse[np.ix_(at, at)])
        off[at], expected[at] = (among @ weighted[at]).mean(), among.mean()
    variance = np.maximum(0.0, expected - own**2)
    found: Floats = np.sqrt(np.maximum(0.0, off**2 - variance))
    return found


def _factor(among: Floats, residual: Floats, apart: Floats, noise: float) -> float:
    """The most likely of `FACTORS`. ``apart``: covariance of the rows that does not depend on the factor, with
    the square of ``noise`` in it for each row."""
    factors, count = np.array(FACTORS), len(residual)
    # The Cholesky factor of a matrix with the residual as one more row has the residual's quadratic form in its last
    # row, as well as the determinant on its diagonal.
    bordered = np.empty((len(factors), count + 1, count + 1))
    bordered[:, :count, :count] = factors[:, None, None] ** 2 * among + apart
    bordered[:, count, :count] = bordered[:, :count, count] = residual
    # The quadratic form is at most the residual's square over the least eigenvalue, and that is at least noise².
    bordered[:, count, count] = border = 1 + float(residual @ residual) / noise**2
    root = np.linalg.cholesky(bordered)
    squares = border - root[:, count, count] ** 2
    size = 2 * np.log(np.diagonal(root, axis1=1, axis2=2)[:, :count]).sum(axis=1)
    likelihood = -0.5 * (size + squares) - 0.5 * (np.log(factors) / FACTOR_SPREAD) ** 2
    return float(factors[np.argmax(likelihood)])


def condition(belief: Belief, one: int, noise: float) -> Belief:
    """The belief after a run of entry ``one`` with the expected result, for choosing the next parallel run."""
    column = belief.covariance[:, one]
    gain = np.outer(column, column) / (column[one] + noise**2)
    return Belief(belief.mean, belief.covariance - gain)
