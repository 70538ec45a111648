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
from math import hypot, log, pi, sqrt
from statistics import NormalDist
from types import MappingProxyType

import numpy as np

from sweep.composing.search_settings import Settings
from sweep.searching.fitting import fit_probability, normal_cdf
from sweep.searching.space import OK, OOM, OTHER, RUNNING, UNTRIED, Flags, Floats, Ints, SearchSpace, Seen
from sweep.searching.surrogate import KERNEL, Belief, Fit, believe, condition, fit

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
TOP = 10
"""Most candidates among which the best is looked for: the fastest that ran, by the belief."""
WORTH = 0.05
"""A repeat is worth its cost if the probability of a wrong answer is expected to sink by this share of `Settings.stop`:
what the user accepts is then gone in some twenty runs, about twice as many as a search has of one cell."""
SURE = 0.2
"""Nothing is repeated if the probability of a wrong answer is at most this share of `Settings.stop`: the rest is left
to candidates that have not run."""
AHEAD = (1, 2, 4)
"""Numbers of repeats of a candidate that are considered together: one alone often cannot change the answer, although
several can (Frazier and Powell, Decision Analysis 7(4), 2010)."""
RESULTS = 9
"""Number of results of a repeat that are considered, equally probable."""
LEAST_REPEATS, LEAST_NOISY = 2, 6
"""Repeats in the whole search from which the noise counts as known: if it is what the kernel says, or if it is
`NOISY` times as much. Six repeats tell a standard deviation to 30 % (1 / sqrt(2 * 6)), two only to 50 %."""
NOISY = 2.0


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
    """Of those that ran, the one that most probably is within `Settings.within` of the fastest of them, as a row of
    ``places``; None: none ran."""

    @property
    def fastest(self) -> int | None:
        """`best` as an index into the space."""
        return None if self.best is None else int(self.places[self.best])


def look(
    space: SearchSpace, seen: Seen, cell: int, fitted: Fit | None = None, within: float = Settings().within
) -> CellView:
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
    belief = believe(space, seen, places, inflation(seen, cell, fitted.slow), fitted=fitted)
    for one in np.repeat(np.arange(len(places)), seen.repeating[places]):
        belief = condition(belief, int(one), fitted.noise)
    best = None
    if ran.any():
        top = _top(belief, ran, within)
        best = int(top.rows[int(np.argmax(top.right.mean(axis=0)))])
    return CellView(places, ran, running, belief, fits, fitted.noise, best)


@dataclass(frozen=True, slots=True)
class _Top:
    """Joint samples of the fastest candidates that ran."""

    rows: Ints
    """The candidates as rows of the view, fastest first by the belief."""
    times: Floats
    """Logarithms of step times, shape (`DRAWS`, candidates)."""
    right: Flags
    """Whether each is within the share of the fastest, same shape."""


def _top(belief: Belief, ran: Flags, within: float) -> _Top:
    rows = np.flatnonzero(ran)
    rows = rows[np.argsort(belief.mean[rows], kind="stable")][:TOP]
    times = _sampled(belief, rows, np.random.default_rng(0))
    return _Top(rows, times, times <= times.min(axis=1, keepdims=True) - log(1 - within))


def _sampled(belief: Belief, rows: Ints, random: np.random.Generator) -> Floats:
    """Joint samples, shape (`DRAWS`, rows)."""
    covariance = belief.covariance[np.ix_(rows, rows)]
    # A little independent variance keeps nearly equal candidates apart, so that the Cholesky factor exists.
    root = np.linalg.cholesky(covariance + np.diag(JITTER * np.diag(covariance) + TINY))
    times: Floats = belief.mean[rows] + random.standard_normal((DRAWS, len(rows))) @ root.T
    return times


def inflation(seen: Seen, cell: int, slow: Mapping[str, float] = MappingProxyType({})) -> float:
    """Factor on the variance of a cell's candidates, at least 1, from how much faster results were than predicted.

    Results that were slower are left out: one layout that is broken or meets a slow network says nothing of others
    that could be faster than predicted, which is what the search asks. The cell's own results count in full, after a
    start of `QUIET_RUNS` at the factor of all cells: a prior that is wrong is wrong for one model and size first.
    ``slow``: logarithms of the slowdowns of nodes, which are no surprise.
    """
    known = [sum(slow.get(name, 0.0) for name in one.nodes) if slow else 0.0 for one in seen.surprises]
    z = [(one.off - slowdown) / one.spread for one, slowdown in zip(seen.surprises, known, strict=True)]
    # Twice the squares of the faster half are the squares of both, if both are alike.
    squares = 2 * np.clip(np.array(z, dtype=float), -LARGEST_SURPRISE, 0.0) ** 2
    factor = max(1.0, float((QUIET_RUNS + squares.sum()) / (QUIET_RUNS + len(z))))
    own = squares[[one.cell == cell for one in seen.surprises]]
    return max(1.0, float((QUIET_RUNS * factor + own.sum()) / (QUIET_RUNS + len(own))))


def expected_improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    """Expected improvement of a normal variable on ``best``: the mean of max(best - x, 0)."""
    z = (best - mean) / spread
    improvement: Floats = (best - mean) * normal_cdf(z) + spread * np.exp(-0.5 * z**2) / sqrt(2 * pi)
    return improvement


def choose(space: SearchSpace, seen: Seen, view: CellView, count: int, settings: Settings) -> list[int]:
    """The next ``count`` candidates of the cell to run for the first time, as indices into the space.

    Fewer if there are no more, or if those in progress and the chosen ones probably include all that are better than
    the best. Until a run has succeeded, the best is the one that is expected to be, and there are further runs, because
    those before them may fail. Where hardly any other is better than it, they are chosen by time: expected improvements
    lie so far in the tails of the normal distribution then that the widest candidate would win instead of the fastest.
    """
    chosen: list[int] = []
    belief, left = view.belief, ~view.running & ~view.ran
    best = view.best
    for one in np.flatnonzero(view.running):
        belief = condition(belief, int(one), view.noise)
    if best is None and view.running.any():
        best = int(np.argmin(np.where(view.running, belief.mean, np.inf)))
    while len(chosen) < count and left.any():
        allowed = left
        if view.best is None and (fresh := left & (seen.failures[view.places] == 0)).any():
            allowed = fresh  # what failed runs again when something else has run
        idle = dataclasses.replace(view, best=best, fits=np.where(allowed, view.fits, 0.0))
        enough = best is not None and (chosen or view.running.any()) and improbable(idle, settings)
        if view.best is not None and enough:
            break
        if best is None or enough:
            score = _by_time(view)
        else:
            score = expected_improvement(belief.mean, belief.spread, float(belief.mean[best])) * view.fits
        # The most promising candidate comes first, then families that have not run.
        if view.best is not None and (chosen or count == 1):
            untried = _untried_families(space, seen, view, left, chosen)
            if untried.any():
                allowed, score = untried, -belief.mean
        one = int(np.argmax(np.where(allowed, score, -np.inf)))
        left[one] = False
        chosen.append(int(view.places[one]))
        belief = condition(belief, one, view.noise)
        if best is None:
            best = one
    return chosen


def repeat(view: CellView, count: int, settings: Settings) -> list[int]:
    """Up to ``count`` repeats of candidates that ran: at least one, and more as long as each is worth its cost."""
    chosen: list[int] = []
    while view.best is not None and len(chosen) < count:
        next_one = best_repeat(view, settings.within)
        if chosen and not next_one.is_worth_it(settings):
            break
        chosen.append(int(view.places[next_one.row]))
        view = dataclasses.replace(view, belief=condition(view.belief, next_one.row, view.noise))
    return chosen


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeat of a candidate that ran, and what is expected of it."""

    row: int
    """The candidate as a row of the view."""
    wrong: float
    """Probability that another that ran is faster than the best by more than `Settings.within`, before the repeat."""
    gain: float
    """By how much that probability is expected to sink, for each run."""

    def is_worth_it(self, settings: Settings) -> bool:
        return self.wrong > SURE * settings.stop and self.gain > WORTH * settings.stop


def least_repeats(noise: float) -> int:
    """Repeats from which this standard deviation counts as known."""
    return LEAST_NOISY if noise > NOISY * KERNEL.noise else LEAST_REPEATS


def best_repeat(view: CellView, within: float) -> Repeat:
    """The repeat that lowers the probability of a wrong answer most: a knowledge gradient (Frazier, Powell and Dayanik,
    SIAM J. Control Optim. 47(5), 2008), with the probability in place of the expected time.

    The samples of `_top` are weighted by how likely they make each of some results of the repeats. Considered are
    repeats of one candidate, and equally many of the best and of one other, of which only the difference counts here.
    A cell with many equally fast layouts gets few repeats, because none of them would change much. The view has a best.
    """
    top = _top(view.belief, view.ran, within)
    right = top.right.mean(axis=0)
    best, now = int(np.argmax(right)), float(right.max())
    found = Repeat(int(top.rows[0]), 1 - now, 0.0)
    if len(top.rows) == 1:
        return found
    standard = np.array([NormalDist().inv_cdf((number + 0.5) / RESULTS) for number in range(RESULTS)])
    mean, covariance = view.belief.mean[top.rows], view.belief.covariance[np.ix_(top.rows, top.rows)]
    single = np.eye(len(top.rows))
    for repeated in (*single, *(single[best] - np.delete(single, best, axis=0))):
        columns = np.flatnonzero(repeated)
        expected, spread = float(repeated @ mean), sqrt(max(0.0, float(repeated @ covariance @ repeated)))
        times = top.times @ repeated
        for ahead in AHEAD:
            noise = view.noise * sqrt(len(columns) / ahead)
            result = expected + hypot(spread, noise) * standard
            weight = np.exp(-0.5 * ((result[:, None] - times) / noise) ** 2)
            after = (weight @ top.right) / np.maximum(TINY, weight.sum(axis=1, keepdims=True))
            gain = (float(after.max(axis=1).mean()) - now) / (ahead * len(columns))
            if gain > found.gain:
                least_known = columns[int(np.argmax(np.diag(covariance)[columns]))]
                found = Repeat(int(top.rows[least_known]), 1 - now, gain)
    return found


def in_order(view: CellView, count: int) -> list[int]:
    """The ``count`` candidates with the best `_by_time`."""
    order = np.argsort(-_by_time(view), kind="stable")
    return [int(view.places[one]) for one in order if not view.running[one] and not view.ran[one]][:count]


def _by_time(view: CellView) -> Floats:
    """Score of candidates by expected time, highest first: a chance of one half to fit costs as much as doubling the
    time."""
    score: Floats = -view.belief.mean + np.log(np.maximum(view.fits, 1e-9))
    return score


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
    random = np.random.default_rng(0)
    times = _sampled(view.belief, joint, random)
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
