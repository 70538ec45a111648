"""Seconds of routed experts: products of few rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import H200, MIXTRAL
from workloads.costs.shape.fp8 import grouped_rate
from workloads.costs.time.expert_times import ExpertTimes, in_fp32
from workloads.costs.time.rank_times import Rates
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of

MEASURED = {768: 0.63, 1408: 0.73, 14336: 0.86}
"""By width, grouped products over others in fp8: Qwen3-30B-A3B, DeepSeek-V2-Lite, Mixtral on one H200."""
WITH_FP32 = dataclasses.replace(
    H200, device=dataclasses.replace(H200.device, peak_flops={**H200.device.peak_flops, "fp32": 67e12})
)
FAST_MEMORY = Rates(matmul=1e15, head=1e15, attention=1e15, memory=1e18)


def forward_s(seq_len: int, experts: int, ep: int = 1, rates: Rates = FAST_MEMORY, **fields: Any) -> float:
    assert MIXTRAL.moe is not None
    moe = dataclasses.replace(MIXTRAL.moe, num_experts=experts)
    model = dataclasses.replace(MIXTRAL, name=f"{experts} experts", moe=moe)
    e = Experiment.canonical(
        **{"model": model, "dp": ep, "ep": ep, "seq_len": seq_len, "global_batch_size": ep, **fields}
    )
    mlp = layers_of(e.model).kinds[-1].mlp
    assert isinstance(mlp, RoutedMLP)
    return ExpertTimes.of(e, WITH_FP32, rates, mlp).forward_s


@pytest.mark.parametrize(("seq_len", "experts", "ep"), [(4096, 8, 1), (1024, 128, 1), (1024, 128, 4)])
def test_every_expert_takes_one_more_tile_of_rows(seq_len: int, experts: int, ep: int) -> None:
    """By hand: two experts a token, three matrices of 4,096 x 14,336, 128 rows more of each expert of the rank."""
    rows = 2 * seq_len + 128 * experts // ep
    assert forward_s(seq_len, experts, ep) == pytest.approx(2 * rows * 3 * 4096 * 14336 / 1e15)


def test_few_rows_take_as_long_as_their_weights_are_read() -> None:
    slow = FAST_MEMORY._replace(memory=1e12)
    assert forward_s(16, 128, rates=slow) == pytest.approx(2 * 128 * 3 * 4096 * 14336 / 1e12)


@pytest.mark.parametrize("width", MEASURED)
def test_wide_experts_are_nearer_to_the_rate_of_other_products_in_fp8(width: int) -> None:
    assert grouped_rate(width) == pytest.approx(MEASURED[width], abs=0.015)


def test_transformers_computes_experts_in_fp32_unless_fsdp_casts_their_weights() -> None:
    """By hand: of an H200, 989 TFLOP/s in bf16 and 67 in fp32."""
    replicated, sharded = (
        forward_s(4096, 8, dp=2, global_batch_size=2, engine="transformers", routing="learned", zero_stage=stage)
        for stage in (0, 3)
    )
    assert replicated == pytest.approx(sharded * 989 / 67)
    mlp = layers_of(MIXTRAL).kinds[-1].mlp
    assert isinstance(mlp, RoutedMLP)
    theirs = Experiment.canonical(model=MIXTRAL, global_batch_size=1, engine="transformers")
    assert in_fp32(theirs, mlp)
    assert not in_fp32(theirs, dataclasses.replace(mlp, weights_inputs=True)), "Llama 4"
    assert not in_fp32(theirs.replace(precision="fp32"), mlp) and not in_fp32(theirs.replace(engine="ultrasweep"), mlp)
