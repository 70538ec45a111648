"""Pipelines' times by hand, and the fast way to a total against the execution of the lists."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.fixed_task import fixed_tasks
from tests.sampling import sampled
from tests.workloads.costs.shape.test_schedule import NAMES, chunks_of, lists, sizes
from workloads.costs.shape.schedule import Action
from workloads.costs.time import pipeline
from workloads.costs.time.execution import steps_of, written_steps
from workloads.costs.time.pipeline import MOST_EXECUTED, Times, pipeline_time_s, simulate


def test_two_stages_by_hand() -> None:
    # rank 0: F0 0-1, F1 1-2, B0 5-7, B1 8-10.  rank 1: F0 1-2, B0 2-4 ... its F1 comes after B0: 4-5, B1 5-7
    # with p2p 1: rank 1 F0 2-3, B0 3-5, F1 5-6, B1 6-8; rank 0 B0 6-8, B1 9-11.
    result = simulate(lists("1f1b", 2, 2), [1.0, 1.0], [2.0, 2.0], 1.0)
    assert result.total_s == 11
    assert result.idle_s == (5, 5)
    assert result.idle_share == pytest.approx(5 / 11)
    times = {(span.rank, span.action): (span.start_s, span.end_s) for span in result.spans}
    assert times[1, Action("F", 0)] == (2, 3)
    assert times[0, Action("B", 0)] == (6, 8)
    assert times[0, Action("B", 1)] == (9, 11)


def test_split_backwards_by_hand() -> None:
    # rank 0: F0 0-1, F1 1-2, I0 3-4, W0 4-5, I1 5-6, W1 6-7; rank 1: F0 1-2, I0 2-3, F1 3-4, I1 4-5, W0 5-6, W1 6-7
    together = lists("interleaved_zero_bubble", 2, 2)
    result = simulate(together, [1.0] * 2, [2.0] * 2, name="interleaved_zero_bubble")
    assert (result.total_s, result.idle_s) == (7, (1, 1))
    # An I of 3 and a W of 0.5 on rank 1: F0 1-2, I0 2-5, F1 5-6, I1 6-9, so rank 0's I1 is at 9 and its W1 ends at 11.
    result = simulate(
        together, [1.0] * 2, [2.0] * 2, name="interleaved_zero_bubble", input_s=[1.0, 3.0], weight_s=[1.0, 0.5]
    )
    assert result.total_s == 11


def test_the_turn_of_a_v_sends_nothing() -> None:
    # One micro-batch, p2p 0.5. rank 0 F 0-1; rank 1 both F 1.5-3.5; rank 0 F 4-5, I 5-6; rank 1 I W I 6.5-9.5; rank 0
    # I 10-11, W 11-12.
    together = lists("zero_bubble_v", 2, 1, 2)
    assert simulate(together, [2.0] * 2, [4.0] * 2, 0.5, name="zero_bubble_v").total_s == 12


def test_a_rank_shares_its_time_among_its_chunks_unless_they_have_their_own() -> None:
    together = lists("interleaved_1f1b", 2, 4, 2)
    alike = simulate(together, [2.0, 4.0], [4.0, 8.0], name="interleaved_1f1b")
    assert alike == simulate(together, [[1, 1], [2, 2]], [[2, 2], [4, 4]], name="interleaved_1f1b")
    heavy_end = simulate(together, [[1, 1], [1, 3]], [[2, 2], [2, 6]], name="interleaved_1f1b")
    assert {s.end_s - s.start_s for s in heavy_end.spans if s.rank == 1 and s.action.chunk == 1} == {3, 6}


def test_bubble_of_equal_stages() -> None:
    for p, m in [(4, 8), (8, 8), (8, 2)]:
        result = simulate(lists("1f1b", p, m), [1.0] * p, [2.0] * p)
        assert result.idle_s == ((p - 1) * 3.0,) * p  # (p - 1) / m of the work


def test_published_bubbles() -> None:
    """Interleaved: 1 / v of 1F1B's. ZB-H1: (p - 1) (F + I - W). ZB-V: none, from 2 p - 1 micro-batches on."""
    for p in (2, 4, 8):
        m = 2 * p
        for v in (2, 4):
            total = pipeline_time_s("interleaved_1f1b", [1.0] * p, [2.0] * p, m, virtual_stages=v)
            assert total - 3 * m == pytest.approx(3 * (p - 1) / v)
        assert pipeline_time_s("interleaved_zero_bubble", [1.0] * p, [2.0] * p, m) - 3 * m == pytest.approx(p - 1)
        # Each rank starts when the first micro-batch reaches it, a chunk's forward later than the rank before.
        together = lists("zero_bubble_v", p, m, 2)
        simulation = simulate(together, [2.0] * p, [4.0] * p, name="zero_bubble_v")
        for rank in range(p):
            own = [span for span in simulation.spans if span.rank == rank]
            assert own[-1].end_s - own[0].start_s == 6 * m


@pytest.mark.parametrize("name", NAMES)
def test_spans_keep_order_and_do_not_overlap(name: str) -> None:
    v = chunks_of(name)[0]
    result = simulate(lists(name, 4, 6, v), [1.0, 2.0, 1.0, 3.0], [2.0, 3.0, 2.0, 1.0], 0.5, name=name)
    for rank in range(4):
        own = [span for span in result.spans if span.rank == rank]
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))
        assert result.idle_s[rank] == pytest.approx(result.total_s - sum(span.end_s - span.start_s for span in own))


def test_a_schedule_that_waits_for_itself() -> None:
    for wrong in ("BF", "FWI", "IFW"):
        with pytest.raises(ValueError, match="waits for itself; next actions are rank 0"):
            simulate([[Action(kind, 0) for kind in wrong]], [1.0], [1.0])  # type: ignore[arg-type]
    crossed = [lists("1f1b", 1, 2)[0], [Action("F", 1), Action("B", 1), Action("F", 0), Action("B", 0)]]
    with pytest.raises(ValueError, match=r"next actions are rank 0.*; rank 1"):
        simulate(crossed, [1.0] * 2, [1.0] * 2)


def drawn_times(draw: random.Random, p: int, v: int) -> tuple[list[list[float]], list[list[float]], float]:
    """Forward and backward by rank and chunk, and the time between two ranks."""
    kind = draw.choice(["equal", "any", "uneven layers", "heavy ends"])
    forward = [[1.0] * v for _ in range(p)]
    if kind == "any":
        forward = [[draw.uniform(0.7, 1.3) for _ in range(v)] for _ in range(p)]
    elif kind == "uneven layers":
        layers, more = draw.randint(1, 5), draw.randint(0, p)
        forward = [[float(layers + (rank < more))] * v for rank in range(p)]
    elif kind == "heavy ends":
        forward[0][0] = draw.uniform(1, 4)
        forward[-1][-1] = draw.uniform(1, 4)
    ratio = draw.choice([1.0, 2.0, 2.5, 3.0])
    p2p = draw.choice([0.0, 0.1, 0.3]) * sum(map(sum, forward)) / p / v
    return forward, [[ratio * one for one in own] for own in forward], p2p


def simulated(name: str, forward: Times, backward: Times, m: int, p2p: float, v: int) -> float:
    return simulate(lists(name, len(forward), m, v), forward, backward, p2p, name=name).total_s


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_fast_way_is_exact(name: str) -> None:
    draw = random.Random(1)
    for p, m, v in sizes(name, 20):
        assert m <= MOST_EXECUTED
        forward, backward, p2p = drawn_times(draw, p, v)
        fast = pipeline_time_s(name, forward, backward, m, p2p, v)
        assert fast == pytest.approx(simulated(name, forward, backward, m, p2p, v), rel=1e-12), (p, m, v)


@pytest.mark.slow
def test_1f1b_is_exact_with_any_number_of_micro_batches() -> None:
    draw = random.Random(3)
    for turn in range(150):
        p, m = draw.randint(1, 14), draw.choice([draw.randint(1, 40), draw.randint(40, 300)])
        forward, backward, p2p = drawn_times(draw, p, 1)
        if turn % 3 == 0:
            backward = [[draw.uniform(0.5, 4)] for _ in range(p)]
        slow = simulated("1f1b", forward, backward, m, p2p, 1)
        flat = [own for (own,) in forward], [own for (own,) in backward]
        assert pipeline_time_s("1f1b", *flat, m, p2p) == pytest.approx(slow, rel=1e-11), (p, m)
        assert pipeline._longest_chain_s(*flat, m, p2p) == pytest.approx(slow, rel=1e-11), (p, m)


def test_a_million_micro_batches_are_no_more_work_than_a_hundred() -> None:
    # Equal ranks: in p rounds the longest chain runs p (F + B) and goes down all p - 1 hops and back.
    p, m, p2p = 8, 10**6, 0.25
    few, many = (pipeline_time_s("1f1b", [1.0] * p, [2.0] * p, count, p2p) for count in (m % p + 10 * p, m))
    assert many - few == pytest.approx((m - m % p - 10 * p) / p * (3 * p + 2 * (p - 1) * p2p), rel=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_rounds_that_are_not_executed_are_shifts_of_those_that_are(name: str) -> None:
    """Unequal ranks that wait for messages: whole schedules, of which the fast way executes the first rounds."""
    rng = random.Random(5)
    for p, m in ((1, 40), (2, 41), (3, 48), (4, 70)):
        v = chunks_of(name)[-1]
        forward, backward = ([[rng.uniform(0.5, 2.0) for _ in range(v)] for _ in range(p)] for _ in range(2))
        hop = rng.choice((0.0, 0.3))
        whole = simulate(lists(name, p, m, v), forward, backward, hop, name=name).total_s
        assert pipeline_time_s(name, forward, backward, m, hop, v) == pytest.approx(whole, rel=1e-11), (p, m)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])  # which has a formula
def test_a_schedule_of_more_micro_batches_has_more_of_the_same_rounds(name: str) -> None:
    for p, m in ((1, 19), (2, 37), (3, 30), (4, 50)):
        short, whole = (steps(name, p, m, chunks_of(name)[-1]) for steps in (steps_of, written_steps))
        shorter, written = ([*one.before, *one.round * one.rounds, *one.after] for one in (short, whole))
        assert shorter == written, (p, m)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_micro_batches_take_what_they_would(name: str) -> None:
    """Beyond what is executed one by one: exact for equal ranks, else within 2 % and mostly within 0.1 %."""
    draw = random.Random(2)
    errors = []
    for turn in range(8):
        p, v = draw.choice([4, 7, 12, 16]), chunks_of(name)[0]
        m = 1024 // p + draw.randint(1, 150)
        forward, backward, p2p = drawn_times(draw, p, v)
        if turn == 0:
            equal = [1.0] * p, [2.0] * p, m, 0.1, v
            assert pipeline_time_s(name, *equal) == pytest.approx(simulated(name, *equal), rel=1e-9), (p, m, v)
        exact = simulated(name, forward, backward, m, p2p, v)
        errors.append(abs(pipeline_time_s(name, forward, backward, m, p2p, v) / exact - 1))
    assert max(errors) < 0.02
    assert sum(errors) / len(errors) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(NAMES, 2, seconds=1.5))
def test_fast_enough_for_plans(name: str) -> None:
    """Of the sizes that grids have."""
    v = chunks_of(name)[0]
    asked = [(p, m) for p in (2, 4, 8, 16) for m in (1, 2, 4, 8, 16, 32, 64)]

    def of_grid() -> None:
        for p, m in 20 * asked:
            pipeline_time_s(name, [1.0] * p, [2.0] * p, m, 0.1, v)

    assert fixed_tasks(of_grid) < 1.5  # 0.03 to 0.45 on idle cores


def table_of_idle_shares() -> str:
    asked = [(p, m) for p in (2, 4) for m in (8, 32)]
    lines = [f"    {'schedule':26}" + "".join(f"{f'p {p}, m {m}':>12}" for p, m in asked)]
    for name in NAMES:
        v = 2 if 2 in chunks_of(name) else 1
        shares = [simulate(lists(name, p, m, v), [1.0] * p, [2.0] * p, name=name).idle_share for p, m in asked]
        lines.append(f"    {name:26}" + "".join(f"{f'{100 * share:.1f} %':>12}" for share in shares))
    return "\n".join(lines)


def test_the_table_of_idle_shares_is_what_a_simulation_finds() -> None:
    assert table_of_idle_shares() in str(pipeline.__doc__), table_of_idle_shares()
