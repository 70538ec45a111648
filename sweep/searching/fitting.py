"""Probability that candidates fit in memory, given which ones ran and which ran out of memory.

A memory prediction is off by a factor shared by all candidates of a cell, and by an individual factor. Successful and
out-of-memory runs inform the shared factor. A hard cut would remove winners, which lie close to the limit.
"""

from __future__ import annotations

from math import erf, sqrt

import numpy as np

from sweep.searching.space import OK, OOM, Floats, Ints, SearchSpace, Seen

SHARED = 0.6
"""Share of a prediction's spread that all candidates of a cell have in common."""
_GRID = np.linspace(-3.0, 3.0, 61)
"""Grid of the shared factor's logarithm, in its standard deviations."""

_erf = np.vectorize(erf, otypes=[float])


def normal_cdf(z: Floats) -> Floats:
    probability: Floats = 0.5 * (1 + _erf(np.asarray(z, dtype=float) / sqrt(2)))
    return probability


def fit_probability(space: SearchSpace, seen: Seen, cell: int, places: Ints) -> Floats:
    """Probability that each candidate at ``places`` (all of this cell) fits.

    It is zero if an otherwise equal candidate with the same or lower predicted memory ran out of memory.
    """
    spread = space.load_spread[places]
    shared, individual = SHARED * spread, np.sqrt(1 - SHARED**2) * spread

    weight = np.exp(-0.5 * _GRID**2)
    rows = np.flatnonzero((space.cell == cell) & ((seen.state == OK) | (seen.state == OOM)))
    for row in rows:
        width = space.load_spread[row]
        z = (space.log_load[row] + SHARED * width * _GRID) / (np.sqrt(1 - SHARED**2) * width)
        fits = normal_cdf(-z)
        weight = weight * np.clip(fits if seen.state[row] == OK else 1 - fits, 1e-3, 1.0)
    weight = weight / weight.sum()
    z = (space.log_load[places][:, None] + shared[:, None] * _GRID) / individual[:, None]
    probability: Floats = normal_cdf(-z) @ weight

    for row in rows[seen.state[rows] == OOM]:
        same = space.same_but_memory[places] == space.same_but_memory[row]
        probability[same & (space.log_load[places] >= space.log_load[row])] = 0.0
    return probability
