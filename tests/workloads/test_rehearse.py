"""What a rehearsed rank computes on: the ranks that do not exist send ordinary numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.workloads.engine.parity import experiment as tiny
from workloads.engine.collectives.communication import (
    Axis,
    all_to_all_async,
    exchange_async,
    reduce_scatter_async,
    rotate_async,
    wait,
)
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing import stand_ins
from workloads.engine.observing.stand_ins import StandIns
from workloads.engine.training.build import Engine, build
from workloads.engine.training.data import step_batches
from workloads.spec.experiment import Experiment


@pytest.fixture
def alone() -> Any:
    """Rank 1 of four that do not exist, and their axis."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield Axis("tp", 4, 1, dist.group.WORLD, is_rehearsal=True)
    dist.destroy_process_group()


def test_own_numbers_stand_for_those_of_absent_ranks(alone: Axis) -> None:
    x = torch.arange(1.0, 9.0).view(8, 1)
    assert wait(reduce_scatter_async(x, alone)).flatten().tolist() == [3.0, 4.0]
    assert wait(all_to_all_async(x, alone)).equal(x)
    assert wait(rotate_async(x, alone)).equal(x)
    more = wait(exchange_async(x, [5, 5, 0, 9], [2, 2, 2, 2], alone)).flatten().tolist()
    assert more == [1 + i % 8 for i in range(19)]
    assert wait(exchange_async(x, [1, 0, 0, 0], [2, 2, 2, 2], alone)).flatten().tolist() == [1.0]
    assert wait(exchange_async(x[:0], [0, 0, 0, 0], [0, 0, 0, 0], alone)).shape == (0, 1)


def _engine(**layout: Any) -> Engine:
    experiment: Experiment = tiny(**layout)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=experiment.world_size)
    torch.manual_seed(0)
    return build(experiment, make_groups(experiment, 0, torch.device("cpu")))


@pytest.fixture
def rehearsed() -> Any:
    yield _engine
    dist.destroy_process_group()


def _run(engine: Engine) -> None:
    e = engine.experiment
    engine.pipeline.run(step_batches(e, 0, 0, torch.device("cpu"), 0, None))
    engine.optimizer.finish_gradients()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_no_activation_and_no_gradient_is_left_as_the_memory_was(
    rehearsed: Callable[..., Engine], layout: dict[str, Any]
) -> None:
    """Memory that nobody writes is poisoned, as `torch.empty` is by torch's own switch: a NaN would reach the end."""
    engine = rehearsed(**layout)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        _run(engine)
    finally:
        torch.use_deterministic_algorithms(False)
    gradients = [p.grad.to_local() for chunk in engine.chunks for p in chunk.parameters() if p.grad is not None]
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert all(bool(gradient.any()) for gradient in gradients)


@pytest.mark.slow
def test_collectives_of_one_step_are_noted_by_pass(rehearsed: Callable[..., Engine]) -> None:
    engine = rehearsed(tp=2)
    noted = StandIns(engine)
    with noted:
        _run(engine)
    forward, backward = (noted._calls[part] for part in (False, True))
    micro_batches, layers = engine.experiment.num_microbatches, engine.experiment.model.num_layers
    tokens, width = engine.experiment.seq_len * engine.experiment.micro_batch_size, engine.experiment.model.hidden_size
    gathers = [call for call in forward if call.name == "all_gather_into_tensor"]
    assert [call.shape for call in gathers] == [(tokens // 2, width)]
    assert forward[gathers[0]] == micro_batches * (2 * layers + 1), "two of a layer, one before the head"
    scatters = sum(n for call, n in backward.items() if call.name == "reduce_scatter_tensor")
    assert scatters == micro_batches * (2 * layers + 1)
    assert noted.seconds() is None, "no device to time them on"
    for call in (*forward, *backward):
        stand_ins.run(call, torch.zeros(call.shape, dtype=call.dtype), engine.groups.axes["tp"])
