"""The closed form against the real engine on FakeTensors: every storage of a step is counted, nothing computed."""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

import pytest

from tests.workloads.costs.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    LLAMA_1B,
    LLAMA_8B,
    MIXTRAL,
    QWEN3_14B,
    QWEN3_30B,
)
from workloads import stages
from workloads.costs.memory import estimate_memory
from workloads.experiment import Experiment
from workloads.mesh import rank_of
from workloads.model_spec import ModelSpec, MoESpec, model_from_dict

pytestmark = pytest.mark.slow


def shortened(model: ModelSpec, num_layers: int = 2) -> ModelSpec:
    return model_from_dict({**dataclasses.asdict(model), "num_layers": num_layers})


def experiment(model: ModelSpec = LLAMA_8B, microbatches: int = 1, layers: int = 2, **fields: Any) -> Experiment:
    sequences = fields.get("dp", 1) * fields.get("micro_batch_size", 1) * microbatches
    return Experiment.canonical(model=shortened(model, layers), seq_len=4096, global_batch_size=sequences, **fields)


CASES = {
    "one rank": experiment(micro_batch_size=4),
    "one rank, accumulation": experiment(microbatches=2),
    "ZeRO 0": experiment(dp=2, microbatches=2),
    "ZeRO 1": experiment(dp=8, zero_stage=1, microbatches=2),
    "ZeRO 2": experiment(dp=8, zero_stage=2, microbatches=3, micro_batch_size=2),
    "ZeRO 3": experiment(dp=8, zero_stage=3, microbatches=2),
    "HSDP": Experiment(
        model=shortened(LLAMA_1B), dp_replicate=2, dp_shard=4, zero_stage=2, global_batch_size=8, seq_len=4096
    ),
    "tied, ZeRO 3": experiment(LLAMA_1B, dp=8, zero_stage=3, micro_batch_size=4),
    "tp": experiment(tp=8, micro_batch_size=8, microbatches=3),
    "tp without sequence parallelism": experiment(tp=2, micro_batch_size=8, sequence_parallel=False),
    "selective": experiment(tp=2, micro_batch_size=8, sequence_parallel=False, recompute="selective"),
    "full": experiment(tp=4, micro_batch_size=8, microbatches=3, recompute="full"),
    **{
        named: experiment(dp=8, zero_stage=3, micro_batch_size=4, recompute=named)
        for named in ("norm", "rope", "swiglu", "norm+rope", "norm+swiglu", "rope+swiglu")
    },
    "norm, tp": experiment(tp=2, micro_batch_size=8, microbatches=2, recompute="norm"),
    "qk norm, rope": experiment(QWEN3_14B, tp=2, micro_batch_size=4, recompute="rope"),
    # The last layer is recomputed, the last but one, or only the first.
    "full, 1 in 2 of 3": experiment(
        layers=3, dp=8, zero_stage=2, micro_batch_size=4, recompute="full", recompute_every=2
    ),
    "full, 1 in 2 of 4": experiment(
        layers=4, dp=8, zero_stage=3, micro_batch_size=4, recompute="full", recompute_every=2
    ),
    "full, 1 in 4": experiment(layers=4, dp=8, zero_stage=2, micro_batch_size=4, recompute="full", recompute_every=4),
    "full, 1 in 2, ZeRO 0": experiment(
        layers=4, dp=2, microbatches=2, micro_batch_size=2, recompute="full", recompute_every=2
    ),
    "full, 1 in 2, ZeRO 1": experiment(
        layers=4, dp=2, zero_stage=1, microbatches=3, micro_batch_size=2, recompute="full", recompute_every=2
    ),
    "full, 1 in 2, tp": experiment(
        layers=4, tp=4, sequence_parallel=False, micro_batch_size=8, microbatches=3, recompute="full", recompute_every=2
    ),
    "full, 1 in 2, alone": experiment(layers=4, micro_batch_size=4, recompute="full", recompute_every=2),
    "selective, 1 in 2": experiment(layers=4, tp=2, micro_batch_size=8, recompute="selective", recompute_every=2),
    "swiglu, 1 in 2": experiment(
        layers=4, dp=8, zero_stage=3, micro_batch_size=4, recompute="swiglu", recompute_every=2
    ),
    # The first stage is at its highest in the backward of a recomputed layer before one that is not.
    "full, 1 in 2, 1f1b": experiment(
        layers=4,
        dp=8,
        zero_stage=3,
        pp=2,
        pp_split="even",
        microbatches=2,
        micro_batch_size=4,
        recompute="full",
        recompute_every=2,
    ),
    "full, 1 in 2 of 3, 1f1b": experiment(
        layers=3, dp=8, zero_stage=2, pp=2, pp_split="even", micro_batch_size=4, recompute="full", recompute_every=2
    ),
    # The second stage has no layer that is recomputed.
    "full, 1 in 4, 1f1b": experiment(
        layers=4, pp=2, pp_split="even", microbatches=2, micro_batch_size=2, recompute="full", recompute_every=4
    ),
    "1f1b": experiment(pp=2, microbatches=2, micro_batch_size=2),
    "fp32": experiment(dp=8, zero_stage=2, precision="fp32"),
    "qk norm": experiment(QWEN3_14B, dp=8, zero_stage=2, micro_batch_size=2),
    "qk norm, tp": experiment(QWEN3_14B, tp=8, micro_batch_size=8, microbatches=2),
    "qk norm, selective": experiment(QWEN3_14B, tp=2, micro_batch_size=4, recompute="selective"),
    "qk norm, full": experiment(QWEN3_14B, dp=8, zero_stage=3, micro_batch_size=4, recompute="full"),
}


QWEN = shortened(QWEN3_30B, 3)
DEEPSEEK = ModelSpec(
    name="deepseek",
    num_layers=4,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_hidden_size=10944,
    vocab_size=102400,
    moe=MoESpec(
        num_experts=64,
        experts_per_token=6,
        expert_hidden_size=1408,
        num_shared_experts=2,
        num_dense_layers=1,
        normalize_weights=False,
    ),
)


def routed(model: ModelSpec = QWEN, *, microbatches: int = 1, micro_batch_size: int = 2, **layout: Any) -> Experiment:
    fields: dict[str, Any] = {"seq_len": 4096, "micro_batch_size": micro_batch_size, "pp_split": "even", **layout}
    sequences = fields.get("dp", 1) * micro_batch_size * microbatches
    return Experiment.canonical(model=model, global_batch_size=sequences, **fields)


ROUTED = {
    "one rank": routed(microbatches=2),
    "ep 1, ZeRO 2": routed(dp=2, zero_stage=2, microbatches=2),
    "ep 2, ZeRO 2": routed(dp=2, zero_stage=2, microbatches=2, ep=2),
    "ep 1, ZeRO 3": routed(dp=8, zero_stage=3),
    "ep 8, ZeRO 3": routed(dp=8, zero_stage=3, ep=8, microbatches=2),
    "ep 2 of 8": routed(dp=8, zero_stage=2, micro_batch_size=1, microbatches=3, ep=2),
    "ep 8, ZeRO 1": routed(dp=8, zero_stage=1, microbatches=2, ep=8, micro_batch_size=4),
    "ep 2, ZeRO 0": routed(dp=2, microbatches=2, micro_batch_size=1, ep=2),
    "few large experts": routed(shortened(MIXTRAL), dp=8, zero_stage=3, micro_batch_size=4, ep=8),
    "few, full": routed(shortened(MIXTRAL), dp=8, zero_stage=2, micro_batch_size=4, ep=2, recompute="full"),
    "few, ep 1, accumulation": routed(shortened(MIXTRAL), dp=2, zero_stage=2, micro_batch_size=4, microbatches=3),
    "few, ep 2, accumulation": routed(shortened(MIXTRAL), dp=2, zero_stage=2, micro_batch_size=4, microbatches=3, ep=2),
    "few, ep 2 of 4, two": routed(shortened(MIXTRAL), dp=4, zero_stage=2, micro_batch_size=2, microbatches=2, ep=2),
    "few, etp 1": routed(shortened(MIXTRAL), dp=4, tp=2, etp=1, ep=8, zero_stage=2, micro_batch_size=4),
    "few, etp 2": routed(shortened(MIXTRAL), dp=4, tp=2, etp=2, ep=4, zero_stage=3, micro_batch_size=4),
    "few, whole tokens": routed(shortened(MIXTRAL), tp=4, etp=4, sequence_parallel=False, micro_batch_size=4),
    "selective": routed(dp=8, zero_stage=3, micro_batch_size=4, ep=8, recompute="selective"),
    "norm+swiglu": routed(dp=8, zero_stage=2, micro_batch_size=4, ep=8, recompute="norm+swiglu"),
    "shared, skewed": routed(
        DEEPSEEK, dp=8, zero_stage=2, micro_batch_size=4, ep=8, routing="skewed", routing_imbalance=2.0
    ),
    "shared, full": routed(DEEPSEEK, dp=8, zero_stage=3, micro_batch_size=4, ep=4, recompute="full"),
    "shared, 1f1b": routed(DEEPSEEK, dp=4, pp=2, ep=4, zero_stage=1, microbatches=4),
    "1f1b": routed(dp=2, pp=2, ep=2, zero_stage=2, microbatches=2),
    "ring": routed(dp=4, cp=2, ep=8, zero_stage=3, seq_len=16384, micro_batch_size=1),
    "shared, ep 2": routed(DEEPSEEK, dp=2, zero_stage=2, micro_batch_size=4, ep=2),
    "fp32": routed(dp=8, zero_stage=2, micro_batch_size=1, ep=8, precision="fp32"),
    "latents and experts": routed(shortened(DEEPSEEK_V2_LITE, 3), dp=8, zero_stage=2, ep=8, micro_batch_size=4),
    "latents and experts, full": routed(
        shortened(DEEPSEEK_V2_LITE, 3), dp=4, tp=2, etp=1, zero_stage=3, ep=4, micro_batch_size=4, recompute="full"
    ),
    **{
        f"{precision}, {what}": routed(precision=precision, **fields)
        for precision in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")
        for what, fields in (
            ("ep 1, ZeRO 2", {"dp": 2, "zero_stage": 2, "microbatches": 2}),
            ("ep 8, ZeRO 3", {"dp": 8, "zero_stage": 3, "ep": 8, "microbatches": 2, "micro_batch_size": 4}),
            ("selective", {"dp": 8, "zero_stage": 3, "micro_batch_size": 4, "ep": 8, "recompute": "selective"}),
            ("full", {"dp": 8, "zero_stage": 2, "micro_batch_size": 4, "ep": 2, "recompute": "full"}),
        )
    },
    "fp8_tensorwise, few large experts": routed(
        shortened(MIXTRAL), dp=8, zero_stage=3, micro_batch_size=4, ep=8, precision="fp8_tensorwise"
    ),
    "fp8_rowwise, few, etp 2": routed(
        shortened(MIXTRAL), dp=4, tp=2, etp=2, ep=4, zero_stage=3, micro_batch_size=4, precision="fp8_rowwise"
    ),
    "fp8_tensorwise, shared, 1f1b": routed(
        DEEPSEEK, dp=4, pp=2, ep=4, zero_stage=1, microbatches=4, precision="fp8_tensorwise"
    ),
    "fp8_tensorwise, latents and experts": routed(
        shortened(DEEPSEEK_V2_LITE, 3), dp=8, zero_stage=2, ep=8, micro_batch_size=4, precision="fp8_tensorwise"
    ),
    "shared, selective": routed(DEEPSEEK, dp=8, ep=8, micro_batch_size=4, recompute="selective", microbatches=2),
    "experts": routed(dp=8, zero_stage=3, micro_batch_size=4, ep=8, recompute="experts"),
    "experts, alone": routed(microbatches=2, recompute="experts"),
    "selective+experts": routed(dp=8, zero_stage=2, micro_batch_size=4, ep=8, recompute="selective+experts"),
    "few, experts": routed(shortened(MIXTRAL), dp=8, zero_stage=3, micro_batch_size=4, ep=8, recompute="experts"),
    "few, etp 2, norm+experts": routed(
        shortened(MIXTRAL), dp=4, tp=2, etp=2, ep=4, zero_stage=3, micro_batch_size=4, recompute="norm+experts"
    ),
    "shared, swiglu+experts, 1 in 2": routed(
        DEEPSEEK, dp=8, zero_stage=2, ep=4, micro_batch_size=4, recompute="swiglu+experts", recompute_every=2
    ),
    "shared, fp8, selective+experts": routed(
        DEEPSEEK, dp=8, zero_stage=2, ep=8, micro_batch_size=4, recompute="selective+experts", precision="fp8_rowwise"
    ),
    "shared, experts, 1f1b": routed(
        DEEPSEEK, dp=4, pp=2, ep=4, zero_stage=1, microbatches=4, recompute="experts", micro_batch_size=4
    ),
    "latents and experts, all operations": routed(
        shortened(DEEPSEEK_V2_LITE, 3),
        dp=8,
        zero_stage=2,
        ep=8,
        micro_batch_size=4,
        recompute="selective+mla_up+experts",
    ),
}


LONG = {"seq_len": 16384, "cp": 2, "zero_stage": 3, "global_batch_size": 1}
CASES |= {
    f"cp {kind}": Experiment.canonical(model=shortened(LLAMA_8B), cp_kind=kind, **LONG)
    for kind in ("ring", "allgather", "ulysses")
}
CASES |= {
    f"cp {kind}, {recompute}": Experiment.canonical(
        model=shortened(LLAMA_8B, 4),
        cp_kind=kind,
        recompute=recompute,
        micro_batch_size=2,
        **LONG | {"global_batch_size": 2},
    )
    for kind, recompute in (("ring", "selective"), ("ulysses", "selective"), ("ulysses", "rope"), ("ulysses", "full"))
}
for _precision in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"):
    CASES |= {
        f"{_precision}, ZeRO 2": experiment(
            dp=8, zero_stage=2, microbatches=3, micro_batch_size=2, precision=_precision
        ),
        f"{_precision}, ZeRO 3": experiment(
            dp=8, zero_stage=3, microbatches=2, micro_batch_size=4, precision=_precision
        ),
        f"{_precision}, selective": experiment(
            dp=8, zero_stage=2, micro_batch_size=4, recompute="selective", precision=_precision
        ),
        f"{_precision}, full": experiment(
            dp=8, zero_stage=3, micro_batch_size=4, recompute="full", precision=_precision
        ),
        f"{_precision}, tp": experiment(tp=8, micro_batch_size=8, microbatches=3, precision=_precision),
        f"{_precision}, 1f1b": experiment(pp=2, microbatches=2, micro_batch_size=2, precision=_precision),
    }
CASES["full, gradients outgrow what blocks saved"] = Experiment.canonical(
    model=shortened(LLAMA_8B, 10), seq_len=32768, dp=2, zero_stage=3, recompute="full", global_batch_size=2
)
FP8_LATENTS: dict[str, dict[str, Any]] = {
    "ZeRO 2": {"dp": 8, "zero_stage": 2, "micro_batch_size": 2, "microbatches": 3},
    "ZeRO 3, selective": {"dp": 8, "zero_stage": 3, "micro_batch_size": 4, "recompute": "selective+mla_up"},
    "norm": {"dp": 8, "zero_stage": 3, "micro_batch_size": 4, "recompute": "norm"},
    "tp": {"tp": 2, "micro_batch_size": 8, "microbatches": 2},
}
DEEPSEEK = {
    "with a latent for queries": dataclasses.replace(DEEPSEEK_V3, moe=None),
    "without one": dataclasses.replace(DEEPSEEK_V2_LITE, moe=None),
}
for name, shape in DEEPSEEK.items():
    CASES |= {
        f"mla {name}": experiment(shape, micro_batch_size=2),
        f"mla {name}, tp": experiment(shape, tp=8, micro_batch_size=8, microbatches=2),
        f"mla {name}, tp without sequence parallelism": experiment(
            shape, tp=2, micro_batch_size=4, sequence_parallel=False
        ),
        f"mla {name}, accumulation": experiment(shape, dp=8, zero_stage=2, micro_batch_size=2, microbatches=3),
        **{
            f"mla {name}, {kind}": experiment(shape, dp=8, zero_stage=3, micro_batch_size=4, recompute=kind)
            for kind in ("norm", "rope", "mla_up", "selective+mla_up", "full")
        },
        **{
            f"mla {name}, {precision}, {what}": experiment(shape, precision=precision, **fields)
            for precision in ("fp8_tensorwise", "fp8_rowwise")
            for what, fields in FP8_LATENTS.items()
        },
    }
CASES |= {
    f"mla with a latent for queries, fp8_blockwise, {what}": experiment(
        DEEPSEEK["with a latent for queries"], precision="fp8_blockwise", **fields
    )
    for what, fields in FP8_LATENTS.items()
}
CHUNKED = {
    schedule: Experiment.canonical(
        model=shortened(LLAMA_8B, 4),
        seq_len=4096,
        pp=2,
        pp_schedule=schedule,
        virtual_stages=2,
        global_batch_size=8,
    )
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
}
SHARDED_CHUNKS = {
    schedule: Experiment.canonical(
        model=shortened(LLAMA_8B, 7),
        seq_len=4096,
        dp=2,
        zero_stage=2,
        pp=2,
        pp_schedule=schedule,
        virtual_stages=2,
        global_batch_size=16,
    )
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
}


def split(pp: int = 2, layers: int = 4, chunks: int = 1, **fields: Any) -> Experiment:
    """Backwards in two halves, on ranks that share their weights."""
    fields = {"dp": 2, "zero_stage": 2, "microbatches": 8, **fields}
    return experiment(layers=layers, pp=pp, pp_schedule="interleaved_zero_bubble", virtual_stages=chunks, **fields)


SPLIT = {
    **{
        f"ZeRO {zero}, {microbatches} micro-batches": split(zero_stage=zero, microbatches=microbatches)
        for zero in (2, 3)
        for microbatches in (1, 2, 3, 8)
    },
    "ZeRO 1": split(zero_stage=1),
    "four ranks": split(4, 8, zero_stage=3),
    "four ranks, two chunks": split(4, 16, 2, dp=8, micro_batch_size=2),
    "two chunks, ZeRO 3": split(layers=7, chunks=2, zero_stage=3),
    "full": split(layers=6, recompute="full", micro_batch_size=2),
}
"""Interleaved zero-bubble: the ends' gradients are reduced in the first half, each block's in the second."""


FEW = {
    f"{schedule}, ZeRO {zero}": Experiment.canonical(
        model=shortened(LLAMA_8B, 7),
        seq_len=4096,
        dp=min(2, zero + 1),
        zero_stage=zero,
        pp=2,
        pp_schedule=schedule,
        virtual_stages=2,
        global_batch_size=microbatches * min(2, zero + 1),
    )
    for schedule, microbatches in (("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zero_bubble_v", 3))
    for zero in (0, 2, 3)
}
"""As many micro-batches as ranks, or one more: a chunk has had its last backward before another has its first."""


@pytest.mark.parametrize("name", CASES)
def test_peak_equals_the_traced_engine(name: str) -> None:
    case = CASES[name]
    estimate = estimate_memory(case)
    for stage in range(case.pp):
        traced = in_fresh_process(case, rank_of(case, pp=stage))
        assert estimate.stages[stage].peak_bytes == pytest.approx(traced, rel=0.01), f"stage {stage}"


@pytest.mark.parametrize("name", ROUTED)
def test_peak_with_routed_experts_is_near_the_traced_engine(name: str) -> None:
    case = ROUTED[name]
    estimate = estimate_memory(case)
    for stage in range(case.pp):
        traced = in_fresh_process(case, rank_of(case, pp=stage))
        assert estimate.stages[stage].peak_bytes == pytest.approx(traced, rel=0.02), f"stage {stage}"


def test_a_shortened_step_peaks_as_the_whole_one() -> None:
    """Experts' gradients are so large that the peak is in a micro-batch that gives no gathered weights back."""
    case = routed(shortened(MIXTRAL), dp=2, zero_stage=2, micro_batch_size=4, microbatches=6)
    short = stages.shortened(case)
    assert short.num_microbatches == 3
    inputs = 16 * 4 * 4096 * (case.num_microbatches - short.num_microbatches)  # ids and targets of every micro-batch
    assert in_fresh_process(case, 0) - in_fresh_process(short, 0) == pytest.approx(inputs, abs=64)  # and counters
    two = short.replace(global_batch_size=short.global_batch_size * 2 // 3)
    assert in_fresh_process(two, 0) < 0.97 * in_fresh_process(short, 0)


@pytest.mark.parametrize("name", CHUNKED)
def test_peak_is_near_the_traced_engine_with_chunks(name: str) -> None:
    case = CHUNKED[name]
    estimate = estimate_memory(case)
    for rank in range(case.pp):
        traced = in_fresh_process(case, rank_of(case, pp=rank))
        assert estimate.stages[rank].peak_bytes == pytest.approx(traced, rel=0.05), f"rank {rank}"


@pytest.mark.parametrize("name", SHARDED_CHUNKS)
def test_peak_is_near_the_traced_engine_with_sharded_chunks(name: str) -> None:
    """Chunks of 2, 2, 2 and 1 layers: each is gathered and reduced by itself."""
    case = SHARDED_CHUNKS[name]
    estimate = estimate_memory(case)
    for rank in range(case.pp):
        traced = in_fresh_process(case, rank_of(case, pp=rank))
        assert estimate.stages[rank].peak_bytes == pytest.approx(traced, rel=0.05), f"rank {rank}"


@pytest.mark.parametrize("name", FEW)
def test_peak_is_near_the_traced_engine_with_chunks_and_few_microbatches(name: str) -> None:
    case = FEW[name]
    estimate = estimate_memory(case)
    for rank in range(case.pp):
        traced = in_fresh_process(case, rank_of(case, pp=rank))
        assert estimate.stages[rank].peak_bytes == pytest.approx(traced, rel=0.04), f"rank {rank}"


@pytest.mark.parametrize("name", SPLIT)
def test_peak_is_near_the_traced_engine_with_split_backwards(name: str) -> None:
    case = SPLIT[name]
    estimate = estimate_memory(case)
    for rank in range(case.pp):
        traced = in_fresh_process(case, rank_of(case, pp=rank))
        assert estimate.stages[rank].peak_bytes == pytest.approx(traced, rel=0.05), f"rank {rank}"


def _attend_as_on_a_gpu() -> None:
    """Latent attention in this process keeps what cuDNN keeps; the fused kernel of a CPU needs padded values."""
    import torch

    from workloads.engine import latent_attention

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch, heads, tokens, _ = q.shape
            o = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
            ctx.save_for_backward(q, k, v, o, q.new_empty(batch, heads, tokens, dtype=torch.float32))
            return o

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in ctx.saved_tensors[:3])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return Kernel.apply(q, k, v)

    latent_attention.attention = attend


def in_fresh_process(case: Experiment, rank: int) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workloads.rehearse"])  # torch is imported once
    with context.Pool(1) as pool:
        return pool.apply(traced_peak_bytes, (case, rank))


def traced_peak_bytes(case: Experiment, rank: int) -> int:
    """Peak of the second step (the optimizer state is there) of one rank under a fake process group."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workloads.engine.build import assemble, shape_chunks
    from workloads.engine.groups import make_groups
    from workloads.engine.memory import StorageTracker, tracked_storages
    from workloads.engine.parameters import local_shard

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    groups = make_groups(case, rank, torch.device("cpu"))
    chunks = shape_chunks(case, groups)
    tokens = case.micro_batch_size * case.seq_len // case.cp
    if case.model.mla is not None:
        _attend_as_on_a_gpu()

    def step() -> None:
        batches = [
            (torch.empty(tokens, dtype=torch.long), torch.empty(tokens, dtype=torch.long))
            for _ in range(case.num_microbatches)
        ]
        engine.pipeline.run(batches)
        engine.optimizer.finish_gradients()
        engine.optimizer.step(engine.optimizer.local_square_norm().sqrt())

    with FakeTensorMode(allow_non_fake_inputs=True):
        for chunk in chunks:
            chunk.to_empty(device="cpu")
        engine = assemble(case, groups, chunks)
        step()
        resident = [local_shard(parameter.current) for parameter in engine.optimizer.parameters]
        resident += [buffer for chunk in chunks for buffer in chunk.buffers()]
        there = sum(t.numel() * t.element_size() for t in resident) + engine.optimizer.state_bytes()
        with tracked_storages(StorageTracker()) as tracker:
            step()
    return there + tracker.peak
