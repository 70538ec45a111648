"""The closed form against the real engine on FakeTensors: every storage of a step is counted, nothing computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.traced import experiment, rounding, shortened, traced
from tests.workloads.costs.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    LLAMA_1B,
    LLAMA_8B,
    MIXTRAL,
    QWEN3_14B,
    QWEN3_30B,
)
from workloads.contract import stages
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of
from workloads.spec.model_spec import ModelSpec, MoESpec

pytestmark = pytest.mark.slow

CASES = {
    "one rank": experiment(micro_batch_size=4),
    "one rank, accumulation": experiment(microbatches=2),
    "ZeRO 0": experiment(dp=2, microbatches=2),
    "ZeRO 1": experiment(dp=8, zero_stage=1, microbatches=2),
    "ZeRO 2": experiment(dp=8, zero_stage=2, microbatches=3, micro_batch_size=2),
    "ZeRO 3": experiment(dp=8, zero_stage=3, microbatches=2),
    "fused accumulation": experiment(microbatches=2, gradient_accumulation_fusion=True),
    "fused accumulation, ZeRO 1": experiment(
        dp=8, zero_stage=1, microbatches=3, micro_batch_size=2, gradient_accumulation_fusion=True
    ),
    "fused accumulation, tp, full": experiment(
        tp=4, micro_batch_size=4, microbatches=3, recompute="full", gradient_accumulation_fusion=True
    ),
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
    "an embedding alone": experiment(layers=3, pp=2, microbatches=2, micro_batch_size=2, pp_stages="E|tttL"),
    "a head alone, ZeRO 2": experiment(layers=3, dp=8, zero_stage=2, pp=2, micro_batch_size=4, pp_stages="Ettt|L"),
    "a padded vocabulary": experiment(dp=8, zero_stage=3, microbatches=2, pad_vocab_to=8192),
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
    "a dense layer before large recomputed ones, ZeRO 3": routed(
        shortened(DEEPSEEK_V2_LITE, 8), dp=2, zero_stage=3, micro_batch_size=8, recompute="full"
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
CASES |= {
    f"cp ulysses, norms of queries and keys, {recompute}": Experiment.canonical(
        model=shortened(QWEN3_14B, 4),
        cp_kind="ulysses",
        recompute=recompute,
        micro_batch_size=4,
        **LONG | {"seq_len": 4096, "global_batch_size": 8},
    )
    for recompute in ("none", "selective", "rope", "full")
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


FORMATS: dict[str, dict[str, Any]] = {
    "states": {"optimizer_states": "bf16"},
    "master": {"master_weights": "bf16"},
    "reduce": {"grad_reduce": "bf16"},
    "all": {"grad_reduce": "bf16", "optimizer_states": "bf16", "master_weights": "bf16"},
}
IN_BF16 = {
    f"{name}, {kind}": (CASES[name] if name.startswith("fused") else rounding(CASES[name])).replace(**fields)
    for name in (
        "one rank",
        "one rank, accumulation",
        "ZeRO 0",
        "ZeRO 1",
        "ZeRO 2",
        "ZeRO 3",
        "HSDP",
        "fused accumulation",
    )
    for kind, fields in FORMATS.items()
}


REPLICAS_IN_BF16 = {
    f"{replicas} of {shards} shards, ZeRO {zero}, {microbatches} x {tokens} tokens": Experiment.canonical(
        model=shortened(LLAMA_8B),
        seq_len=tokens,
        dp_replicate=replicas,
        dp_shard=shards,
        zero_stage=zero,
        global_batch_size=replicas * shards * microbatches,
        grad_reduce="bf16",
        gradient_accumulation_fusion=False,
    )
    for replicas, shards, zero, microbatches, tokens in (
        (2, 2, 2, 2, 1024),
        (4, 2, 2, 3, 1024),
        (2, 4, 2, 2, 4096),
        (2, 2, 3, 3, 1024),
        (4, 2, 3, 2, 1024),
    )
}
"""Replicas are summed with the last micro-batch. Until then a rank has sums over its shards, in bf16."""


@pytest.mark.parametrize("name", sampled(list(REPLICAS_IN_BF16), 1, seconds=2))
def test_sums_of_replicas_that_wait_for_the_last_micro_batch_have_two_bytes(name: str) -> None:
    case = REPLICAS_IN_BF16[name]
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=0.001)


@pytest.mark.parametrize("name", sampled(list(IN_BF16), 1, seconds=2))
def test_peak_with_formats_of_two_bytes_equals_the_traced_engine(name: str) -> None:
    case = IN_BF16[name]
    # replicas that FSDP sums in bf16 and casts have one more moment, which the closed form counts 0.4 % too high
    near = 0.005 if name == "ZeRO 0, reduce" else 0.001
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=near)


@pytest.mark.parametrize("name", sampled(list(CASES), 2, seconds=2))
def test_peak_equals_the_traced_engine(name: str) -> None:
    case = CASES[name] if name.startswith("fused") else rounding(CASES[name])
    estimate = estimate_memory(case)
    for stage in range(case.pp):
        peak = traced(case, rank_of(case, pp=stage))
        assert estimate.stages[stage].peak_bytes == pytest.approx(peak, rel=0.01), f"stage {stage}"


@pytest.mark.parametrize("name", sampled(list(ROUTED), 1, seconds=2))
def test_peak_with_routed_experts_is_near_the_traced_engine(name: str) -> None:
    case = rounding(ROUTED[name])
    # with ZeRO 3 two gathered blocks count as dense ones, the largest of this model: 187 MiB, 2.4 %, too much
    near = 0.025 if name == "shared, full" else 0.02
    estimate = estimate_memory(case)
    for stage in range(case.pp):
        peak = traced(case, rank_of(case, pp=stage))
        assert estimate.stages[stage].peak_bytes == pytest.approx(peak, rel=near), f"stage {stage}"


@pytest.mark.slow(seconds=3)
def test_a_shortened_step_peaks_as_the_whole_one() -> None:
    """Experts' gradients are so large that the peak is in a micro-batch that gives no gathered weights back."""
    case = routed(shortened(MIXTRAL), dp=2, zero_stage=2, micro_batch_size=4, microbatches=6)
    short = stages.shortened(case)
    assert short.num_microbatches == 3
    inputs = 16 * 4 * 4096 * (case.num_microbatches - short.num_microbatches)  # ids and targets of every micro-batch
    assert traced(case, 0) - traced(short, 0) == pytest.approx(inputs, abs=64)  # and counters
    two = short.replace(global_batch_size=short.global_batch_size * 2 // 3)
    assert traced(two, 0) < 0.97 * traced(short, 0)
