"""Moments, master weights and reductions in bf16: what layouts agree in, how far they are from fp64, what they send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.parity import experiment, experts, train_rank, trained_reference, whole
from tests.workloads.engine.traffic_checks import check as check_traffic
from workloads.spec.experiment import Experiment

BF16: dict[str, Any] = {
    "precision": "bf16",
    "grad_reduce": "bf16",
    "optimizer_states": "bf16",
    "master_weights": "bf16",
}
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 2, "zero_stage": 1, "rounds": 2},
    {"dp": 2, "zero_stage": 2, "rounds": 2},
    {"dp": 3, "zero_stage": 3, "global_batch_size": 6},
    {"tp": 2},
    {"tp": 2, "dp": 2, "zero_stage": 3},
    {"tp": 2, "num_kv_heads": 1},
    {"tp": 4, "dp": 2, "zero_stage": 3},
    {"pp": 2, "tie": True},
    {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, "dp": 2, "zero_stage": 2, "global_batch_size": 8},
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
    {"cp": 2, "zero_stage": 1},
]
ROUTED: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "zero_stage": 3},
    {"tp": 2, "etp": 2, "ep": 1},
    {"tp": 2, "etp": 1, "ep": 2},
]


def final_weights(pool: Pool, case: Experiment, steps: int = 1) -> dict[str, Tensor]:
    """Weights after some steps. Copies must be equal to the bit."""
    traces = pool.run(train_rank, case.world_size, case, steps, timeout_s=150)
    return whole(case, [trace.steps[-1].weights for trace in traces], spread=1e-30)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 4), ids=str)
def test_an_element_is_rounded_alike_in_every_layout(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    """The first update is the sign of a gradient times 3e-5, about half the distance of two neighbours in bf16: other
    bits would choose another neighbour for about half of the weights. Only signs of the smallest gradients differ."""
    check_roundings(gloo_pool, layout, {})


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(ROUTED, 2), ids=str)
def test_experts_are_rounded_alike_in_every_layout(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    check_roundings(gloo_pool, layout, {"moe": experts()})


def check_roundings(pool: Pool, layout: dict[str, Any], shape: dict[str, Any]) -> None:
    case = experiment(**BF16, **layout, **shape)
    batch = {"global_batch_size": case.global_batch_size, "micro_batch_size": case.micro_batch_size}
    alone = Experiment.canonical(model=case.model, seq_len=case.seq_len, **BF16, **batch)
    expected, got = (final_weights(pool, one) for one in (alone, case))
    assert got.keys() == expected.keys()
    other = total = 0
    for name, weight in got.items():
        assert torch.equal(weight, weight.bfloat16().to(weight.dtype)), f"{name} is not in bf16"
        other, total = other + int((weight != expected[name]).sum()), total + weight.numel()
    assert other < 0.02 * total


@pytest.mark.slow
@pytest.mark.parametrize("field", ["grad_reduce", "optimizer_states", "master_weights"])
def test_losses_follow_those_in_fp64(gloo_pool: Pool, field: str) -> None:
    """Products in bf16 have relative errors of 2^-9, of which a loss averages many: 2^-10 for all precisions here."""
    case = experiment(precision="bf16", dp=2, zero_stage=1, rounds=2, **{field: "bf16"})
    exact = trained_reference(gloo_pool, "cpu", case.model, case.global_batch_size, steps=4)
    (trace, _) = gloo_pool.run(train_rank, 2, case, 4, timeout_s=150)
    for loss, right in zip(trace.losses, exact.losses, strict=True):
        assert loss == pytest.approx(right, rel=2**-10)
    for norm, right in zip(trace.grad_norms, exact.grad_norms, strict=True):
        assert norm == pytest.approx(right, rel=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    sampled(
        [
            {"dp": 2, "rounds": 2},
            {"dp": 2, "zero_stage": 1, "rounds": 2},
            {"dp": 2, "zero_stage": 3, "rounds": 2},
            {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
            {"tp": 2, "pp": 2, "tie": True},
            {"dp": 2, "ep": 2, "moe": experts()},
        ],
        3,
    ),
    ids=str,
)
def test_every_rank_sends_what_the_closed_form_says(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    for formats in ({"grad_reduce": "bf16"}, {"master_weights": "bf16"}):
        check_traffic(gloo_pool, experiment(precision="bf16", **formats, **layout))
