"""Chooses what to run next in a cell, and estimates the probability that something better is untried.

The next run maximizes the expected improvement on the best so far, times the probability that it fits in memory.
Several runs are chosen one after another, each as if the chosen ones and those in progress had turned out as expected.
The best candidate of each family that has not run comes next, unless it is predicted to be far slower: a prior that is
wrong is wrong for the whole family, by more than its spread admits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np

from sweep.searching.fitting import fit_probability, normal_cdf
from sweep.searching.space import OK, OOM, OTHER, RUNNING, UNTRIED, Flags, Floats, Ints, SearchSpace, Seen
from sweep.searching.surrogate import KERNEL, Belief, believe, condition

LEAST_FIT = 0.02
"""Candidates less likely to fit than this are not run."""
DRAWS = 2000
"""Number of joint samples of step times for the probability that the best is beaten."""
JOINT = 400
"""Most candidates sampled jointly: those most likely to be better. The others are treated as independent."""
JITTER, TINY = 1e-6, 1e-12
"""Added to variances before the Cholesky factorization: a share of each variance, and an absolute minimum."""
FAMILY_SLOWER = log(2)
"""A family is tried unless its best candidate is expected to be slower than the best run by more than this."""
FAMILY_FIT = 0.3
FAMILY_FAILURES = 2
"""A family with this many failed candidates is no longer preferred."""
QUIET_RUNS = 2.0
"""Number of runs without surprise assumed as a prior."""
LARGEST_SURPRISE = 5.0
REPEATED = 3
"""Number of candidates repeated at the end, because two runs of one layout differ."""
TIED = 2.0
"""Runs within this many standard deviations of the noise count as tied."""


@dataclass(frozen=True, slots=True)
class CellView:
    """Current state of one cell."""

    places: Ints
    """Unfinished candidates, as indices into the space."""
    running: Flags
    """Whether each candidate is running."""
    belief: Belief
    fits: Floats
    best: int | None
    """Fastest candidate that ran, as an index into the space."""
    best_log_time: float
    """NaN if none ran."""

    def only(self, these: Flags) -> CellView:
        """The view restricted to some of its candidates."""
        belief = Belief(self.belief.mean[these], self.belief.covariance[np.ix_(these, these)])
        return dataclasses.replace(
            self, places=self.places[these], running=self.running[these], belief=belief, fits=self.fits[these]
        )


def look(space: SearchSpace, seen: Seen, cell: int) -> CellView:
    """The posterior view of a cell, given all results so far."""
    candidates = space.of(cell)
    places = candidates[np.isin(seen.state[candidates], (UNTRIED, RUNNING))]
    fits = fit_probability(space, seen, cell, places)
    running = seen.state[places] == RUNNING
    may = (fits >= LEAST_FIT) | running
    places, fits, running = places[may], fits[may], running[may]
    belief = believe(space, seen, places, inflation(seen))
    best = seen.best(candidates)
    return CellView(places, running, belief, fits, best, float("nan") if best is None else float(seen.log_time[best]))


def inflation(seen: Seen) -> float:
    """Factor on the variance, at least 1, from how far results were from their predictions."""
    z = np.minimum(np.array(seen.surprise, dtype=float), LARGEST_SURPRISE)
    return max(1.0, float((QUIET_RUNS + (z**2).sum()) / (QUIET_RUNS + len(z))))


def expected_improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    """Expected improvement of a normal variable on ``best``: the mean of max(best - x, 0)."""
    z = (best - mean) / spread
    improvement: Floats = (best - mean) * normal_cdf(z) + spread * np.exp(-0.5 * z**2) / sqrt(2 * pi)
    return improvement


def choose(space: SearchSpace, seen: Seen, view: CellView, count: int) -> list[int]:
    """The next ``count`` candidates of the cell to run, as indices into the space; fewer if there are no more."""
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
            # Same score as in `in_order`.
            score = -belief.mean + np.log(np.maximum(view.fits, 1e-9))
        allowed = left
        # The most promising candidate comes first, then families that have not run.
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


def in_order(view: CellView, count: int) -> list[int]:
    """The ``count`` candidates with the lowest expected time, where a failure costs as much as doubling the time."""
    score = -view.belief.mean + np.log(np.maximum(view.fits, 1e-9))
    order = np.argsort(-score, kind="stable")
    return [int(view.places[one]) for one in order if not view.running[one]][:count]


def _untried_families(space: SearchSpace, seen: Seen, view: CellView, left: Flags, chosen: list[int]) -> Flags:
    """Marks the fastest candidate of each family that has no run in this cell, unless it is expected to be far
    slower."""
    family_leaders = np.zeros(len(view.places), bool)
    candidates = space.of(int(space.cell[view.best]))
    tried = {space.family[one] for one in candidates if seen.state[one] in (OK, RUNNING)}
    tried |= {space.family[one] for one in chosen}
    failed = Counter(space.family[one] for one in candidates if seen.state[one] in (OOM, OTHER))
    for name in sorted(set(space.family[view.places]) - tried):
        members = np.flatnonzero((space.family[view.places] == name) & left & (view.fits > FAMILY_FIT))
        if len(members) and failed[name] < FAMILY_FAILURES:
            one = members[int(np.argmin(view.belief.mean[members]))]
            family_leaders[one] = view.belief.mean[one] - view.best_log_time < FAMILY_SLOWER
    return family_leaders


def beaten(view: CellView, within: float) -> float:
    """Probability that an unfinished candidate fits and is faster than the best by more than ``within``."""
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
    # A little independent variance keeps nearly equal candidates apart, so that the Cholesky factor exists.
    root = np.linalg.cholesky(covariance + np.diag(JITTER * np.diag(covariance) + TINY))
    random = np.random.default_rng(0)
    times = mean[joint] + random.standard_normal((DRAWS, len(joint))) @ root.T
    fitting = random.random((DRAWS, len(joint))) < fits[joint]
    better = float(((times < goal) & fitting).any(axis=1).mean())
    return float(1 - (1 - better) * np.prod(1 - alone[rest]))


def to_repeat(space: SearchSpace, seen: Seen, cell: int) -> list[int]:
    """The fastest candidates of a cell that noise may have put in the wrong order, fastest first.

    Empty if the fastest has no close competitor.
    """
    candidates = space.of(cell)
    ran = candidates[np.isfinite(seen.log_time[candidates])]
    order = ran[np.argsort(seen.log_time[ran], kind="stable")][:REPEATED]
    margin = TIED * sqrt(2) * KERNEL.noise
    close = [int(one) for one in order if seen.log_time[one] - seen.log_time[order[0]] <= margin]
    return close if len(close) > 1 else []
