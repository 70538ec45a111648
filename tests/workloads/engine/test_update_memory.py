"""Memory of updates in closed form beside that of the engine on FakeTensors: states, and temporaries of the update."""

from __future__ import annotations

import multiprocessing
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pool import fork_server
from tests.sampling import sampled
from tests.workloads.engine.test_memory import alone, total
from tests.workloads.engine.test_predicted_memory import _case
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.shape.partition import experiment_stages
from workloads.engine.update_ops.sgd import SGD
from workloads.spec.experiment import Experiment

OPTIMIZERS = ["sgd", "adafactor", "muon"]
LAYOUTS: list[dict[str, Any]] = [
    {"seq_len": 64},
    {"seq_len": 64, "dp": 2, "zero_stage": 0},
    {"seq_len": 64, "dp": 2, "zero_stage": 3},
    {"seq_len": 64, "tp": 2},
]


def update_alone(case: Experiment, answer: Any) -> None:
    """Sends (bytes of states, most bytes beside weights, gradients and states in an update) of rank 0."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workloads.engine.collectives.groups import make_groups
    from workloads.engine.collectives.parameters import local_shard
    from workloads.engine.observing.memory import StorageTracker
    from workloads.engine.training.build import assemble, shape_chunks
    from workloads.rehearse import _empty_batches, _step

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    groups = make_groups(case, 0, torch.device("cpu"))
    chunks = shape_chunks(case, groups)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for chunk in chunks:
            chunk.to_empty(device="cpu")
        engine = assemble(case, groups, chunks)
        _step(engine)
        engine.pipeline.run(_empty_batches(case))
        optimizer = engine.optimizer
        norm = optimizer.local_square_norm().sqrt()
        tracker = StorageTracker()
        with tracker:
            for named in optimizer.parameters:
                tracker.add(local_shard(named.current))
                tracker.add(named.gradient)
            for state in optimizer.state_tensors():
                tracker.add(state)
            before = tracker.current
            optimizer.step(norm)
    answer.send((optimizer.state_bytes(), tracker.peak - before))


def traced_update(case: Experiment) -> tuple[int, int]:
    here, there = multiprocessing.Pipe()
    process = fork_server().Process(target=update_alone, args=(case, there))
    process.start()
    assert here.poll(150), "the process did not answer"
    result: tuple[int, int] = here.recv()
    process.join()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    sampled(list(product(LAYOUTS, OPTIMIZERS)), 4, kinds=lambda case: [str(case[0]), case[1]]),
    ids=str,
)
def test_states_and_temporaries_are_those_of_the_engine(layout: dict[str, Any], optimizer: str) -> None:
    case = _case(**layout, optimizer=optimizer)
    part = Part.of(case, Shared.of(case), experiment_stages(case)[0])
    states, temporary = traced_update(case)
    assert part.optimizer == pytest.approx(states, rel=1e-3)
    # Beside matrices there are some vectors: sums of squares, norms, scales.
    if optimizer == "muon" and case.zero_stage == 3:
        # Two ranks share gate and up as one parameter: one matrix and a half arrive, with the result and what is sent.
        assert part.updating * 3.5 / 3 == pytest.approx(temporary, rel=0.03)
    else:
        assert part.updating == pytest.approx(temporary, rel=0.03, abs=2**16)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sampled(OPTIMIZERS, 1, seconds=6))
def test_predicted_peaks_are_the_traced_ones(optimizer: str) -> None:
    case = _case(seq_len=128, dp=2, rounds=3, optimizer=optimizer)
    (stage,) = estimate_memory(case).stages
    assert stage.peak_bytes == pytest.approx(total(alone(case, 0, fake=True)), rel=1e-3)


def test_a_trace_of_sgd_takes_no_memory_of_the_host() -> None:
    elements = 2**40
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(elements))
        weight.grad = torch.empty(elements)
        optimizer = SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
        optimizer.update(torch.ones(()), None)
    assert optimizer.state[weight]["momentum_buffer"].numel() == elements
