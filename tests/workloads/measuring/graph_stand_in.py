"""Steps that are captured on a CPU, where a stand-in takes the place of CUDA's graph.

Capturing it computes nothing that lasts, and a replay computes from the memory that was captured, as a graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tests.workloads.measuring.test_step import MODEL, engine
from workloads.contract.measure_spec import MeasureSpec
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.training import captured_step
from workloads.engine.training.build import Engine
from workloads.engine.training.captured_step import Launched
from workloads.measuring import step
from workloads.measuring.step import Measurements, measure
from workloads.spec.model_layers import with_modules
from workloads.spec.model_spec import ModelSpec


class StandIn:
    """A graph on a CPU: it keeps the work, and puts the results of each replay where those of the capture were."""

    engine: Engine | None = None
    """Engine whose weights and moments a capture must leave as they are."""
    calls: list[str]

    def __init__(self) -> None:
        StandIn.calls = self.calls = []

    def capture(self, work: Callable[[], Launched]) -> Launched:
        self.calls.append("capture")
        self._work = work
        with unchanged(StandIn.engine):
            self._launched = work()
        return self._launched

    def replay(self) -> None:
        self.calls.append("replay")
        self._launched.totals.copy_(self._work().totals)

    def reset(self) -> None:
        assert dist.is_initialized(), "a graph has kernels of its process groups"
        self.calls.append("reset")


@contextmanager
def unchanged(of: Engine | None) -> Iterator[None]:
    """What a step changes is afterwards as it was before."""
    assert of is not None
    tensors = [local_shard(p.current) for p in of.optimizer.parameters] + of.optimizer.state_tensors()
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, before, strict=True):
        tensor.detach().copy_(value)


@contextmanager
def stood_in_for(room: str | None = None) -> Iterator[None]:
    """A CPU's graph. ``room``: why it has no memory."""
    usual = captured_step.CudaGraph, step.not_captured, step.no_room
    captured_step.CudaGraph, step.not_captured = StandIn, lambda *_: None  # type: ignore[misc,assignment]
    step.no_room = lambda reserved: room  # type: ignore[assignment]
    try:
        yield
    finally:
        captured_step.CudaGraph, step.not_captured, step.no_room = usual  # type: ignore[misc]


def with_its_modules(layout: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    """Fields of an experiment: ``modules``, of multi-token prediction, are layers of its model."""
    fields = {"model": model, **layout}
    return fields | {"model": with_modules(fields["model"], fields.pop("modules", 0), 0.7)}


def measured(rank: int, layout: dict[str, Any], graph: str, **spec: Any) -> Measurements:
    StandIn.engine = at = engine(rank, **with_its_modules(layout, MODEL), cuda_graph=graph)
    return measure(at, MeasureSpec(**{"timed_steps": 3, **spec}))


def values_of(ran: Measurements) -> list[tuple[float | None, ...]]:
    """Loss and norm of each step, and the loss of modules of multi-token prediction if there are any."""
    steps = [(one.loss, one.grad_norm, one.mtp_loss) for one in ran.steps]
    return [values[: 2 if values[2] is None else 3] for values in steps]
