"""What rows say of candidates that were not run: a Gaussian process on the logarithm of measured over predicted time.

Rows of the whole cluster count, from all cells. Two rows may have in common: the cluster, the model, the cell (one
scale each), and nearness of layout, in their own cell more than in others. The spreads are those that the predictor
itself gives each candidate, times one factor that the rows choose (by their likelihood); a row far off the others is
taken to be noisy itself, so that one bad node does not bend the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweep.searching.space import Floats, Ints, Seen, Space

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Of the predictor's spreads, from which the rows choose."""
FACTOR_SPREAD = 0.5
"""How far the logarithm of that factor may be from zero beforehand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Shares of a candidate's variance that it has in common with others, and lengths."""

    cluster: float = 0.15
    model: float = 0.1
    cell: float = 0.15
    layout: float = 0.35
    """With layouts nearby, in all cells."""
    own: float = 0.25
    """With layouts nearby in the same cell."""
    sizes: float = 2.0
    """Doublings of the devices over which layouts stop being alike."""
    noise: float = 0.025
    """Standard deviation of the logarithm of time between two runs of one layout."""


KERNEL = Kernel()


@dataclass(frozen=True, slots=True)
class Belief:
    """Logarithms of step times of some candidates, as a joint normal distribution."""

    mean: Floats
    covariance: Floats

    @property
    def spread(self) -> Floats:
        found: Floats = np.sqrt(np.maximum(1e-12, np.diag(self.covariance)))
        return found


def covariance(space: Space, a: Ints, b: Ints, k: Kernel) -> Floats:
    """Shape (a, b), without noise and without the factor of `FACTORS`."""
    x, y = space.layout[a], space.layout[b]
    square = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :] - 2 * x @ y.T
    near = np.exp(-0.5 * np.maximum(0.0, square))
    sizes = np.log2(space.gpus[a])[:, None] - np.log2(space.gpus[b])[None, :]
    across = np.exp(-0.5 * (sizes / k.sizes) ** 2)
    model = space.model[a][:, None] == space.model[b][None, :]
    cell = space.cell[a][:, None] == space.cell[b][None, :]
    common = k.cluster + k.model * model + k.cell * cell + near * (k.layout * across + k.own * cell)
    found: Floats = common * space.time_spread[a][:, None] * space.time_spread[b][None, :]
    return found


def believe(space: Space, seen: Seen, places: Ints, inflate: float = 1.0, kernel: Kernel = KERNEL) -> Belief:
    """What is believed of the candidates at ``places``. ``inflate``: factor of the variance."""
    rows = seen.ran()
    own = covariance(space, places, places, kernel)
    if not len(rows):
        return Belief(space.log_time[places].copy(), own * inflate)
    among = covariance(space, rows, rows, kernel)
    residual = seen.residual[rows]
    noise = kernel.noise * _robust(residual, space.time_spread[rows])
    factor = _factor(among, residual, noise)
    inverse = np.linalg.inv(factor**2 * among + np.diag(noise**2))
    cross = factor**2 * covariance(space, places, rows, kernel)
    mean = space.log_time[places] + cross @ (inverse @ residual)
    left = factor**2 * own - cross @ inverse @ cross.T
    return Belief(mean, inflate * (left + left.T) / 2)


def _robust(residual: Floats, spread: Floats) -> Floats:
    """Factors of the noise: more for a row that is far from the others for its spread."""
    if len(residual) < 5:
        return np.ones(len(residual))
    z = (residual - np.median(residual)) / spread
    typical = 1.4826 * float(np.median(np.abs(z))) + 0.5
    found: Floats = 1 + 4 * np.maximum(0.0, np.abs(z) / typical - 3.0)
    return found


def _factor(among: Floats, residual: Floats, noise: Floats) -> float:
    """The most likely of `FACTORS`."""
    best, found = -np.inf, 1.0
    for factor in FACTORS:
        matrix = factor**2 * among + np.diag(noise**2)
        sign, size = np.linalg.slogdet(matrix)
        likelihood = -0.5 * (size + residual @ np.linalg.solve(matrix, residual))
        likelihood -= 0.5 * (np.log(factor) / FACTOR_SPREAD) ** 2
        if sign > 0 and likelihood > best:
            best, found = float(likelihood), factor
    return found


def condition(belief: Belief, one: int, noise: float) -> Belief:
    """The belief after a run of its entry ``one`` that turned out as expected: for choosing what runs beside it."""
    column = belief.covariance[:, one]
    gain = np.outer(column, column) / (column[one] + noise**2)
    return Belief(belief.mean, belief.covariance - gain)
