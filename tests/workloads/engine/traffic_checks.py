"""Counts what each rank sends in a step, call by call, and compares it with the closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.pool import Pool
from workloads.costs.traffic.sent import Traffic, step_traffic
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing.traffic import TrafficCounter, axes_of
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring.step import _batches, run_step
from workloads.parity import training
from workloads.spec.experiment import Experiment

DEVICES_PER_NODE = 2
COUNTED_STEP = 1
"""The second step: in the first one FSDP does not know yet which unit comes next, and gathers none ahead."""
Counted = list[Traffic] | None
Count = tuple[Counted, str | None]
"""What one rank has sent, or None and the reason why that is not known."""
Key = tuple[str, str, str | None]


def built(rank: int, case: Experiment) -> Engine:
    choose_attention(case)
    return build(case, make_groups(case, rank, torch.device("cpu")))


def count(rank: int, case: Experiment) -> Count:
    """Counts what this rank sends in its second step."""
    torch.set_default_dtype(torch.float64 if case.precision == "fp64" else torch.float32)
    try:
        engine = built(rank, case)
        counter = TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE)
        for step in range(COUNTED_STEP):
            run_step(engine, step, _batches(engine, step), is_warmup=True)
        with counter:
            run_step(engine, COUNTED_STEP, _batches(engine, COUNTED_STEP), is_warmup=True)
        return counter.traffic, counter.problem
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def counting() -> Iterator[list[Count]]:
    """Counts what this rank sends in the second step of `workloads.parity.training.train_rank`. The list is filled when
    that step has run."""
    usual, counts = training.run_step, []

    def counted(engine: Engine, step: int, *args: Any, **how: Any) -> Any:
        if step != COUNTED_STEP:
            return usual(engine, step, *args, **how)
        with TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE) as counter:
            pending = usual(engine, step, *args, **how)
        counts.append((counter.traffic, counter.problem))
        return pending

    training.run_step = counted
    try:
        yield counts
    finally:
        training.run_step = usual


def check(pool: Pool, case: Experiment) -> None:
    """Count a step of every rank, without comparing what is computed, and compare with the closed form."""
    check_counts(case, pool.run(count, case.world_size, case))


def check_counts(case: Experiment, counts: Sequence[Count]) -> None:
    """Calls and bytes of every rank are those of the closed form. With learned routing and no capacity, the bytes that
    single ranks exchange among experts depend on the tokens: their sum over all ranks does not."""
    expected = [step_traffic(case, rank, DEVICES_PER_NODE) for rank in range(case.world_size)]
    is_exact = case.model.moe is None or case.routing != "learned" or case.capacity_factor is not None
    for rank, ((traffic, problem), closed) in enumerate(zip(counts, expected, strict=True)):
        assert problem is None
        if is_exact:
            assert traffic == closed, f"rank {rank}"
        else:
            assert _calls_of(traffic) == _calls_of(closed), f"rank {rank}"
            assert _bytes_outside_experts(traffic) == _bytes_outside_experts(closed), f"rank {rank}"
    # Rows that some ranks of a group receive more, others receive less.
    assert _exchanged(traffic for traffic, _ in counts) == _exchanged(expected)


def _calls_of(traffic: Counted) -> dict[Key, int]:
    assert traffic is not None
    return {(row.axis, row.op, row.link): row.calls for row in traffic}


def _bytes_outside_experts(traffic: Counted) -> dict[Key, int]:
    assert traffic is not None
    rows = (row for row in traffic if (row.axis, row.op) != ("ep", "all_to_all"))
    return {(row.axis, row.op, row.link): row.bytes for row in rows}


def _exchanged(ranks: Iterator[Counted] | Sequence[Counted]) -> int:
    return sum(row.bytes for traffic in ranks for row in traffic or () if row.axis == "ep")
