"""What to run next in a cell, and how likely it is that something better was not tried.

Next is what promises most: the expected improvement on the best so far, times the probability that it fits in memory.
Runs are chosen one after another, each as if those before, and those that run, had turned out as expected. The best
candidate of each family that has not run comes next, as long as it is not predicted to be far slower: a prior that is
wrong is wrong for a whole family, and then its spread says nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np

from sweep.searching.fitting import fit_probability, normal_cdf
from sweep.searching.space import OK, OOM, OTHER, RUNNING, UNTRIED, Flags, Floats, Ints, Seen, Space
from sweep.searching.surrogate import KERNEL, Belief, believe, condition

LEAST_FIT = 0.02
"""A candidate less likely to fit than this is not run."""
DRAWS = 2000
"""Of joint times, for the probability that the best is beaten."""
JOINT = 400
"""At most so many candidates are drawn jointly, those most likely to be better; the others as if on their own."""
JITTER, TINY = 1e-6, 1e-12
"""Added to variances before a root is taken: a share of them, and at least."""
FAMILY_SLOWER = log(2)
"""A family is tried unless its best candidate is believed to be slower than the best that ran by more than this."""
FAMILY_FIT = 0.3
FAMILY_FAILURES = 2
"""After so many of its candidates have failed, a family waits for its turn."""
QUIET_RUNS = 2.0
"""Runs without a surprise that are taken for granted."""
LARGEST_SURPRISE = 5.0
REPEATED = 3
"""Candidates that run again at the end, because two runs of one layout differ."""
TIED = 2.0
"""Runs differ by noise where they are within so many of its standard deviations."""


@dataclass(frozen=True, slots=True)
class View:
    """One cell as the search sees it now."""

    places: Ints
    """Candidates that have not ended, as places in the space."""
    running: Flags
    """Which of them run now."""
    belief: Belief
    fits: Floats
    best: int | None
    """The fastest that ran, as a place in the space."""
    best_log_time: float
    """NaN where none ran."""

    def only(self, these: Flags) -> View:
        """The same of some of its candidates."""
        belief = Belief(self.belief.mean[these], self.belief.covariance[np.ix_(these, these)])
        return dataclasses.replace(
            self, places=self.places[these], running=self.running[these], belief=belief, fits=self.fits[these]
        )


def look(space: Space, seen: Seen, cell: int) -> View:
    """What is believed of a cell after what was seen."""
    own = space.of(cell)
    places = own[np.isin(seen.state[own], (UNTRIED, RUNNING))]
    fits = fit_probability(space, seen, cell, places)
    running = seen.state[places] == RUNNING
    may = (fits >= LEAST_FIT) | running
    places, fits, running = places[may], fits[may], running[may]
    belief = believe(space, seen, places, inflation(seen))
    best = seen.best(own)
    return View(places, running, belief, fits, best, float("nan") if best is None else float(seen.log_time[best]))


def inflation(seen: Seen) -> float:
    """Factor of the variance, from how far runs were from what was expected of them: never below 1."""
    z = np.minimum(np.array(seen.surprise, dtype=float), LARGEST_SURPRISE)
    return max(1.0, float((QUIET_RUNS + (z**2).sum()) / (QUIET_RUNS + len(z))))


def expected_improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    """By how much a normal variable is below ``best`` on average, counting nothing where it is above."""
    z = (best - mean) / spread
    found: Floats = (best - mean) * normal_cdf(z) + spread * np.exp(-0.5 * z**2) / sqrt(2 * pi)
    return found


def choose(space: Space, seen: Seen, view: View, count: int) -> list[int]:
    """The next ``count`` candidates of the cell to run, as places in the space; fewer where there are no more."""
    chosen: list[int] = []
    belief, left, best = view.belief, ~view.running, view.best_log_time
    for one in np.flatnonzero(view.running):
        belief = condition(belief, int(one), KERNEL.noise)
        if view.best is None:
            best = float(np.nanmin([best, belief.mean[one]]))
    while len(chosen) < count and left.any():
        if np.isfinite(best):
            score = expected_improvement(belief.mean, belief.spread, best) * view.fits
        else:
            # As `in_order`.
            score = -belief.mean + np.log(np.maximum(view.fits, 1e-9))
        allowed = left
        # The most promising one comes first, and families that have not run beside it.
        if view.best is not None and (chosen or count == 1):
            untried = _untried_families(space, seen, view, left, chosen)
            if untried.any():
                allowed, score = untried, -belief.mean
        one = int(np.argmax(np.where(allowed, score, -np.inf)))
        left[one] = False
        chosen.append(int(view.places[one]))
        belief = condition(belief, one, KERNEL.noise)
        if not np.isfinite(best):
            best = float(belief.mean[one])
    return chosen


def in_order(view: View, count: int) -> list[int]:
    """The ``count`` candidates believed to be fastest, where one that fails costs as much as one of twice the time."""
    score = -view.belief.mean + np.log(np.maximum(view.fits, 1e-9))
    order = np.argsort(-score, kind="stable")
    return [int(view.places[one]) for one in order if not view.running[one]][:count]


def _untried_families(space: Space, seen: Seen, view: View, left: Flags, chosen: list[int]) -> Flags:
    """The fastest candidate of each family of which none has run in this cell, unless it is believed far slower."""
    found = np.zeros(len(view.places), bool)
    own = space.of(int(space.cell[view.best]))
    tried = {space.family[one] for one in own if seen.state[one] in (OK, RUNNING)}
    tried |= {space.family[one] for one in chosen}
    failed = Counter(space.family[one] for one in own if seen.state[one] in (OOM, OTHER))
    for name in sorted(set(space.family[view.places]) - tried):
        members = np.flatnonzero((space.family[view.places] == name) & left & (view.fits > FAMILY_FIT))
        if len(members) and failed[name] < FAMILY_FAILURES:
            one = members[int(np.argmin(view.belief.mean[members]))]
            found[one] = view.belief.mean[one] - view.best_log_time < FAMILY_SLOWER
    return found


def beaten(view: View, within: float) -> float:
    """Probability that a candidate that has not ended fits and is faster than the best by more than ``within``."""
    if not len(view.places):
        return 0.0
    if view.best is None:
        return 1.0
    goal = view.best_log_time + log(1 - within)
    mean, spread, fits = view.belief.mean, view.belief.spread, view.fits
    alone = fits * normal_cdf((goal - mean) / spread)
    order = np.argsort(-alone, kind="stable")
    joint, rest = order[:JOINT], order[JOINT:]
    covariance = view.belief.covariance[np.ix_(joint, joint)]
    # A little of their own keeps candidates that are nearly the same apart, so that the root exists.
    root = np.linalg.cholesky(covariance + np.diag(JITTER * np.diag(covariance) + TINY))
    random = np.random.default_rng(0)
    times = mean[joint] + random.standard_normal((DRAWS, len(joint))) @ root.T
    fitting = random.random((DRAWS, len(joint))) < fits[joint]
    better = float(((times < goal) & fitting).any(axis=1).mean())
    return float(1 - (1 - better) * np.prod(1 - alone[rest]))


def to_repeat(space: Space, seen: Seen, cell: int) -> list[int]:
    """The fastest candidates of a cell that noise may have put in a wrong order, fastest first; none where the first
    is alone."""
    own = space.of(cell)
    ran = own[np.isfinite(seen.log_time[own])]
    order = ran[np.argsort(seen.log_time[ran], kind="stable")][:REPEATED]
    margin = TIED * sqrt(2) * KERNEL.noise
    close = [int(one) for one in order if seen.log_time[one] - seen.log_time[order[0]] <= margin]
    return close if len(close) > 1 else []
