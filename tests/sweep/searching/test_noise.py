"""Searches in which runs of one layout differ, fail at random, or meet a slow node."""

from __future__ import annotations

import dataclasses
from collections import Counter
from math import erf, exp, hypot, log, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from sweep.composing.search_settings import Settings
from sweep.searching.choice import CellView, best_repeat, look
from sweep.searching.session import Session
from sweep.searching.space import Seen
from sweep.searching.surrogate import KERNEL, NOISE_RUNS, Belief, believe, fit
from tests.sweep.searching.spaces import space as some_space


def test_noise_comes_from_repeats_by_hand() -> None:
    space, _ = some_space()
    seen = Seen.nothing(len(space))
    for one in (0, 1):
        seen.ended(one, "ok", 1.0, 0.0)
    assert fit(space, seen).noise == KERNEL.noise, "no repeat yet"
    seen.ended(0, "ok", 3.0, 0.0)
    # Two runs a factor of three apart: their squares sum to log(3)^2 / 2, with one degree of freedom.
    squares = NOISE_RUNS * KERNEL.noise**2 + log(3) ** 2 / 2
    assert fit(space, seen).noise == pytest.approx((squares / (NOISE_RUNS + 1)) ** 0.5)
    assert exp(seen.log_time[0]) == pytest.approx(3**0.5), "the median of its runs"


def test_rows_that_all_deviate_and_of_which_some_are_repeats_can_be_fitted() -> None:
    """Two layouts are far from each other, so that both get a deviation of their own, and one has six runs."""
    space, _ = some_space(count=6, cells=1, spread=0.02)
    seen = Seen.nothing(len(space))
    seen.ended(0, "ok", exp(-0.1), 0.0)
    for run in range(6):
        seen.ended(1, "ok", exp(0.1 + (0.03 if run % 2 else -0.03)), 0.0)
    fitted = fit(space, seen)
    assert (fitted.own > 0).all() and fitted.noise == pytest.approx(0.03, abs=0.002)
    mean = believe(space, seen, np.array([0, 1]), fitted=fitted).mean
    assert mean - space.log_time[:2] == pytest.approx([-0.1, 0.1], abs=0.03)


def test_the_stated_probability_follows_the_noise() -> None:
    """Twelve layouts within 30 %, of which two runs differ by a factor of up to three: the winner is a guess."""
    space, _ = some_space(count=12, cells=1, spread=0.1)
    space = dataclasses.replace(space, log_time=np.zeros(12))
    truth, stated, ties = np.linspace(0.0, 0.3, 12), list[float](), list[int]()
    for seed in range(8):
        random, session = np.random.default_rng(seed), Session(space, Settings(repeats=6))
        runs = Counter[int]()
        while session.end(0) is None:
            for one in session.ask(0):
                runs[one] += 1
                session.tell(one, "ok", exp(truth[one] + 0.4 * random.standard_normal()))
        assert 2 <= sum(runs.values()) - len(runs) <= 6, "as many repeats as are allowed, or as help"
        stated.append(session.probability(0))
        ties.append(len(session.ties(0)))
    # A single search can be misled: its few repeats may agree by chance.
    assert np.mean(stated) > 0.4 and np.median(ties) > 5
    # The same runs without noise: two repeats show that, and the winner is certain.
    quiet = Session(space, Settings(repeats=6))
    while quiet.end(0) is None:
        for one in quiet.ask(0):
            quiet.tell(one, "ok", exp(truth[one]))
    assert quiet.best(0) == 0 and quiet.probability(0) < 0.3


def test_repeats_stop_when_the_tie_is_settled() -> None:
    space, _ = some_space(count=6, cells=1, spread=0.05)
    space = dataclasses.replace(space, log_time=np.zeros(6))
    truth = np.array([0.0, 0.05, 0.5, 0.5, 0.5, 0.5])
    session, runs, random = Session(space, Settings(repeats=100)), Counter[int](), np.random.default_rng(3)
    while session.end(0) is None:
        for one in session.ask(0):
            runs[one] += 1
            session.tell(one, "ok", exp(truth[one] + 0.04 * random.standard_normal()))
    assert session.best(0) == 0
    assert 2 <= sum(runs.values()) - len(runs) < 60
    assert runs[0] > 1 and runs[1] > 1 and max(runs[one] for one in (2, 3, 4, 5)) == 1, "only the close ones"


def test_a_slow_node_is_found_and_its_layouts_are_not_blamed() -> None:
    space, truth = some_space(count=30, cells=2)
    random, seen = np.random.default_rng(0), Seen.nothing(len(space))
    for one in range(0, 60, 2):
        nodes = [f"node{number}" for number in sorted(random.choice(6, 2, replace=False))]
        slow = log(1.3) if "node0" in nodes else 0.0
        time_s = exp(truth[one] + slow + 0.02 * random.standard_normal())
        seen.ended(one, "ok", time_s, float(space.log_time[one]), nodes)
    fitted = fit(space, seen)
    assert list(fitted.slow) == ["node0"] and fitted.slow["node0"] == pytest.approx(log(1.3), abs=0.06)
    ran = look(space, seen, 0)
    rows = {row.place: row.nodes for row in seen.rows}
    off = {place: ran.belief.mean[at] - truth[place] for at, place in enumerate(ran.places) if ran.ran[at]}
    assert max(abs(off[place]) for place in off if "node0" in rows[place]) < 0.1
    blind = Seen.nothing(len(space))
    for row in seen.rows:
        blind.ended(row.place, "ok", exp(row.residual), 0.0, ["node0"])
    assert not fit(space, blind).slow, "a node of all rows is compared with none"


def test_what_failed_runs_again_and_not_a_third_time() -> None:
    space, truth = some_space(count=20, cells=1)
    best, broken = int(np.argmin(truth)), int(np.argmin(space.log_time))
    session, runs = Session(space, Settings(stop=0.0, repeats=0)), Counter[int]()
    assert best != broken
    while session.end(0) is None:
        for one in session.ask(0):
            runs[one] += 1
            lost = one == broken or (one == best and runs[one] == 1)
            session.tell(one, "other" if lost else "ok", None if lost else exp(truth[one]))
    assert session.best(0) == best
    assert runs[best] == runs[broken] == 2 and sum(runs.values()) == len(runs) + 2
    assert session.seen.runs_again() == pytest.approx((1 + 1) / (2 + 4))


def test_out_of_memory_is_not_tried_again() -> None:
    space, truth = some_space(count=6, cells=1)
    session, runs = Session(space, Settings(stop=0.0, repeats=0)), Counter[int]()
    while session.end(0) is None:
        for one in session.ask(0):
            runs[one] += 1
            session.tell(one, "oom" if one == 3 else "ok", None if one == 3 else exp(truth[one]))
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("seed", range(12))
def test_in_a_noisy_space_of_cpu_runs_a_better_layout_is_not_ruled_out(seed: int) -> None:
    """Six layouts within 12 %, with an exact prediction; the runs of one layout differ by a factor of three, as they do
    where processes share a few processors. Then no search of a few runs knows the fastest."""
    space, _ = some_space(count=6, cells=1, spread=0.03)
    space = dataclasses.replace(space, log_time=np.linspace(0.0, 0.12, 6))
    random, session, times = np.random.default_rng(seed), Session(space, Settings()), dict[int, list[float]]()
    while session.end(0) is None:
        for one in session.ask(0):
            times.setdefault(one, []).append(exp(space.log_time[one] + log(3) * random.uniform(-0.5, 0.5)))
            session.tell(one, "ok", times[one][-1])
    assert any(len(of_layout) > 1 for of_layout in times.values()), "without a repeat the noise is not known"
    assert fit(space, session.seen).noise > 0.15, "0.32 is right"
    assert session.probability(0) > 0.03
    assert len(session.ties(0)) > 1 or session.probability(0) < 0.1


def test_repeats_that_would_not_change_the_answer_are_not_made() -> None:
    # Two layouts 2 % apart, known to 3 % each: a repeat may change the order. Known to 0.1 %, or 80 % apart: it cannot.
    def view(gap: float, spread: float, noise: float) -> CellView:
        belief = Belief(np.array([0.0, gap]), np.eye(2) * spread**2)
        return CellView(np.arange(2), np.ones(2, bool), np.zeros(2, bool), belief, np.ones(2), noise, 0)

    settings = Settings()
    close = best_repeat(view(0.02, 0.03, 0.03), settings.within)
    # The slower one is better by more than 1 % if the difference is below log(0.99): a normal of 0.02 and 0.03 sqrt(2).
    assert close.wrong == pytest.approx(0.5 * (1 + erf((log(0.99) - 0.02) / 0.03 / 2)), abs=0.02)
    assert close.is_worth_it(settings)
    assert not best_repeat(view(0.02, 0.001, 0.03), settings.within).is_worth_it(settings)
    assert not best_repeat(view(0.6, 0.03, 0.03), settings.within).is_worth_it(settings)
    hopeless = best_repeat(view(0.02, 0.03, 3.0), settings.within)
    assert not hopeless.is_worth_it(settings), "too noisy to learn from"


def test_runs_of_two_close_layouts_are_planned_together() -> None:
    # Two layouts 2 % apart, known to 2 % each, with noise of 4 %: runs of one alone would not be worth their cost.
    settings, known, noise = Settings(), 0.02 * sqrt(2), 0.04 * sqrt(2 / 4)
    belief = Belief(np.array([0.0, 0.02]), np.eye(2) * 0.02**2)
    view = CellView(np.arange(2), np.ones(2, bool), np.zeros(2, bool), belief, np.ones(2), 0.04, 0)
    found = best_repeat(view, settings.within)
    assert found.is_worth_it(settings)
    # Four runs of each tell the difference to `noise`: where the mean will be, and what is then not known.
    left = known * noise / hypot(known, noise)
    means = [NormalDist(0.02, known**2 / hypot(known, noise)).inv_cdf((n + 0.5) / 1000) for n in range(1000)]
    right = float(np.mean([1 - NormalDist(abs(mean), left).cdf(log(0.99)) for mean in means]))
    assert found.gain == pytest.approx((found.wrong - (1 - right)) / 8, rel=0.25)
