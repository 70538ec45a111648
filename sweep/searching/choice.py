"""Chooses what to run next in a cell, and estimates the probability that something better is untried.

The next run maximizes the expected improvement on the best so far, times the probability that it fits in memory.
Several runs are chosen one after another, each as if the chosen ones and those in progress had turned out as expected.
The best candidate of each family that has not run comes next, unless it is predicted to be far slower: a prior that is
wrong is wrong for the whole family, by more than its spread admits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import log, pi, sqrt
from types import MappingProxyType

import numpy as np

from sweep.composing.search_settings import Settings
from sweep.searching.fitting import fit_probability, normal_cdf
from sweep.searching.space import OK, OOM, OTHER, RUNNING, UNTRIED, Flags, Floats, Ints, SearchSpace, Seen
from sweep.searching.surrogate import Belief, Fit, believe, condition, fit

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
MOST_FAILURES = 2
"""A candidate that failed this often is not run again."""
LEAST_REPEATS = 2
"""Repeats in the whole search from which the noise counts as known."""


@dataclass(frozen=True, slots=True)
class CellView:
    """Current state of one cell."""

    places: Ints
    """Candidates that ran or may still run, as indices into the space."""
    ran: Flags
    """Whether each has a step time."""
    running: Flags
    """Whether the first run of each is in progress."""
    belief: Belief
    fits: Floats
    """Probability that a run of each succeeds."""
    noise: float
    """Standard deviation of log step time between two runs of one layout."""
    best: int | None
    """The fastest of those that ran, by the belief, as a row of ``places``; None: none ran."""

    @property
    def fastest(self) -> int | None:
        """`best` as an index into the space."""
        return None if self.best is None else int(self.places[self.best])


def look(space: SearchSpace, seen: Seen, cell: int, fitted: Fit | None = None) -> CellView:
    """The posterior view of a cell, given all results so far. ``fitted``: `fit` of them; None: it is computed."""
    candidates = space.of(cell)
    state = seen.state[candidates]
    again = (state == OTHER) & (seen.failures[candidates] < MOST_FAILURES)
    places = candidates[np.isin(state, (UNTRIED, RUNNING, OK)) | again]
    running, ran = seen.state[places] == RUNNING, np.isfinite(seen.residual[places])
    fits = np.where(ran, 1.0, fit_probability(space, seen, cell, places))
    fits[(seen.failures[places] > 0) & ~ran] *= seen.runs_again()
    may = (fits >= LEAST_FIT) | running
    places, fits, running, ran = places[may], fits[may], running[may], ran[may]
    fitted = fit(space, seen) if fitted is None else fitted
    belief = believe(space, seen, places, inflation(seen, fitted.slow), fitted=fitted)
    for one in np.repeat(np.arange(len(places)), seen.repeating[places]):
        belief = condition(belief, int(one), fitted.noise)
    best = int(np.argmin(np.where(ran, belief.mean, np.inf))) if ran.any() else None
    return CellView(places, ran, running, belief, fits, fitted.noise, best)


def inflation(seen: Seen, slow: Mapping[str, float] = MappingProxyType({})) -> float:
    """Factor on the variance, at least 1, from how far results were from their predictions.

    ``slow``: logarithms of the slowdowns of nodes, which are no surprise.
    """
    known = [sum(slow.get(name, 0.0) for name in one.nodes) if slow else 0.0 for one in seen.surprises]
    z = [(one.off - slowdown) / one.spread for one, slowdown in zip(seen.surprises, known, strict=True)]
    squares = np.minimum(np.abs(np.array(z, dtype=float)), LARGEST_SURPRISE) ** 2
    return max(1.0, float((QUIET_RUNS + squares.sum()) / (QUIET_RUNS + len(z))))


def expected_improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    """Expected improvement of a normal variable on ``best``: the mean of max(best - x, 0)."""
    z = (best - mean) / spread
    improvement: Floats = (best - mean) * normal_cdf(z) + spread * np.exp(-0.5 * z**2) / sqrt(2 * pi)
    return improvement


def choose(space: SearchSpace, seen: Seen, view: CellView, count: int, settings: Settings) -> list[int]:
    """The next ``count`` candidates of the cell to run for the first time, as indices into the space.

    Fewer if there are no more, or if those in progress and the chosen ones probably include all that are better than
    the best.
    """
    chosen: list[int] = []
    belief, left = view.belief, ~view.running & ~view.ran
    best = float("nan") if view.best is None else float(belief.mean[view.best])
    for one in np.flatnonzero(view.running):
        belief = condition(belief, int(one), view.noise)
        if view.best is None:
            best = float(np.nanmin([best, belief.mean[one]]))
    while len(chosen) < count and left.any():
        idle = dataclasses.replace(view, fits=np.where(left, view.fits, 0.0))
        others = view.best is not None and (chosen or view.running.any())
        if others and improbable(idle, settings):
            break
        if np.isfinite(best):
            score = expected_improvement(belief.mean, belief.spread, best) * view.fits
        else:
            # Same score as in `in_order`.
            score = -belief.mean + np.log(np.maximum(view.fits, 1e-9))
        allowed = left
        if view.best is None and (fresh := left & (seen.failures[view.places] == 0)).any():
            allowed = fresh  # what failed runs again when something else has run
        # The most promising candidate comes first, then families that have not run.
        if view.best is not None and (chosen or count == 1):
            untried = _untried_families(space, seen, view, left, chosen)
            if untried.any():
                allowed, score = untried, -belief.mean
        one = int(np.argmax(np.where(allowed, score, -np.inf)))
        left[one] = False
        chosen.append(int(view.places[one]))
        belief = condition(belief, one, view.noise)
        if not np.isfinite(best):
            best = float(belief.mean[one])
    return chosen


def repeat(view: CellView, count: int, within: float) -> list[int]:
    """``count`` repeats of candidates that ran: of the best or of the one that most probably beats it, whichever is
    known less well."""
    chosen: list[int] = []
    while view.best is not None and len(chosen) < count:
        others = view.ran.copy()
        others[view.best] = False
        one = view.best
        if others.any():
            rival = int(np.argmax(np.where(others, alone(view, within), -1.0)))
            one = max(view.best, rival, key=lambda row: view.belief.covariance[row, row])
        chosen.append(int(view.places[one]))
        view = dataclasses.replace(view, belief=condition(view.belief, one, view.noise))
    return chosen


def in_order(view: CellView, count: int) -> list[int]:
    """The ``count`` candidates with the lowest expected time, where a failure costs as much as doubling the time."""
    score = -view.belief.mean + np.log(np.maximum(view.fits, 1e-9))
    order = np.argsort(-score, kind="stable")
    return [int(view.places[one]) for one in order if not view.running[one] and not view.ran[one]][:count]


def _untried_families(space: SearchSpace, seen: Seen, view: CellView, left: Flags, chosen: list[int]) -> Flags:
    """Marks the fastest candidate of each family that has no run in this cell, unless it is expected to be far
    slower."""
    family_leaders = np.zeros(len(view.places), bool)
    candidates = space.of(int(space.cell[view.places[0]]))
    tried = {space.family[one] for one in candidates if seen.state[one] in (OK, RUNNING)}
    tried |= {space.family[one] for one in chosen}
    failed = Counter(space.family[one] for one in candidates if seen.state[one] in (OOM, OTHER))
    for name in sorted(set(space.family[view.places]) - tried):
        members = np.flatnonzero((space.family[view.places] == name) & left & (view.fits > FAMILY_FIT))
        if len(members) and failed[name] < FAMILY_FAILURES:
            one = members[int(np.argmin(view.belief.mean[members]))]
            family_leaders[one] = view.belief.mean[one] - view.belief.mean[view.best] < FAMILY_SLOWER
    return family_leaders


@dataclass(frozen=True, slots=True)
class Beaten:
    """Probabilities that another candidate fits and is faster than the best by more than some share."""

    by_new: float
    """One that has not run."""
    by_old: float
    """One that ran and had bad luck."""
    by_any: float


def beaten(view: CellView, within: float) -> Beaten:
    """How probably another candidate fits and is faster than the best by more than ``within``."""
    if view.best is None:
        unknown = float(len(view.places) > 0)
        return Beaten(unknown, 0.0, unknown)
    each = alone(view, within)
    each[view.best] = 2.0  # always among the joint ones
    order = np.argsort(-each, kind="stable")
    joint, rest = order[:JOINT], order[JOINT:]
    covariance = view.belief.covariance[np.ix_(joint, joint)]
    # A little independent variance keeps nearly equal candidates apart, so that the Cholesky factor exists.
    root = np.linalg.cholesky(covariance + np.diag(JITTER * np.diag(covariance) + TINY))
    random = np.random.default_rng(0)
    times = view.belief.mean[joint] + random.standard_normal((DRAWS, len(joint))) @ root.T
    fitting = random.random((DRAWS, len(joint))) < view.fits[joint]
    better = (times < times[:, :1] + log(1 - within)) & fitting

    def probability(counted: Flags) -> float:
        missed = 1 - float((better & counted[joint]).any(axis=1).mean())
        return float(1 - missed * np.prod(1 - each[rest[counted[rest]]]))

    return Beaten(probability(~view.ran), probability(view.ran), probability(np.ones(len(view.places), bool)))


def improbable(view: CellView, settings: Settings) -> bool:
    """Whether `Beaten.by_new` is at most `Settings.stop`. It lies between the largest probability of one candidate and
    the sum of all, which mostly tells."""
    each = alone(view, settings.within)[~view.ran]
    if each.max(initial=0.0) > settings.stop:
        return False
    return float(each.sum()) <= settings.stop or beaten(view, settings.within).by_new <= settings.stop


def alone(view: CellView, within: float) -> Floats:
    """For each candidate the probability that it fits and is faster than the best by more than ``within``."""
    assert view.best is not None
    mean, covariance = view.belief.mean, view.belief.covariance
    spread = np.diag(covariance) + covariance[view.best, view.best] - 2 * covariance[view.best]
    z = (mean[view.best] + log(1 - within) - mean) / np.sqrt(np.maximum(TINY, spread))
    each: Floats = view.fits * normal_cdf(z)
    each[view.best] = 0.0
    return each
