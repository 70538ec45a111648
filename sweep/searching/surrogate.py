"""Gaussian process on the logarithm of measured over predicted step time, to predict candidates that were not run.

Rows of all cells of the cluster count. Two rows are correlated by what they have in common: the cluster, the model, the
cell, and a similar layout, which counts more within one cell. The prior standard deviation of a candidate is that of
the predictor, times one factor that is chosen by the likelihood of the rows. An outlier row gets more noise, so that
one bad node does not bend the other predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweep.searching.space import Floats, Ints, SearchSpace, Seen

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Factors on the predictor's spreads to choose from."""
FACTOR_SPREAD = 0.5
"""Prior standard deviation of the logarithm of that factor."""


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
    """Standard deviation of log step time between two runs of one layout."""


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


def believe(
    space: SearchSpace, seen: Seen, places: Ints, inflate: float = 1.0, kernel: LayoutKernel = KERNEL
) -> Belief:
    """Posterior of the candidates at ``places``. ``inflate``: factor on the variance."""
    rows = seen.ran()
    prior = covariance(space, places, places, kernel)
    if not len(rows):
        return Belief(space.log_time[places].copy(), prior * inflate)
    among = covariance(space, rows, rows, kernel)
    residual = seen.residual[rows]
    noise = kernel.noise * _robust(residual, space.time_spread[rows])
    factor = _factor(among, residual, noise)
    inverse = np.linalg.inv(factor**2 * among + np.diag(noise**2))
    cross = factor**2 * covariance(space, places, rows, kernel)
    mean = space.log_time[places] + cross @ (inverse @ residual)
    left = factor**2 * prior - cross @ inverse @ cross.T
    return Belief(mean, inflate * (left + left.T) / 2)


def _robust(residual: Floats, spread: Floats) -> Floats:
    """Factors on the noise: larger for a row that is far from the others relative to its spread."""
    if len(residual) < 5:
        return np.ones(len(residual))
    z = (residual - np.median(residual)) / spread
    typical = 1.4826 * float(np.median(np.abs(z))) + 0.5
    noise_factors: Floats = 1 + 4 * np.maximum(0.0, np.abs(z) / typical - 3.0)
    return noise_factors


def _factor(among: Floats, residual: Floats, noise: Floats) -> float:
    """The most likely of `FACTORS`."""
    best, likeliest = -np.inf, 1.0
    for factor in FACTORS:
        matrix = factor**2 * among + np.diag(noise**2)
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
