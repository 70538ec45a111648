"""What a search believes and chooses, on small spaces whose truth is known."""

from __future__ import annotations

import dataclasses
from math import erf, exp, log, sqrt
from typing import Any

import numpy as np
import pytest

from sweep.composing.search_settings import Settings
from sweep.searching import choice
from sweep.searching.choice import CellView, beaten, choose, expected_improvement, inflation, look
from sweep.searching.fitting import fit_probability
from sweep.searching.session import Session
from sweep.searching.space import OOM, UNTRIED, Floats, SearchSpace, Seen, Surprise
from sweep.searching.surrogate import Belief, believe
from tests.sweep.searching.spaces import space as some_space

ALL = Settings(stop=0.0)
"""A search that chooses as long as there is a candidate."""


def changed(space: SearchSpace, **arrays: Any) -> SearchSpace:
    return dataclasses.replace(space, **arrays)


def seen_of(space: SearchSpace, truth: Floats, places: list[int]) -> Seen:
    seen = Seen.nothing(len(space))
    for one in places:
        seen.ended(one, "ok", exp(truth[one]), float(space.log_time[one]))
    return seen


def test_without_rows_the_prior_is_believed() -> None:
    space, _ = some_space()
    belief = believe(space, Seen.nothing(len(space)), space.of(0))
    assert belief.mean == pytest.approx(space.log_time[space.of(0)])
    assert belief.spread == pytest.approx(np.full(40, 0.2))


@pytest.mark.parametrize("seed", range(5))
def test_rows_correct_the_prior_and_make_it_narrower(seed: int) -> None:
    space, truth = some_space(seed=seed)
    own = space.of(0)
    belief = believe(space, seen_of(space, truth, [int(one) for one in own[::2]]), own)
    before = np.abs(space.log_time - truth)[own][1::2].mean()
    assert np.abs(belief.mean - truth[own])[1::2].mean() < 0.6 * before
    assert (belief.spread[1::2] < 0.2).all()
    assert np.abs(belief.mean - truth[own])[::2].max() < 0.05, "what ran is known, to the noise of a run"


def test_rows_of_another_cell_say_something_but_less() -> None:
    space, truth = some_space()
    other = believe(space, seen_of(space, truth, [int(one) for one in space.of(1)]), space.of(0))
    own = believe(space, seen_of(space, truth, [int(one) for one in space.of(0)]), space.of(0))
    assert own.spread.mean() < other.spread.mean() < 0.2


def test_one_broken_row_does_not_bend_the_rest() -> None:
    space, truth = some_space(cells=1)
    rows = list(range(0, 40, 2))
    broken = truth.copy()
    broken[4] += log(20)
    belief = believe(space, seen_of(space, broken, rows), space.of(0))
    assert np.median(np.abs(belief.mean - truth)[1::2]) < 0.12


def test_probability_to_fit_falls_with_the_need() -> None:
    space, _ = some_space()
    space = changed(space, log_load=np.linspace(-1, 1, len(space)))
    own = space.of(0)
    found = fit_probability(space, Seen.nothing(len(space)), 0, own)
    assert (np.diff(found) <= 1e-12).all()
    assert found[0] > 0.999
    middle = fit_probability(changed(space, log_load=np.zeros(len(space))), Seen.nothing(len(space)), 0, own)
    assert middle == pytest.approx(np.full(40, 0.5), abs=0.01)


def test_out_of_memory_rules_out_what_needs_more_and_shifts_the_rest() -> None:
    space, _ = some_space()
    same = np.array([f"{place % 2}" for place in range(len(space))])
    space = changed(space, log_load=np.linspace(-0.4, 0.4, len(space)), same_but_memory=same)
    own = space.of(0)
    before = fit_probability(space, Seen.nothing(len(space)), 0, own)
    seen = Seen.nothing(len(space))
    seen.ended(10, "oom", None, 0.0)
    after = fit_probability(space, seen, 0, own)
    assert (after[10::2] == 0).all(), "equal but for memory, and needs as much or more"
    assert (after[:10] < before[:10] + 1e-9).all() and (after[11::2] > 0).any()
    seen = Seen.nothing(len(space))
    seen.ended(30, "ok", 1.0, 0.0)
    assert (fit_probability(space, seen, 0, own) >= before - 1e-9).all()


def test_expected_improvement_by_hand() -> None:
    # On the best itself: spread / sqrt(2 pi). Far below: the difference. Far above: nothing.
    found = expected_improvement(np.array([0.0, -5.0, 5.0]), np.array([1.0, 0.1, 0.1]), 0.0)
    assert found == pytest.approx([1 / sqrt(2 * np.pi), 5.0, 0.0], abs=1e-9)


def test_probability_of_a_better_one_by_hand() -> None:
    # Two independent candidates, each 1 % below the best on average: each is better with 1/2, one of both with 3/4.
    goal = log(0.99)
    view = known_best(np.full(2, goal), np.eye(2) * 0.01)
    assert beaten(view, 0.01).by_new == pytest.approx(0.75, abs=0.03)
    # Fully correlated: 1/2. Half as likely to fit each, independent: 1 - (3/4)^2.
    together = known_best(np.full(2, goal), np.full((2, 2), 0.01))
    assert beaten(together, 0.01).by_new == pytest.approx(0.5, abs=0.03)
    half = dataclasses.replace(view, fits=np.array([1.0, 0.5, 0.5]))
    assert beaten(half, 0.01).by_new == pytest.approx(1 - 0.75**2, abs=0.03)
    assert beaten(dataclasses.replace(view, best=None), 0.01).by_any == 1.0
    # One of the two has run: as probable, and both kinds together as probable as before.
    ran = beaten(dataclasses.replace(view, ran=np.array([True, True, False])), 0.01)
    assert (ran.by_new, ran.by_old, ran.by_any) == pytest.approx((0.5, 0.5, 0.75), abs=0.03)


def known_best(mean: Floats, covariance: Floats) -> CellView:
    """A best that is known to take one second, and candidates that have not run."""
    count = len(mean)
    belief = Belief(np.array([0.0, *mean]), np.pad(covariance, ((1, 0), (1, 0))))
    ran = np.arange(count + 1) == 0
    return CellView(np.arange(count + 1), ran, np.zeros(count + 1, bool), belief, np.ones(count + 1), 0.025, 0)


def test_candidates_beyond_the_joint_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    view = known_best(np.full(6, 0.05), np.eye(6) * 0.01)
    whole = beaten(view, 0.01).by_new
    monkeypatch.setattr(choice, "JOINT", 2)
    each = 0.5 * (1 + erf((log(0.99) - 0.05) / 0.1 / sqrt(2)))
    assert whole == pytest.approx(1 - (1 - each) ** 6, abs=0.03)
    assert beaten(view, 0.01).by_new == pytest.approx(whole, abs=0.03)


def test_surprises_widen_what_is_believed() -> None:
    seen = Seen.nothing(1)
    assert inflation(seen, 0) == 1.0
    seen.surprises = [Surprise(z, 1.0) for z in (0.1, -0.2, 0.3)]
    assert inflation(seen, 0) == 1.0
    # Twice the squares of the faster ones, of another cell: they count once.
    seen.surprises = [Surprise(0.6, 0.2, cell=1), Surprise(-0.6, 0.2, cell=1)]
    assert inflation(seen, 0) == pytest.approx((2 + 2 * 9) / 4)
    # In their own cell they count again, from that start.
    assert inflation(seen, 1) == pytest.approx((2 * 5 + 2 * 9) / 4)
    seen.surprises = [Surprise(-1e9, 1.0, cell=1)]
    assert inflation(seen, 0) == pytest.approx((2 + 2 * 25) / 3), "one broken clock counts as five standard deviations"
    seen.surprises = [Surprise(1e9, 1.0)] * 9
    assert inflation(seen, 0) == 1.0, "broken runs say nothing of faster ones"
    seen.surprises = [Surprise(-0.6, 0.2, ("node0", "node1"))] * 2
    assert inflation(seen, 0, {"node1": -0.6}) == 1.0, "the node was that fast"


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_holds_different_candidates_that_may_run(seed: int) -> None:
    space, truth = some_space(seed=seed)
    seen = seen_of(space, truth, [0, 1])
    seen.ended(2, "oom", None, 0.0)
    chosen = choose(space, seen, look(space, seen, 0), 6, ALL)
    assert len(set(chosen)) == 6
    assert all(seen.state[one] == UNTRIED and space.cell[one] == 0 for one in chosen)
    everything = choose(space, seen, look(space, seen, 0), 1000, ALL)
    assert len(set(everything)) == len(everything) <= 37


def test_until_one_has_succeeded_candidates_run_in_the_order_of_expected_times() -> None:
    space, _ = some_space()
    own = space.of(0)
    times = space.log_time.copy()
    times[own] = 1.0 + 0.01 * np.arange(len(own))
    times[own[:2]] = 0.0, 0.01  # by far the fastest, as predicted
    spread = np.full(len(space), 0.05)
    spread[own[-1]] = 0.2  # an improvement on the first two would be least improbable here
    space = changed(space, log_time=times, time_spread=spread)
    session = Session(space, Settings(batch=3))
    assert session.ask(0) == own[:3].tolist()
    session.tell(int(own[0]), "other")
    session.tell(int(own[1]), "oom")
    assert session.ask(0, 2) == own[3:5].tolist(), "what failed comes after what has not run"


def test_a_family_that_has_not_run_is_tried_unless_far_slower() -> None:
    space, _ = some_space()
    own = space.of(0)
    tp, dp = own[space.family[own] == "tp"], own[space.family[own] == "dp"]
    times = space.log_time.copy()
    times[dp], times[tp] = 0.0, 0.5  # 65 % slower by the prior, with a spread of a hundredth
    space = changed(space, log_time=times, time_spread=np.full(len(space), 0.01))
    seen = seen_of(space, times, [int(dp[0])])
    assert space.family[choose(space, seen, look(space, seen, 0), 2, ALL)[1]] == "tp"
    times[tp] = 2.0  # seven times slower
    assert "tp" not in space.family[choose(space, seen, look(space, seen, 0), 4, ALL)]
    times[tp] = 0.5
    seen.state[tp[:2]] = OOM
    assert "tp" not in space.family[choose(space, seen, look(space, seen, 0), 4, ALL)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("batch", [1, 4])
def test_a_search_finds_the_best_in_few_runs(seed: int, batch: int) -> None:
    space, truth = some_space(count=80, seed=seed)
    session = Session(space, Settings(batch=batch))
    for cell in space.cells:
        runs = 0
        while (end := session.end(cell)) is None:
            for one in session.ask(cell):
                session.tell(one, "ok", exp(truth[one]))
                runs += 1
        own = space.of(cell)
        assert end == "settled"
        assert runs < 40
        best = session.best(cell)
        assert best is not None and truth[best] - truth[own].min() < 0.03
        assert session.ties(cell)[0] == best


def test_a_search_in_which_nothing_runs_ends() -> None:
    space, _ = some_space(count=12, cells=1)
    session = Session(space, Settings())
    asked = []
    while session.end(0) is None:
        for one in session.ask(0):
            asked.append(one)
            session.tell(one, "other")
    assert sorted(asked) == sorted([*range(12), *range(12)]), "each is tried twice"
    assert session.end(0) == "exhausted"
    assert session.best(0) is None and session.ties(0) == []


def test_patience_takes_the_order_of_the_prediction() -> None:
    space, _ = some_space(count=30, cells=1)
    session = Session(space, Settings(patience=3, batch=1, repeats=0))
    order = []
    while session.end(0) is None:
        (one,) = session.ask(0)
        order.append(one)
        session.tell(one, "ok", exp(float(space.log_time[one])))
    assert order == [int(one) for one in np.argsort(space.log_time)[:4]], "the first, and three that are not better"
    assert session.end(0) == "patience"


def test_what_runs_is_not_asked_for_again() -> None:
    space, _ = some_space()
    session = Session(space, Settings())
    first, second = session.ask(0), session.ask(0)
    assert not set(first) & set(second)


def test_what_runs_counts_for_those_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two candidates that promise alike, the one of which the run in progress says nothing goes first."""
    monkeypatch.setattr(choice, "_untried_families", lambda *_: np.zeros(4, bool))
    covariance = 0.01 * np.eye(4)
    covariance[1, 2] = covariance[2, 1] = 0.0095
    belief = Belief(np.array([0.0, -0.02, -0.02, -0.019]), covariance)
    ran, running = np.array([True, False, False, False]), np.array([False, True, False, False])
    space: Any = None
    seen: Any = None
    for in_progress, first in ((running, 3), (np.zeros(4, bool), 1)):
        view = CellView(np.arange(4), ran, in_progress, belief, np.ones(4), 0.025, 0)
        assert choose(space, seen, view, 2, ALL)[0] == first
