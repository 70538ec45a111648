from __future__ import annotations

import random
from itertools import pairwise

import pytest

from workloads.costs.pipeline import pipeline_time_s, simulate
from workloads.costs.schedule import Action, schedule_actions


def lists(name: str, stages: int, microbatches: int) -> list[list[Action]]:
    return [schedule_actions(name, stage, stages, microbatches) for stage in range(stages)]


def test_two_stages_by_hand() -> None:
    # stage 0: F0 0-1, F1 1-2, B0 5-7, B1 8-10.  stage 1: F0 1-2, B0 2-4 ... its F1 comes after B0: 4-5, B1 5-7
    # with p2p 1: stage 1 F0 2-3, B0 3-5, F1 5-6, B1 6-8; stage 0 B0 6-8, B1 9-11.
    result = simulate(lists("1f1b", 2, 2), [1.0, 1.0], [2.0, 2.0], 1.0)
    assert result.total_s == 11
    assert result.idle_s == (5, 5)
    times = {(span.stage, span.action): (span.start_s, span.end_s) for span in result.spans}
    assert times[1, Action("F", 0)] == (2, 3)
    assert times[0, Action("B", 0)] == (6, 8)
    assert times[0, Action("B", 1)] == (9, 11)


def test_bubble_of_equal_stages() -> None:
    for p, m in [(4, 8), (8, 8), (8, 2)]:
        result = simulate(lists("1f1b", p, m), [1.0] * p, [2.0] * p)
        assert result.idle_s == ((p - 1) * 3.0,) * p  # (p - 1) / m of the work


def test_spans_keep_order_and_do_not_overlap() -> None:
    result = simulate(lists("1f1b", 4, 6), [1.0, 2.0, 1.0, 3.0], [2.0, 3.0, 2.0, 1.0], 0.5)
    for stage in range(4):
        own = [span for span in result.spans if span.stage == stage]
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))


def test_a_schedule_that_waits_for_itself() -> None:
    backwards_first = [[Action("B", 0), Action("F", 0)]]
    with pytest.raises(ValueError, match="waits for itself; next actions are stage 0"):
        simulate(backwards_first, [1.0], [1.0])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_form_is_exact_for_equal_stages(name: str) -> None:
    for p in (1, 2, 5, 8):
        for m in (1, 2, 7, 8, 9, 24):
            exact = simulate(lists(name, p, m), [1.0] * p, [2.0] * p).total_s
            assert pipeline_time_s(name, [1.0] * p, [2.0] * p, m) == pytest.approx(exact)


def test_closed_form_is_exact_with_a_heavy_head() -> None:
    for p in (2, 4, 8):
        for m in (1, 4, 16):
            forward, backward = [1.0] * (p - 1) + [3.5], [2.0] * p
            exact = simulate(lists("1f1b", p, m), forward, backward).total_s
            assert pipeline_time_s("1f1b", forward, backward, m) == pytest.approx(exact, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_form_near_simulation_for_unequal_stages(name: str) -> None:
    draw = random.Random(0)
    for _ in range(300):
        p, m = draw.randint(1, 10), draw.randint(1, 40)
        kind = draw.choice(["any", "uneven layers", "heavy first"])
        forward = [draw.uniform(0.7, 1.3) for _ in range(p)]
        if kind == "uneven layers":
            layers, more = draw.randint(1, 5), draw.randint(0, p)
            forward = [float(layers + (stage < more)) for stage in range(p)]
        elif kind == "heavy first":
            forward = [draw.uniform(1, 4)] + [1.0] * (p - 1)
        backward = [2 * f for f in forward]
        p2p = draw.choice([0.0, 0.1, 0.3]) * sum(forward) / p
        exact = simulate(lists(name, p, m), forward, backward, p2p).total_s
        estimate = pipeline_time_s(name, forward, backward, m, p2p)
        assert -0.08 < estimate / exact - 1 < 0.02, (kind, p, m, p2p)


def test_other_schedules_have_a_smaller_bubble() -> None:
    forward, backward = [1.0] * 8, [2.0] * 8
    plain = pipeline_time_s("1f1b", forward, backward, 16)
    interleaved = pipeline_time_s("interleaved_1f1b", forward, backward, 16, virtual_stages=2)
    assert plain - 48 == 21
    assert interleaved - 48 == pytest.approx(21 / 2)
    assert pipeline_time_s("zero_bubble_v", forward, backward, 16) == 48
