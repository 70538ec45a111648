"""Properties that predictions have whatever was fitted, and what a fit finds again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from tests.fixed_task import fixed_tasks
from tests.workloads.predict.tables import random_rows, row
from workloads.predict.facts import facts_of
from workloads.predict.parameters import TIME
from workloads.predict.points import Points
from workloads.predict.predictor import Measured, Predictor, best_cut
from workloads.predict.table import read_points
from workloads.predict.time_terms import bandwidth, step_time

pytestmark = pytest.mark.drawn(one_in=3)

PROFILES = read_profiles()


def points(rows: list[dict[str, Any]] | pd.DataFrame) -> Points:
    frame = pd.DataFrame(rows)
    table = read_points(frame, read_clusters(), PROFILES, PROFILES[GENERAL])
    assert not any(table.reasons), table.reasons
    return table.points


def without_knowledge(rows: list[dict[str, Any]]) -> Any:
    return Predictor.learn(None, PROFILES).predict(points(rows))


def made_up(seed: int, count: int = 120, **changed: float) -> tuple[pd.DataFrame, Points, Any]:
    """Rows whose times are those of a machine with other quantities than the defaults."""
    frame = random_rows(count, seed)
    found = points(frame)
    values = {name: one.value for name, one in TIME.items()} | changed
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.01, count))
    return frame, found, step_time(found, facts_of(found, PROFILES), values) * noise


def measured(found: Points, times: Any) -> Measured:
    unknown = np.full(len(found), np.nan)
    return Measured(found, times, unknown, unknown)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("codebase", ["ultrasweep", "nanotron", "torchtitan", "nobody's"])
def test_memory_grows_with_the_micro_batch_and_falls_with_zero_and_recomputation(recompute: str, codebase: str) -> None:
    grown = without_knowledge([row(mbs=mbs, recompute=recompute, codebase=codebase) for mbs in (1, 2, 4, 8)])
    assert (np.diff(grown.reserved_bytes) > 0).all()
    sharded = without_knowledge([row(sharding=f"zero{z}", recompute=recompute, codebase=codebase) for z in range(4)])
    assert (np.diff(sharded.reserved_bytes[:3]) <= 0).all()
    again = without_knowledge([row(recompute=kind, codebase=codebase) for kind in ("none", "selective", "full")])
    assert (np.diff(again.reserved_bytes) <= 0).all()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *[(text, 0) for text in ("none", "no checkpointing", "no_recompute", "False", "off", 0, 0.0, None, "")],
        *[(text, 1) for text in ("selective", "norm+swiglu", "rope", "swiglu", "core_attn")],
        *[(text, 2) for text in ("full", True, 1, 1.0, "1.0", "activation checkpointing", "uniform")],
    ],
)
def test_recomputation_however_a_table_says_it(text: Any, kind: int) -> None:
    assert points([row(recompute=text)]).recompute.tolist() == [kind]


def test_more_work_takes_longer() -> None:
    for changes in ("mbs", "grad_accum", "seq", "layers", "ffn"):
        one, two = row(), row()
        two[changes] = 2 * one[changes]
        times = without_knowledge([one, two]).step_time_s
        assert times[0] < times[1], changes


@pytest.mark.slow
def test_a_fit_finds_a_slow_machine_again() -> None:
    _, found, times = made_up(0, matmul=0.5, host=0.004)
    predictor = Predictor.learn(measured(found, times), PROFILES)
    _, others, truth = made_up(1, matmul=0.5, host=0.004)
    error = np.abs(predictor.predict(others).step_time_s / truth - 1)
    cold = np.abs(Predictor.learn(None, PROFILES).predict(others).step_time_s / truth - 1)
    assert np.mean(error) < 0.03 < np.mean(cold)


@pytest.mark.slow
def test_ten_rows_are_enough_to_help() -> None:
    _, found, times = made_up(2, matmul=0.5, nvlink=0.5)
    few = np.arange(10)
    predictor = Predictor.learn(measured(found.take(few), times[few]), PROFILES)
    rest = np.arange(10, len(found))
    error = np.abs(predictor.predict(found.take(rest)).step_time_s / times[rest] - 1)
    assert np.mean(error) < 0.06


@pytest.mark.slow
def test_intervals_cover_what_they_promise() -> None:
    _, found, times = made_up(3, count=200, attention=0.3, network=0.5)
    few = np.arange(60)
    predicted = Predictor.learn(measured(found.take(few), times[few]), PROFILES).predict(found.take(np.arange(60, 200)))
    inside = (predicted.low_s <= times[60:]) & (times[60:] <= predicted.high_s)
    assert inside.mean() >= 0.85
    assert (predicted.low_s < predicted.step_time_s).all()
    assert (predicted.step_time_s < predicted.high_s).all()


@pytest.mark.slow
def test_one_broken_run_does_not_bend_the_rest() -> None:
    _, found, times = made_up(4, count=60)
    broken = times.copy()
    broken[7] *= 20
    whole = Predictor.learn(measured(found, times), PROFILES).predict(found).step_time_s
    bent = Predictor.learn(measured(found, broken), PROFILES).predict(found).step_time_s
    assert np.median(np.abs(bent / whole - 1)) < 0.01


@pytest.mark.slow
def test_a_third_of_stuck_runs_does_not_bend_the_rest() -> None:
    """Stuck runs take 2 to 20 times as long. With Huber's loss alone the others are 4 % off instead of 2."""
    _, found, times = made_up(4, count=150)
    _, others, truth = made_up(6, count=100)
    draw = np.random.default_rng(8)
    stuck = np.where(draw.random(len(times)) < 0.3, np.exp(draw.uniform(np.log(2), np.log(20), len(times))), 1.0)
    fits = [Predictor.learn(measured(found, one), PROFILES, widened=False) for one in (times, times * stuck)]
    whole, bent = (one.predict(others).step_time_s for one in fits)
    assert np.mean(np.abs(whole / truth - 1)) < 0.022 and np.mean(np.abs(bent / truth - 1)) < 0.025


@pytest.mark.slow
def test_predictions_do_not_depend_on_the_order_of_rows() -> None:
    _, found, times = made_up(5)
    order = np.random.default_rng(0).permutation(len(found))
    known, rest = np.arange(40), np.arange(40, 120)
    straight = Predictor.learn(measured(found.take(known), times[known]), PROFILES).predict(found.take(rest))
    turned = known[::-1]
    mixed = Predictor.learn(measured(found.take(turned), times[turned]), PROFILES).predict(found.take(rest[::-1]))
    np.testing.assert_allclose(straight.step_time_s, mixed.step_time_s[::-1], rtol=1e-6)
    cold = Predictor.learn(None, PROFILES)
    np.testing.assert_array_equal(cold.predict(found).step_time_s[order], cold.predict(found.take(order)).step_time_s)


def test_a_cut_divides_runs_from_failures() -> None:
    load = np.array([0.2, 0.5, 0.9, 1.1, 1.4])
    assert 0.9 < best_cut(load, np.array([False, False, False, True, True])) < 1.1
    assert best_cut(load, np.array([False, True, True, True, True])) < 0.5


@pytest.mark.slow
def test_rows_that_ran_out_of_memory_move_the_cut() -> None:
    found = points(random_rows(80, 6).assign(gpu="H100", recompute="none", grad_accum=16))
    failed = (1.3 * Predictor.learn(None, PROFILES).predict(found).load > 1).astype(float)
    assert 0.1 < failed.mean() < 0.9
    unknown = np.full(len(found), np.nan)
    predictor = Predictor.learn(Measured(found, unknown, unknown, failed), PROFILES)
    assert (predictor.predict(found).fits == (failed == 0)).mean() > 0.95


@pytest.mark.slow
def test_five_thousand_rows_a_second() -> None:
    found = points(pd.concat([random_rows(500, 7)] * 10, ignore_index=True))
    predictor = Predictor.learn(None, PROFILES)
    predictor.predict(found.take(np.arange(10)))
    assert fixed_tasks(lambda: predictor.predict(found)) < 7  # 1.9 on idle cores


def test_a_group_on_fewer_nodes_is_slowed_less_by_a_slow_network() -> None:
    """The same 32 nodes: data-parallel groups over all of them, over eight, over two and within one."""
    rates = {}
    for measured_gb_s in (None, 40.0):
        layouts = [row(gpus=256, dp=256 // pp, pp=pp, allreduce_gb_s=measured_gb_s) for pp in (1, 4, 16, 32)]
        found = points(layouts)
        values = {name: one.value for name, one in TIME.items()} | {"nvlink": 9.0}  # what a node passes on is no limit
        rates[measured_gb_s] = bandwidth(found, found.dp, found.tp, values)
    slower = rates[40.0] / rates[None]
    nominal = points([row()]).inter[0]
    assert slower[0] == pytest.approx(40e9 / 8 / nominal)  # all nodes: what the job measured
    assert slower[1] == pytest.approx(slower[0] ** (3 / 5))  # 2 ** 3 of 2 ** 5 nodes
    assert slower[2] == pytest.approx(slower[0] ** (1 / 5))
    assert slower[3] == 1.0  # no link between nodes is used


def test_a_slow_launch_slows_what_waits_for_the_host_alone() -> None:
    usual = read_profiles()["ultrasweep"].host_launch_s
    assert usual is not None
    launches = (None, usual, 2 * usual, usual / 2, "", -1.0, "slow")

    def over_the_first(model: int, **layout: Any) -> list[float]:
        times = without_knowledge([row(model, host_launch_s=launch, **layout) for launch in launches]).step_time_s
        return [float(time / times[0]) for time in times]

    waits = over_the_first(1, mbs=1, seq=1024, grad_accum=8)
    assert 1.8 < waits[2] < 2 ** TIME["host_launch"].value and waits[3] < 0.8
    assert over_the_first(8, mbs=4)[2] == pytest.approx(1, abs=0.01)  # the device has enough to do
    assert [waits[place] for place in (1, 4, 5, 6)] == pytest.approx([1] * 4)  # as usual, or unknown
    other = over_the_first(1, mbs=1, seq=1024, grad_accum=8, codebase="nanotron")
    assert other == pytest.approx([1] * len(other))  # nothing says what is usual there
