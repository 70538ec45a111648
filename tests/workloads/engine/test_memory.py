"""Memory by category: counted by hand, and the same whether a rank runs among its peers, alone, or on FakeTensors."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from tests.pool import Pool, fork_server
from tests.sampling import sampled
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import MemoryAtPeak
from workloads.contract.stages import shortened
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing.memory import StorageTracker
from workloads.engine.training.build import build, choose_attention
from workloads.measuring.step import measure
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

MODEL = ModelSpec(
    name="probe",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=256,
)
SPEC = MeasureSpec(warmup_steps=2, timed_steps=1)
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 2, "zero_stage": 1, "global_batch_size": 16},
    {"dp": 2, "zero_stage": 2},
    {"dp": 2, "zero_stage": 3},
    {"dp": 2, "zero_stage": 3, "recompute": "full"},
    {"tp": 2, "recompute": "selective"},
    {"pp": 2, "global_batch_size": 16},
]


def experiment(**layout: Any) -> Experiment:
    return Experiment.canonical(model=MODEL, seq_len=64, micro_batch_size=2, **{"global_batch_size": 8, **layout})


def run_among_peers(rank: int, case: Experiment) -> MemoryAtPeak | None:
    choose_attention(case)
    engine = build(case, make_groups(case, rank, torch.device("cpu")))
    return measure(engine, SPEC).memory_at_peak


def run_alone(case: Experiment, rank: int, fake: bool, answer: Any) -> None:
    """In a process of its own: one fake process group a process."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workloads.rehearse import trace_memory

    torch.set_num_threads(1)
    choose_attention(case)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    groups = make_groups(case, rank, torch.device("cpu"))
    if fake:
        answer.send(trace_memory(case, groups, lambda phase, step: None))
    else:
        answer.send(measure(build(case, groups), SPEC).memory_at_peak)


def alone(case: Experiment, rank: int, *, fake: bool) -> MemoryAtPeak:
    here, there = multiprocessing.Pipe()
    process = fork_server().Process(target=run_alone, args=(case, rank, fake, there))
    process.start()
    assert here.poll(150), "the rehearsing process did not answer"
    result: MemoryAtPeak = here.recv()
    process.join()
    return result


def total(memory: MemoryAtPeak) -> int:
    return memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.activations_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    sampled(LAYOUTS, 2, seconds=6),
    ids=str,
)
def test_a_rank_alone_needs_what_it_needs_among_its_peers(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    case = shortened(experiment(**layout))
    real = gloo_pool.run(run_among_peers, case.world_size, case)
    last = case.world_size - 1
    for rank in {0, last} if case.pp > 1 else {last}:  # ranks of one stage hold the same
        rehearsed = alone(case, rank, fake=False)
        # Among its peers a rank also holds what gloo's threads have not sent or summed yet, up to some messages.
        assert 0.995 * total(rehearsed) <= total(real[rank]) <= 1.05 * total(rehearsed)
        traced = alone(case, rank, fake=True)
        # On FakeTensors kernels have no temporaries; on a CPU they work in blocks that a model this small notices.
        assert total(traced) == pytest.approx(total(real[rank]), rel=0.35)
        assert total(traced) <= total(real[rank])
        assert traced.optimizer_bytes == real[rank].optimizer_bytes


def test_categories_by_hand(gloo_pool: Pool) -> None:
    """One rank, one micro-batch, fp32: weights twice (master and FSDP's copy), AdamW's two moments."""
    case = experiment(precision="fp32", global_batch_size=2)
    (memory,) = gloo_pool.run(run_among_peers, 1, case)
    block = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    parameters = 4 * block + 2 * 256 * 64 + 64
    steps = 4 * (4 * 6 + 3)  # AdamW keeps a step counter with every tensor: 6 in a block, 3 outside
    assert memory.optimizer_bytes == 2 * 4 * parameters + steps
    assert parameters * 4 <= memory.parameters_bytes <= 2 * 4 * parameters
    assert memory.gradients_bytes <= 4 * parameters
    # Activations of 128 tokens: per layer 10 of hidden width, qkv 128, gate and up 256, product 128, all in fp32.
    saved = 4 * 128 * (10 * 64 + 128 + 256 + 128) * 4
    logits = 128 * 256 * 4
    assert memory.activations_bytes < 1.5 * (saved + logits) + 4 * 2 * 256 * 64


def test_tracker_leaves_out_what_has_no_memory() -> None:
    """As tensors of collectives that a rehearsal only counts."""
    with StorageTracker() as tracker:
        torch.empty(1000, device="meta").expand(2, 1000).clone()
    assert tracker.peak == 0


def test_tracker_counts_a_storage_once_over_its_life() -> None:
    with StorageTracker() as tracker:
        a = torch.empty(1000, dtype=torch.float32)
        b = a.view(10, 100)[2:]
        assert tracker.current == 4000
        c = torch.empty(500, dtype=torch.float32)
        assert tracker.current == 6000
        del c
        assert tracker.current == 4000
        del a
        assert tracker.current == 4000, "a view keeps the storage alive"
        del b
        assert tracker.current == 0
    assert tracker.peak == 6000
