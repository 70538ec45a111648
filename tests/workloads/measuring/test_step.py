"""How steps are measured: how many, when garbage is collected, and the wall time around them."""

from __future__ import annotations

import dataclasses
import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pool import Pool
from workloads.contract import measure_spec
from workloads.contract.measure_spec import MeasureSpec
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring import device_times, step
from workloads.measuring.step import Measurements, measure
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

MODEL = ModelSpec(
    name="steps",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=128,
)


def engine(rank: int, **layout: Any) -> Engine:
    case = Experiment.canonical(**{"model": MODEL, "seq_len": 32, "global_batch_size": 2, **layout})
    choose_attention(case)
    return build(case, make_groups(case, rank, torch.device("cpu")))


def timed(measured: Measurements) -> int:
    return sum(not one.is_warmup for one in measured.steps)


def counts(rank: int, short_step_s: float, *specs: MeasureSpec) -> list[int]:
    before, measure_spec.SHORT_STEP_S = measure_spec.SHORT_STEP_S, short_step_s
    try:
        return [timed(measure(engine(rank), spec)) for spec in specs]
    finally:
        measure_spec.SHORT_STEP_S = before


@pytest.mark.slow
def test_short_steps_are_timed_more_often(gloo_pool: Pool) -> None:
    specs = MeasureSpec(warmup_steps=1), MeasureSpec(warmup_steps=1, timed_steps=2), MeasureSpec(warmup_steps=0)
    assert gloo_pool.run(counts, 1, 60.0, *specs) == [[10, 2, 5]], "without warm-up steps their time is not known"
    assert gloo_pool.run(counts, 1, 0.0, *specs) == [[5, 2, 5]]


def count_of_one(rank: int) -> int:
    measure_spec.SHORT_STEP_S = 60.0 if rank == 0 else 0.0  # each rank would decide otherwise
    try:
        return timed(measure(engine(rank, dp=2, zero_stage=1), MeasureSpec(warmup_steps=1)))
    finally:
        measure_spec.SHORT_STEP_S = 1.0


def test_all_ranks_time_as_many_steps_as_the_first(gloo_pool: Pool) -> None:
    assert gloo_pool.run(count_of_one, 2) == [10, 10]


def steps_of_a_slow_run(rank: int, limits: tuple[float | None, ...]) -> list[tuple[int, int, bool]]:
    """Steps of warm-up, timed steps, and whether memory was looked up, for each limit of the first rank; the other's
    limit says the opposite."""
    found = []
    for limit in limits:
        own = limit if rank == 0 or limit is None else 60.0 - limit
        spec = MeasureSpec(warmup_steps=4, slow_step_s=own)
        measured = measure(engine(rank, dp=2, zero_stage=1), spec)
        found.append((len(measured.steps) - timed(measured), timed(measured), measured.memory_at_peak is not None))
    return found


@pytest.mark.slow
def test_a_slow_run_ends_early_on_all_ranks(gloo_pool: Pool) -> None:
    for found in gloo_pool.run(steps_of_a_slow_run, 2, (None, 60.0, 1e-9)):
        assert found == [(4, 10, True), (4, 10, True), (2, 1, True)]


def steps_of_one_that_seemed_slow(rank: int) -> tuple[int, int]:
    """As if steps were slow until the third one."""
    at = engine(rank, dp=2, zero_stage=1)
    finish = step._finish

    def slow_at_first(engine: Engine, pending: Any) -> Any:
        record = finish(engine, pending)
        return dataclasses.replace(record, step_time_s=60.0) if record.step < 2 else record

    step._finish = slow_at_first
    try:
        measured = measure(at, MeasureSpec(slow_step_s=30.0))
    finally:
        step._finish = finish
    return len(measured.steps) - timed(measured), timed(measured)


@pytest.mark.slow
def test_a_run_that_only_seemed_slow_goes_on(gloo_pool: Pool) -> None:
    assert gloo_pool.run(steps_of_one_that_seemed_slow, 2) == [(2, 10)] * 2


def test_a_plan_counts_the_steps_that_a_run_will_time() -> None:
    default, explicit = MeasureSpec(), MeasureSpec(warmup_steps=2, timed_steps=7)
    assert [default.steps_of(seconds) for seconds in (None, 0.5, 1.0, 30.0)] == [8, 13, 8, 8]
    assert [explicit.steps_of(seconds) for seconds in (None, 0.5, 1.0, 30.0)] == [9, 9, 9, 9]
    assert (default.in_words, explicit.in_words) == ("3 + 5 to 10", "2 + 7")


def collections(rank: int) -> tuple[list[tuple[bool, bool]], int, int, bool]:
    """(warm-up, collector on) at every step; collections in the timed steps; tensors that they left; on at the end."""
    seen: list[tuple[bool, bool]] = []
    tensors: list[int] = []
    during = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal during
        during += phase == "start" and bool(seen) and not seen[-1][0]

    def before(step: int, is_warmup: bool) -> None:
        seen.append((is_warmup, gc.isenabled()))
        if not is_warmup:
            tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        junk: list[Any] = []
        junk.append(junk)

    gc.set_threshold(50, 10, 10)  # a step makes enough objects to start many collections
    gc.callbacks.append(count)
    try:
        measure(engine(rank, recompute="selective", global_batch_size=4), MeasureSpec(warmup_steps=2), before)
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(700, 10, 10)
    return seen, during, tensors[-1] - tensors[1], gc.isenabled()


@pytest.mark.slow
def test_no_garbage_is_collected_between_timed_steps(gloo_pool: Pool) -> None:
    ((seen, during, left, on_again),) = gloo_pool.run(collections, 1)
    assert seen == [(True, True)] * 2 + [(False, False)] * 10
    assert on_again
    assert during <= 1, "one may follow when the collector is on again"
    # Batches of later steps are there from the beginning, two tensors a micro-batch: nothing else may be added.
    assert left <= 0, "tensors in cycles would pile up while nobody collects them"


def interrupted(rank: int) -> bool:
    def stop(step: int, is_warmup: bool) -> None:
        if not is_warmup:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(engine(rank), MeasureSpec(warmup_steps=1), stop)
    return gc.isenabled()


def test_the_collector_is_on_again_after_a_failure(gloo_pool: Pool) -> None:
    assert gloo_pool.run(interrupted, 1) == [True]


def with_a_pause(rank: int) -> tuple[Measurements, float, float]:
    def pause(step: int, is_warmup: bool) -> None:
        time.sleep(0.2 if step == 3 else 0.0)

    start = time.perf_counter()
    return measure(engine(rank), MeasureSpec(warmup_steps=1, timed_steps=4), pause), start, time.perf_counter()


def test_wall_time_around_the_timed_steps_is_kept(gloo_pool: Pool) -> None:
    ((measured, start, end),) = gloo_pool.run(with_a_pause, 1)
    steps = [step for step in measured.steps if not step.is_warmup]
    inside = sum(step.step_time_s for step in steps)
    assert measured.timed_wall_s >= inside + 0.2, "the pause is in no step, but between them"
    assert list(measured.timed_spans) == [step.step for step in steps]
    spans = [*measured.timed_spans.values()]
    assert [after - before for before, after in spans] == pytest.approx([step.step_time_s for step in steps])
    moments = [start, *(moment for span in spans for moment in span), end]
    assert moments == sorted(moments)


def test_a_micro_batchs_backward_counts_whole_and_split_ones_by_their_share() -> None:
    whole, halves = {"B": [2.0, 2.2, 1.8]}, {"I": [1.2] * 4, "W": [0.8] * 4}
    assert device_times._of_one_micro_batch(whole) == pytest.approx(2.0)
    assert device_times._of_one_micro_batch(halves) == pytest.approx(2.0)
    assert device_times._of_one_micro_batch(whole | halves) == pytest.approx(2.0)  # DualPipeV has both in one chunk
    assert device_times._of_one_micro_batch({"B": [2.0], "I": [1.0], "W": [0.5]}) == pytest.approx((2.0 + 1.5) / 2)


def test_how_far_the_host_was_ahead_of_its_device() -> None:
    """Three steps launched at 100 s, when the device was idle and its clock stood at 7 s; marks are its seconds."""

    def ended(last_backward: float, host_was_there_at: float) -> Any:
        marks = SimpleNamespace(last_backward=last_backward, last_backward_at=host_was_there_at)
        return SimpleNamespace(launched_at=100.0, start=7.0, launched=SimpleNamespace(marks=marks))

    timed_steps = [ended(8.0, 100.4), ended(10.0, 101.0), ended(12.0, 104.9)]  # the device: 101, 103 and 105 s
    for device, expected in (("cuda", 0.6), ("cpu", None)):
        groups = SimpleNamespace(device=torch.device(device))
        at = SimpleNamespace(groups=groups, clock=SimpleNamespace(seconds=lambda start, end: end - start))
        assert device_times.host_lead_s(at, timed_steps) == (pytest.approx(expected) if expected else None)  # type: ignore[arg-type]
