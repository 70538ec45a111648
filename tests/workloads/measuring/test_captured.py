"""Captured steps: what is copied into a graph and out of it, which step is captured, and what the row says of it.

On a CPU a stand-in takes the place of CUDA's graph. Capturing it computes nothing that lasts, and a replay computes
from the memory that was captured, as a graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.pool import Pool
from tests.workloads.measuring.test_step import engine
from workloads.contract.protocol import MeasureSpec
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.training import captured_step
from workloads.engine.training.build import Engine
from workloads.engine.training.captured_step import Launched
from workloads.measuring import step
from workloads.measuring.step import Measurements, measure

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"global_batch_size": 4},
    {"dp": 2, "zero_stage": 1, "global_batch_size": 4},
    {"dp": 2, "zero_stage": 3, "global_batch_size": 4},
    {"tp": 2, "global_batch_size": 4},
    {"pp": 2, "global_batch_size": 4},
)


class StandIn:
    """A graph on a CPU: it keeps the work, and puts the results of each replay where those of the capture were."""

    captured_from: Engine | None = None
    """Engine whose weights and moments a capture must leave as they are."""
    calls: list[str]

    def __init__(self) -> None:
        StandIn.calls = self.calls = []

    def capture(self, work: Callable[[], Launched]) -> Launched:
        self.calls.append("capture")
        self._work = work
        with unchanged(StandIn.captured_from):
            self._launched = work()
        return self._launched

    def replay(self) -> None:
        self.calls.append("replay")
        self._launched.totals.copy_(self._work().totals)

    def reset(self) -> None:
        self.calls.append("reset")


@contextmanager
def unchanged(of: Engine | None) -> Iterator[None]:
    """What a step changes is afterwards as it was before."""
    if of is None:
        yield
        return
    tensors = [local_shard(p.current) for p in of.optimizer.parameters] + of.optimizer.state_tensors()
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, before, strict=True):
        tensor.detach().copy_(value)


def measured(rank: int, layout: dict[str, Any], graph: str) -> Measurements:
    at = engine(rank, **layout, cuda_graph=graph)
    StandIn.captured_from = at
    return measure(at, MeasureSpec(timed_steps=3))


def losses_both_ways(rank: int, layout: dict[str, Any]) -> tuple[list[Any], list[Any], Any, list[str]]:
    """(loss, norm) of every step without and with a graph, how the latter ran, and the calls of the graph."""
    usual = captured_step.CudaGraph, step.not_captured
    captured_step.CudaGraph, step.not_captured = StandIn, lambda *_: None  # type: ignore[misc,assignment]
    try:
        eager, graphed = (measured(rank, layout, graph) for graph in ("none", "step"))
    finally:
        captured_step.CudaGraph, step.not_captured = usual  # type: ignore[misc]
    values = [[(one.loss, one.grad_norm) for one in ran.steps] for ran in (eager, graphed)]
    return values[0], values[1], (eager.cuda_graph, graphed.cuda_graph, graphed.not_captured), StandIn.calls


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replays_compute_what_eager_steps_do(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    for eager, graphed, ran_as, calls in gloo_pool.run(losses_both_ways, ranks, layout):
        assert graphed == eager and len(set(eager)) == 6
        assert ran_as == ("none", "step", None)
        assert calls == ["capture", *["replay"] * 4, "reset"], "two eager steps, a first replay, three timed ones"
