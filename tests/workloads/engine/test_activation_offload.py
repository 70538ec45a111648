"""Activations on the host: a step computes the same bits as one that keeps them, and later steps allocate nothing."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.parity import check, experiment, experts, model
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.host_activations import activation_bytes
from workloads.engine.collectives.groups import Groups, make_groups
from workloads.engine.training import activation_offload
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.engine.training.host_copies import PlainCopies
from workloads.measuring.step import _batches, _finish, run_step
from workloads.parity.training import train_rank
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Attention

MOE = experts()
ALL: dict[str, Any] = {"activation_offload": "all"}
CASES = [
    experiment(**ALL),
    *(experiment(dp=2, zero_stage=zero, micro_batch_size=2, **ALL) for zero in range(4)),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=3, rounds=2, **ALL),
    *(
        experiment(dp=2, zero_stage=3, activation_offload=word)
        for word in ("input", "norm", "qkv", "rope", "attention", "gate_up", "swiglu", "input+attention")
    ),
    experiment(qk_norm=True, activation_offload="rope+attention"),
    experiment(recompute="full", dp=2, zero_stage=2, **ALL),
    experiment(recompute="selective", dp=2, zero_stage=3, **ALL),
    experiment(recompute="norm", activation_offload="input+qkv"),
    experiment(tp=2, **ALL),
    experiment(tp=2, sequence_parallel=False, recompute="selective", activation_offload="input+gate_up"),
    experiment(cp=2, cp_kind="allgather", zero_stage=3, micro_batch_size=2, **ALL),
    experiment(pp=2, pp_schedule="1f1b", rounds=4, **ALL),
    experiment(pp=2, pp_schedule="1f1b", rounds=4, recompute="full/selective", **ALL),
    experiment(pp=2, pp_schedule="gpipe", rounds=3, tie=True, recompute="full", **ALL),
    experiment(pp=2, dp=2, zero_stage=2, pp_schedule="interleaved_1f1b", virtual_stages=2, rounds=4, **ALL),
    experiment(pp=2, tp=2, rounds=4, pp_stages="E|tttttL", **ALL),
    experiment(moe=MOE, dp=2, ep=2, zero_stage=1, **ALL),
    experiment(moe=MOE, dp=2, tp=2, ep=2, etp=1, zero_stage=3, recompute="experts", **ALL),
    experiment(moe=MOE, dp=2, ep=2, zero_stage=3, routing="learned", **ALL),
    experiment(dp=2, zero_stage=1, optimizer_offload=0.5, **ALL),
]


class LateCopies(PlainCopies):
    """Copies that come when somebody waits for them; until then their targets have other values."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[Tensor, Tensor]] = []

    def launch(self, target: Tensor, source: Tensor) -> int:
        target.fill_(0.125)
        self._open.append((target, source))
        return len(self._open) - 1

    def join(self) -> None:
        while self._open:
            target, source = self._open.pop(0)
            target.copy_(source)


def differences(
    rank: int, case: Experiment, device: str, late: bool = False, steps: int = 3
) -> tuple[list[str], list[int]]:
    """(results of some steps that differ from those of the case with all activations on the device, bytes of host
    buffers after each step). ``late``: with `LateCopies`."""
    usual = activation_offload.copies_of  # type: ignore[attr-defined]
    if late:
        setattr(activation_offload, "copies_of", lambda device: LateCopies())  # noqa: B010 - of a module
    built: list[Engine] = []
    held: list[int] = []

    def building(experiment: Experiment, groups: Groups) -> Engine:
        engine = build(experiment, groups)
        built.append(engine)
        update = engine.optimizer.step

        def update_and_count(norm: Tensor) -> Tensor | None:
            assert engine.store is not None
            held.append(engine.store.host_bytes())
            return update(norm)

        engine.optimizer.step = update_and_count  # type: ignore[method-assign]
        return engine

    try:
        there = train_rank(rank, case, steps, device, builder=building)
    finally:
        setattr(activation_offload, "copies_of", usual)  # noqa: B010
    here = train_rank(rank, case.replace(activation_offload="none"), steps, device)
    found = [] if there.losses == here.losses and there.grad_norms == here.grad_norms else ["losses"]
    for one, other in zip(there.steps, here.steps, strict=True):
        for what in ("gradients", "weights"):
            for mine, theirs in zip(getattr(one, what), getattr(other, what), strict=True):
                if mine.names != theirs.names or not torch.equal(mine.values, theirs.values):
                    found.append(f"{what} of {theirs.names}")
    return found, held


@pytest.mark.parametrize("case", sampled(CASES, 9, seconds=4), ids=lambda case: case.id)
def test_values_are_those_without_offload(gloo_pool: Pool, case: Experiment) -> None:
    """In float64, whose attention saves what the words name on a CPU only (`OFFLOAD_CLUSTER_CASES`)."""
    ranks = gloo_pool.run(differences, case.world_size, case, "cpu")
    for found, held in ranks:
        assert found == []
        assert held[0] == held[-1], "buffers were allocated after the first step"
    assert any(held[0] for _, held in ranks), "nothing was offloaded"


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[15], CASES[20], CASES[21]], ids=lambda case: case.id)
def test_nothing_is_read_before_its_copy_came(gloo_pool: Pool, case: Experiment) -> None:
    for found, _ in gloo_pool.run(differences, case.world_size, case, "cpu", True):
        assert found == []


@pytest.mark.slow
def test_offloaded_layers_train_as_the_unsharded_model(gloo_pool: Pool) -> None:
    check(gloo_pool, experiment(dp=2, zero_stage=3, recompute="selective", **ALL))


# GPUs

WIDE_LAYERS = model(
    num_layers=8,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=8192,
    vocab_size=32768,
)
ON_GPUS: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"activation_offload": "input+attention", "global_batch_size": 8},
    {"dp": 2, "zero_stage": 3, "global_batch_size": 16},
    {"tp": 2},
    {"pp": 2, "global_batch_size": 16},
    {"pp": 2, "global_batch_size": 16, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
]


def case_on_gpus(layout: dict[str, Any], attention: Attention) -> Experiment:
    usual = {"seq_len": 2048, "micro_batch_size": 4, "global_batch_size": 4, "cuda_graph": "none", **ALL}
    return Experiment.canonical(model=WIDE_LAYERS, attention=attention, **{**usual, **layout})


def steps_on_gpu(rank: int, case: Experiment) -> tuple[list[tuple[float, float]], int, list[int]]:
    """(loss and gradient norm of four steps, peak of allocated memory of the last ones, bytes of host buffers after
    each)."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    choose_attention(case)
    engine = build(case, make_groups(case, rank, device))
    found, held = [], []
    for step in range(4):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        pending = run_step(engine, step, _batches(engine, step), is_warmup=False)
        engine.clock.finish()
        record = _finish(engine, pending)
        found.append((record.loss or 0.0, record.grad_norm or 0.0))
        held.append(engine.store.host_bytes() if engine.store is not None else 0)
    return found, torch.cuda.max_memory_allocated() - before, held


def with_and_without(rank: int, case: Experiment) -> list[tuple[list[tuple[float, float]], int, list[int]]]:
    """`steps_on_gpu` with offload, without, and without again."""
    without = case.replace(activation_offload="none")
    return [steps_on_gpu(rank, one) for one in (case, without, without)]


def in_a_fixed_order(rank: int, case: Experiment) -> list[tuple[list[tuple[float, float]], int, list[int]]]:
    """The same with kernels that add in a fixed order, where torch has such."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it
    torch.use_deterministic_algorithms(True)  # only to warn would leave attention's backward without an order
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        return with_and_without(rank, case)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ON_GPUS, ids=str)
def test_steps_on_gpus_are_those_without_offload(nccl_pool: Pool, layout: dict[str, Any]) -> None:
    """Equal to the bit over four steps, whose weights depend on every gradient before."""
    case = case_on_gpus({**layout, "micro_batch_size": 1}, "flash")
    if case.world_size > nccl_pool.size:
        pytest.skip(f"needs {case.world_size} devices")
    for (away, _, held), (kept, _, _), (again, _, _) in nccl_pool.run(in_a_fixed_order, case.world_size, case):
        assert kept == again, "the layout does not repeat itself"
        assert away == kept
        assert held[0] == held[-1], "buffers were allocated after the first step"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ON_GPUS, ids=str)
def test_peaks_on_gpus_fall_by_what_is_predicted(nccl_pool: Pool, layout: dict[str, Any]) -> None:
    """Allocated memory, whose constant parts (workspaces, blocks of the allocator) are the same in both."""
    case = case_on_gpus(layout, "auto")
    if case.world_size > nccl_pool.size:
        pytest.skip(f"needs {case.world_size} devices")
    without = estimate_memory(case.replace(activation_offload="none")).stages
    ranks = nccl_pool.run(with_and_without, case.world_size, case)
    for rank, ((_, low, held), (_, high, _), _) in enumerate(ranks):
        stage = rank * case.pp // case.world_size
        expected = without[stage].peak_bytes - estimate_memory(case).stages[stage].peak_bytes
        assert high - low == pytest.approx(expected, rel=0.03, abs=0.01 * high)
        assert held[-1] == activation_bytes(case)[stage]
