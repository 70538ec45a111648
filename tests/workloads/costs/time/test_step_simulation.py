"""A whole step simulated: by hand, against closed forms, and what must hold whatever the times are."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from tests.workloads.costs.shape.test_schedule import NAMES, chunks_of
from workloads.costs.shape.schedule import SPLIT_BACKWARD, stage_at
from workloads.costs.time.pipeline import pipeline_time_s
from workloads.costs.time.step_bounds import LayoutSteps, PipelineShape, step_bounds_s
from workloads.costs.time.step_simulation import ChunkWork, StepWork, Timeline, simulate_step
from workloads.costs.traffic import collectives


def drawn(draw: random.Random, name: str, zero: int | None = None) -> StepWork:
    p, m, v = draw.randint(1, 6), draw.randint(1, 14), draw.choice(chunks_of(name)[:2])

    def chunk() -> ChunkWork:
        units = draw.randint(1, 6)
        forward, inputs, weight, *traffic = (units * draw.uniform(low, high) for low, high in _RANGES)
        copies = {name: draw.uniform(0.0, 0.4) for name in ("copied_s", "unscattered_s")}
        return ChunkWork(forward, inputs + weight, inputs, weight, units, *traffic, **copies)

    return StepWork(
        schedule=name,
        num_microbatches=m,
        zero_stage=draw.randint(0, 3) if zero is None else zero,
        chunks=tuple(tuple(chunk() for _ in range(v)) for _ in range(p)),
        latency_s=draw.choice([0.0, 0.02]),
        message_s=draw.choice([0.0, 0.1]),
        tied_s=draw.choice([0.0, 0.3]),
        optimizer_s=tuple(draw.uniform(0.1, 0.5) for _ in range(p)),
    )


_RANGES = [(0.8, 1.2), (0.8, 1.4), (0.5, 1.2), (0.0, 0.5), (0.0, 1.5), (0.0, 0.5)]


TIMES = [field for field in ChunkWork._fields if field.endswith("_s")]


def equal(name: str, p: int, m: int, v: int, **fields: object) -> StepWork:
    """F 1, I 1 and W 1 of a micro-batch on every rank, over all its chunks."""
    chunk = ChunkWork(1 / v, 2 / v, 1 / v, 1 / v)
    return StepWork(schedule=name, num_microbatches=m, chunks=((chunk,) * v,) * p, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_have_the_published_bubble(name: str) -> None:
    for p, rounds in ((1, 2), (2, 3), (4, 2), (8, 2)):
        m = p * rounds
        for v in chunks_of(name):
            found = simulate_step(equal(name, p, m, v))
            idle = {
                "interleaved_1f1b": 3 * (p - 1) / v,  # Megatron-LM, arXiv:2104.04473
                "interleaved_zero_bubble": (p - 1) / v,  # ZB-H1's F + I - W of every rank but one, a chunk's share
                "zero_bubble_v": (p - 1) / 2,  # a chunk's forward until the first micro-batch is there
                "dualpipe_v": (p - 1) / 2,
            }.get(name, 3 * (p - 1))
            assert found.step_s == pytest.approx(3 * m + idle), (p, m, v)
            assert found.bubble_share == pytest.approx(idle / (3 * m + idle)), (p, m, v)


def test_a_message_waits_for_its_receiver() -> None:
    """One micro-batch more than ranks, p = 2: latency 0.5, bytes over bandwidth 1. GPipe, F = 1, B = 1.

    Rank 0: F 0-1, 1-2. Message 0 is there at 2.5; rank 1: F 2.5-3.5. It asks for message 1 at 3.5: F 5-6. B 6-7, 7-8.
    Rank 0 has asked for gradients since 2: the first goes 7-8.5, B 8.5-9.5; the second 9.5-11, B 11-12.
    """
    chunk = ChunkWork(1.0, 1.0, 0.5, 0.5)
    work = StepWork(schedule="gpipe", num_microbatches=2, chunks=((chunk,),) * 2, latency_s=0.5, message_s=1.0)
    found = simulate_step(work)
    starts = [(span.rank, span.action.kind, span.start_s) for span in found.spans]
    assert starts == [
        *((0, "F", 0), (0, "F", 1), (0, "B", 8.5), (0, "B", 11)),
        *((1, "F", 2.5), (1, "F", 5), (1, "B", 6), (1, "B", 7)),
    ]
    assert (found.step_s, found.idle_s) == (12, (8, 8))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute and traffic that do not slow each other, so that times are round."""
    monkeypatch.setattr(collectives, "COMPUTE_BESIDE", 1.0)
    monkeypatch.setattr(collectives, "TRAFFIC_BESIDE", 1.0)


@pytest.mark.usefixtures("apart")
def test_reduction_hides_behind_its_backward_but_for_the_last_unit() -> None:
    # Four units. ZeRO 1, two micro-batches: F 4, B 8, F 4, B 8, then a quarter of a reduction of 2 + 2.
    chunk = ChunkWork(4.0, 8.0, 4.0, 4.0, 4, 0.0, 2.0, 2.0)
    work = StepWork(schedule="1f1b", num_microbatches=2, chunks=((chunk,),), zero_stage=1, optimizer_s=(3.0,))
    found = simulate_step(work)
    assert (found.step_s, found.exposed_s, found.traffic) == (24 + 1 + 3, (1.0,), ((0, 24.0, 25.0),))
    # ZeRO 2 reduces with the first backward too, its last quarter beside the next forward; replicas only at the end.
    found = simulate_step(dataclasses.replace(work, zero_stage=2))
    assert (found.step_s, found.traffic) == (28, ((0, 12.0, 12.5), (0, 24.0, 25.0)))
    # A reduction of 16 takes longer than the backward beside it: one unit's 2 of compute, then 16.
    slow = dataclasses.replace(work, chunks=((chunk._replace(scatter_s=14.0),),))
    assert simulate_step(slow).step_s == 4 + 8 + 4 + 2 + 16 + 3


@pytest.mark.usefixtures("apart")
def test_a_second_half_reduces_unit_by_unit() -> None:
    # F 4, I 4, W 4 in four units, twice. A quarter of each reduction is left: the first one goes on beside a forward.
    chunk = ChunkWork(4.0, 8.0, 4.0, 4.0, 4, 0.0, 2.0)
    work = StepWork(schedule="interleaved_zero_bubble", num_microbatches=2, chunks=((chunk,),), zero_stage=2)
    found = simulate_step(work)
    assert (found.step_s, found.traffic) == (24.5, ((0, 12.0, 12.5), (0, 24.0, 24.5)))
    # A reduction of 16: one unit's 1 of compute, then 12 of it in each second half, and 4 after the last.
    slow = dataclasses.replace(work, chunks=((chunk._replace(scatter_s=16.0),),))
    assert simulate_step(slow).step_s == 2 * (4 + 4 + 1 + 12) + 4


@pytest.mark.usefixtures("apart")
def test_weights_are_gathered_one_unit_ahead() -> None:
    chunk = ChunkWork(4.0, 8.0, 4.0, 4.0, 4, 2.0)
    work = StepWork(schedule="1f1b", num_microbatches=2, chunks=((chunk,),), zero_stage=3)
    assert simulate_step(work).exposed_s == (4 * 0.5,)  # the first unit's, of two forwards and two backwards
    assert simulate_step(dataclasses.replace(work, zero_stage=1)).exposed_s == (0.5,)
    slow = dataclasses.replace(work, chunks=((chunk._replace(gather_s=6.0),),))
    assert simulate_step(slow).compute_s == (24.0,)
    assert simulate_step(slow).exposed_s == (2 * (6 + 1 - 4) + 2 * 1.5,)


def test_compute_and_traffic_slow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute takes 1.25 times and traffic 2.5 times as long as long as both run. Three units of a backward of 8 run
    beside a reduction of 2: each unit's 0.5 takes 1.25, in which 1 of its 2 of compute is done, and then 1 is left."""
    monkeypatch.setattr(collectives, "COMPUTE_BESIDE", 1.25)
    monkeypatch.setattr(collectives, "TRAFFIC_BESIDE", 2.5)
    chunk = ChunkWork(4.0, 8.0, 4.0, 4.0, 4, 0.0, 2.0)
    work = StepWork(schedule="1f1b", num_microbatches=1, chunks=((chunk,),), zero_stage=1)
    assert simulate_step(work).step_s == pytest.approx(4 + 2 + 3 * (1.25 + 1) + 0.5)
    # Of a reduction of 32 each unit's 8 outlasts its compute: 2 of compute take 2.5, in which 1 of the traffic is done.
    slow = dataclasses.replace(work, chunks=((chunk._replace(scatter_s=32.0),),))
    assert simulate_step(slow).step_s == pytest.approx(4 + 2 + 3 * (2.5 + 7) + 8)


def test_a_last_gradient_leaves_when_its_rank_has_reduced() -> None:
    """Each of three ranks adds its last unit's reduction to the way of the last micro-batch back to the first."""
    chunk = ChunkWork(1.0, 2.0, 1.0, 1.0, 1, 0.0, 0.5)
    plain = StepWork(schedule="1f1b", num_microbatches=4, chunks=((chunk,),) * 3)
    without = dataclasses.replace(plain, chunks=((chunk._replace(scatter_s=0.0),),) * 3)
    assert simulate_step(plain).step_s == pytest.approx(simulate_step(without).step_s + 3 * 0.5)


def longest_chain_s(work: StepWork) -> float:
    """Of compute and messages alone: actions of a rank in order, and each after the one that it needs."""
    found = simulate_step(work)
    p, last = len(work.chunks), len(work.chunks) * len(work.chunks[0]) - 1
    ends: dict[tuple[bool, int, int], float] = {}
    clock = [0.0] * p
    rank_of: dict[int, int] = {}
    left = sorted(found.spans, key=lambda span: (span.start_s, span.end_s))
    for span in left:
        stage = stage_at(work.schedule, span.rank, span.action.chunk, p)
        rank_of[stage] = span.rank
        chunk = work.chunks[span.rank][span.action.chunk]
        own = dict(zip("FBIW", chunk[:4], strict=True))[span.action.kind]
        forward, begin = span.action.kind == "F", clock[span.rank]
        before = stage - 1 if forward else stage + 1
        if span.action.kind != "W" and 0 <= before <= last:
            hop = (work.latency_s + work.message_s) if rank_of[before] != span.rank else 0.0
            begin = max(begin, ends[forward, before, span.action.microbatch] + hop)
        clock[span.rank] = begin + own
        if span.action.kind != "W":
            ends[forward, stage, span.action.microbatch] = begin + own
    return max(clock)


@pytest.mark.parametrize("name", NAMES)
def test_what_holds_for_any_times(name: str) -> None:
    draw = random.Random(name)
    for _ in range(25):
        work = drawn(draw, name)
        found = simulate_step(work)
        assert found.step_s >= longest_chain_s(work) + max(work.optimizer_s) - 1e-9
        parts = zip(found.compute_s, found.exposed_s, found.optimizer_s, found.idle_s, strict=True)
        for compute, exposed, optimizer, idle in parts:
            assert min(compute, optimizer) > 0 and exposed >= -1e-9 and idle >= -1e-9
            assert compute + exposed + optimizer + idle == pytest.approx(found.step_s)
        check_spans(work, found)
        (bound,) = step_bounds_s(steps_of([work]))
        assert bound >= found.step_s * (1 - 1e-9)


def steps_of(works: list[StepWork]) -> LayoutSteps:
    """Every chunk of every rank as a kind of its own."""
    chunks = [[chunk for own in work.chunks for chunk in own] for work in works]
    sizes = [len(own) for own in chunks]
    return LayoutSteps(
        chunks=ChunkWork(*np.array([chunk for own in chunks for chunk in own]).T),
        zero_stage=np.repeat([work.zero_stage for work in works], sizes),
        splits=np.repeat([int(work.schedule in SPLIT_BACKWARD) for work in works], sizes),
        schedules=[
            PipelineShape(work.schedule, work.num_microbatches, len(work.chunks), len(work.chunks[0]), np.arange(size))
            for work, size in zip(works, sizes, strict=True)
        ],
        first=np.cumsum([0, *sizes[:-1]]),
        hop_s=np.array([work.latency_s + work.message_s for work in works]),
        tied_s=np.array([work.tied_s for work in works]),
        optimizer_s=np.array([max(work.optimizer_s) for work in works]),
    )


def check_spans(work: StepWork, found: Timeline) -> None:
    """Every action once, none beside another of its rank, each at least as long as its compute."""
    by_rank = defaultdict(list)
    for span in found.spans:
        by_rank[span.rank].append(span)
    for rank, own in by_rank.items():
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(own))
        forwards = [span for span in own if span.action.kind == "F"]
        assert len(forwards) == work.num_microbatches * len(work.chunks[rank])
    assert all(start < end <= found.step_s + 1e-9 for _, start, end in found.traffic)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_takes_longer_ends_a_step_earlier(name: str) -> None:
    draw = random.Random(f"longer {name}")
    for _ in range(25):
        work = drawn(draw, name)
        before = simulate_step(work).step_s
        rank, at = draw.randrange(len(work.chunks)), draw.randrange(len(work.chunks[0]))
        for field in TIMES:
            chunk = work.chunks[rank][at]
            longer = chunk._replace(**{field: getattr(chunk, field) + draw.uniform(0.0, 1.0)})
            own = (*work.chunks[rank][:at], longer, *work.chunks[rank][at + 1 :])
            changed = dataclasses.replace(work, chunks=(*work.chunks[:rank], own, *work.chunks[rank + 1 :]))
            assert simulate_step(changed).step_s >= before - 1e-9, field
        for field in ("latency_s", "message_s", "tied_s"):
            changed = dataclasses.replace(work, **{field: getattr(work, field) + draw.uniform(0.0, 1.0)})
            assert simulate_step(changed).step_s >= before - 1e-9, field


@pytest.mark.parametrize("name", NAMES)
def test_units_of_time_and_kinds_of_micro_batches_have_no_names(name: str) -> None:
    """Times in another unit give the step in that unit. A schedule that does not split takes no notice of I and W, and
    its micro-batches and ranks are told apart by their place alone: the reversed model of one micro-batch is the same.
    """
    draw = random.Random(f"scaled {name}")
    for _ in range(10):
        work = drawn(draw, name, zero=0)
        scaled = [
            [chunk._replace(**{name: 8 * getattr(chunk, name) for name in TIMES}) for chunk in own]
            for own in work.chunks
        ]
        slow = dataclasses.replace(
            work,
            chunks=tuple(map(tuple, scaled)),
            latency_s=8 * work.latency_s,
            message_s=8 * work.message_s,
            tied_s=8 * work.tied_s,
            optimizer_s=tuple(8 * one for one in work.optimizer_s),
        )
        assert simulate_step(slow).step_s == pytest.approx(8 * simulate_step(work).step_s)
        one = dataclasses.replace(work, num_microbatches=1)
        if len(work.chunks[0]) == 1:
            back = dataclasses.replace(one, chunks=one.chunks[::-1], optimizer_s=one.optimizer_s[::-1])
            if name in ("gpipe", "1f1b"):
                assert simulate_step(back).step_s == pytest.approx(simulate_step(one).step_s)


def test_without_traffic_it_is_the_simulation_of_the_pipeline() -> None:
    """Where receives are free, messages take no time and nothing is sharded, both execute the same lists."""
    draw = random.Random(11)
    for name in NAMES:
        work = drawn(draw, name)
        bare = tuple(tuple(ChunkWork(*chunk[:4]) for chunk in own) for own in work.chunks)
        work = dataclasses.replace(work, chunks=bare, latency_s=0.0, message_s=0.0, tied_s=0.0, optimizer_s=())
        forward, backward, inputs, weights = ([[chunk[at] for chunk in own] for own in bare] for at in range(4))
        v, m = len(bare[0]), work.num_microbatches
        total = pipeline_time_s(name, forward, backward, m, virtual_stages=v, input_s=inputs, weight_s=weights)
        assert simulate_step(work).step_s == pytest.approx(total, rel=1e-12)


def test_tied_copies_on_one_rank_send_nothing() -> None:
    apart = equal("1f1b", 3, 4, 1)
    assert simulate_step(dataclasses.replace(apart, tied_s=0.5)).step_s == simulate_step(apart).step_s + 0.5
    together = equal("zero_bubble_v", 3, 4, 2)
    assert simulate_step(dataclasses.replace(together, tied_s=0.5)).step_s == simulate_step(together).step_s


def test_stages_copy_weights_and_gradients_one_after_another() -> None:
    """The first micro-batch waits for every stage to cast its weights, the last one for every stage to copy its
    gradients; the optimizers of the stages work side by side."""
    chunk = ChunkWork(1.0, 2.0, 1.0, 1.0)
    plain = StepWork(schedule="1f1b", num_microbatches=4, chunks=((chunk,),) * 3, optimizer_s=(0.5, 0.7, 0.6))
    copying = dataclasses.replace(plain, chunks=((chunk._replace(copied_s=0.25, unscattered_s=0.125),),) * 3)
    before, after = simulate_step(plain), simulate_step(copying)
    assert after.step_s == pytest.approx(before.step_s + 3 * (0.25 + 0.125))
    assert after.compute_s == pytest.approx([compute + 0.375 for compute in before.compute_s])
