"""How likely it is that candidates fit in memory, given which did and which ran out of it.

A prediction of memory is off by a factor that all candidates of a cell share, and by one of each candidate's own. What
ran and what ran out says where the shared factor is. A hard cut would remove winners: they stand close to the limit.
"""

from __future__ import annotations

from math import erf, sqrt

import numpy as np

from sweep.searching.space import OK, OOM, Floats, Ints, Seen, Space

SHARED = 0.6
"""Of a prediction's spread: what the candidates of a cell have in common."""
_GRID = np.linspace(-3.0, 3.0, 61)
"""Values of the shared factor's logarithm, in its standard deviations."""

_erf = np.vectorize(erf, otypes=[float])


def normal_cdf(z: Floats) -> Floats:
    found: Floats = 0.5 * (1 + _erf(np.asarray(z, dtype=float) / sqrt(2)))
    return found


def fit_probability(space: Space, seen: Seen, cell: int, places: Ints) -> Floats:
    """Probability that each candidate at ``places`` (all of this cell) fits. Zero for what needs more than something
    that ran out of memory and is else the same."""
    spread = space.load_spread[places]
    shared, own = SHARED * spread, np.sqrt(1 - SHARED**2) * spread

    weight = np.exp(-0.5 * _GRID**2)
    rows = np.flatnonzero((space.cell == cell) & ((seen.state == OK) | (seen.state == OOM)))
    for row in rows:
        width = space.load_spread[row]
        z = (space.log_load[row] + SHARED * width * _GRID) / (np.sqrt(1 - SHARED**2) * width)
        fits = normal_cdf(-z)
        weight = weight * np.clip(fits if seen.state[row] == OK else 1 - fits, 1e-3, 1.0)
    weight = weight / weight.sum()
    z = (space.log_load[places][:, None] + shared[:, None] * _GRID) / own[:, None]
    probability: Floats = normal_cdf(-z) @ weight

    for row in rows[seen.state[rows] == OOM]:
        same = space.same_but_memory[places] == space.same_but_memory[row]
        probability[same & (space.log_load[places] >= space.log_load[row])] = 0.0
    return probability
