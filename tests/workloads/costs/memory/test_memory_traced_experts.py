"""The closed form where routed experts decide the peak, against the real engine on FakeTensors: within 0.1 %."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.test_memory_traced import ROUTED, routed
from tests.workloads.costs.memory.traced import experiment, shortened, traced
from tests.workloads.costs.shapes import MIXTRAL, QWEN3_30B
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of
from workloads.spec.model_spec import ModelSpec

pytestmark = pytest.mark.slow

QWEN = shortened(QWEN3_30B)
SHARED = shortened(ROUTED["shared, full"].model)


def again(model: ModelSpec, **fields: Any) -> Experiment:
    """Layers that compute everything again, with so many tokens that activations decide the peak."""
    formats = {"grad_reduce": "bf16", "optimizer_states": "bf16", "master_weights": "bf16"}
    return routed(model, micro_batch_size=16, recompute="full", **formats, **fields)


AGAIN = {
    "one rank": again(QWEN),
    "ep 2, ZeRO 2": again(QWEN, dp=2, zero_stage=2, ep=2),
    "etp 2": again(QWEN, tp=2, etp=2),
    "fp8": again(QWEN, precision="fp8_tensorwise"),
    "shared": again(SHARED),
    "shared, etp 2": again(SHARED, tp=2, etp=2),
}


def sums(model: ModelSpec = QWEN, **fields: Any) -> Experiment:
    """Sums of gradients that products add to, reduced in another dtype than that of the master weights."""
    fields = {"microbatches": 2, "micro_batch_size": 1, **fields}
    return routed(model, gradient_accumulation_fusion=True, **fields)


SUMS = {
    "the last experts' sums are cast": sums(
        shortened(QWEN3_30B, 8), grad_reduce="bf16", precision="fp8_tensorwise", recompute="selective"
    ),
    "a cast shard stays, ZeRO 1": sums(dp=2, zero_stage=1, master_weights="bf16"),
    "a cast shard stays, dense": experiment(
        dp=2,
        zero_stage=1,
        microbatches=2,
        micro_batch_size=4,
        master_weights="bf16",
        gradient_accumulation_fusion=True,
    ),
    "added at once, replicas": sums(dp=2, grad_reduce="bf16"),
    "added at once": sums(micro_batch_size=4, microbatches=3, grad_reduce="bf16"),
    "made in the first backward": sums(shortened(QWEN3_30B, 8)),
    "experts of a rank alone": sums(dp=2, zero_stage=1, ep=2, micro_batch_size=2),
    "full": sums(dp=2, zero_stage=1, ep=2, micro_batch_size=8, recompute="full"),
    "fp8": sums(dp=2, zero_stage=1, ep=2, micro_batch_size=2, precision="fp8_tensorwise"),
    "few large experts": sums(shortened(MIXTRAL), dp=8, zero_stage=1, ep=8, micro_batch_size=4),
}


@pytest.mark.parametrize("name", sampled(list(SUMS), 2, seconds=3))
def test_casts_of_sums_are_at_the_traced_peak(name: str) -> None:
    """A sum exists until it has been cast, and the next reduction frees the shard that was cast. Experts' gradients in
    the dtype of sums are added one by one."""
    case = SUMS[name]
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=0.001)


def only(make: Callable[..., Experiment] = experiment, **fields: Any) -> Experiment:
    """Sums of a step's only micro-batch."""
    case = make(**fields)
    assert case.num_microbatches == 1 and case.gradient_accumulation_fusion
    return case


ONLY = {
    "one rank": only(layers=4, recompute="full"),
    "ZeRO 0, reductions in bf16": only(layers=4, dp=2, grad_reduce="bf16"),
    "ZeRO 1": only(layers=4, dp=2, zero_stage=1, recompute="full"),
    "ZeRO 1, master weights in bf16": only(layers=4, dp=2, zero_stage=1, master_weights="bf16"),
    "HSDP": only(layers=4, dp_replicate=2, dp_shard=2, zero_stage=1, microbatches=4),
    "stages": only(dp=2, zero_stage=1, recompute="full", pp=2, pp_schedule="1f1b", micro_batch_size=2),
    "stages in fp8": only(
        dp=2, zero_stage=1, cp=2, pp=2, pp_schedule="1f1b", precision="fp8_rowwise", micro_batch_size=2
    ),
    "experts of a rank alone": only(routed, dp=2, zero_stage=1, ep=2, micro_batch_size=1),
    "experts of a rank alone, ZeRO 0": only(routed, dp=4, ep=4),
    "experts of two ranks, master weights in bf16": only(
        routed, model=shortened(MIXTRAL, 4), dp=2, zero_stage=1, recompute="selective", master_weights="bf16"
    ),
    "replicas of experts": only(routed, dp=4, ep=2),
}


@pytest.mark.parametrize("name", sampled(list(ONLY), 2, seconds=3))
def test_sums_of_the_only_micro_batch_are_at_the_traced_peak(name: str) -> None:
    """A unit's sums are reduced as soon as products have made them; only the embedding's gradient is cast to one."""
    case = ONLY[name]
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.001)


WHOLE = {
    name: routed(shortened(QWEN3_30B, 4), **{"dp": 2, "ep": 2, "microbatches": 2, **fields})
    for name, fields in (
        ("ZeRO 2", {"zero_stage": 2, "microbatches": 3, "micro_batch_size": 4}),
        ("ZeRO 3", {"zero_stage": 3}),
        ("ZeRO 3, full", {"zero_stage": 3, "micro_batch_size": 8, "recompute": "full"}),
        ("reductions in bf16", {"zero_stage": 2, "grad_reduce": "bf16"}),
        ("master weights in bf16", {"zero_stage": 3, "micro_batch_size": 1, "master_weights": "bf16"}),
        ("fp8", {"zero_stage": 3, "micro_batch_size": 4, "precision": "fp8_rowwise"}),
        ("1f1b", {"zero_stage": 3, "pp": 2, "microbatches": 4}),
        ("interleaved", {"zero_stage": 2, "pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2}),
    )
}


@pytest.mark.parametrize("name", sampled(list(WHOLE), 2, seconds=6))
def test_sums_of_experts_on_one_shard_are_at_the_traced_peak(name: str) -> None:
    """With ZeRO 2 and 3 experts that no two ranks share add to sums, and their units are reduced once a step."""
    case = WHOLE[name]
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.001)


SPLIT = {
    name: sums(
        shortened(QWEN3_30B, 4),
        pp=2,
        pp_schedule="zero_bubble_v",
        virtual_stages=2,
        microbatches=4,
        **fields,
    )
    for name, fields in (
        ("one rank a stage", {"micro_batch_size": 2}),
        ("ep 2, ZeRO 1", {"dp": 2, "ep": 2, "zero_stage": 1}),
        ("full", {"dp": 2, "ep": 2, "zero_stage": 1, "micro_batch_size": 4, "recompute": "full"}),
        ("fp8", {"dp": 2, "ep": 2, "zero_stage": 1, "micro_batch_size": 2, "precision": "fp8_rowwise"}),
    )
}


@pytest.mark.parametrize("name", sampled(list(SPLIT), 1, seconds=16))
def test_input_gradients_of_experts_are_at_the_traced_peak(name: str) -> None:
    """The gradients of the experts' outputs stay for the weight-gradient pass, beside those of the received copies."""
    case = SPLIT[name]
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.001)


CASTS = {
    f"{name}, {what}": routed(
        shortened(QWEN3_30B, 5), micro_batch_size=1, recompute="selective", activation_offload="all", **fields, **layout
    )
    for name, fields in (("master in bf16", {"master_weights": "bf16"}), ("sums in bf16", {"grad_reduce": "bf16"}))
    for what, layout in (
        ("ZeRO 3", {"dp": 2, "zero_stage": 3}),
        ("ZeRO 2", {"dp": 4, "zero_stage": 2, "microbatches": 3}),
        ("ep 2", {"dp": 4, "zero_stage": 3, "ep": 2}),
    )
}


@pytest.mark.parametrize("name", sampled(list(CASTS), 2, seconds=4))
def test_a_shard_of_experts_and_its_cast_are_at_the_traced_peak(name: str) -> None:
    case = CASTS[name]
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=0.001)


DENSE_FIRST = shortened(ROUTED["shared, full"].model, 2)
UNITS = {
    "experts in a forward": routed(
        DENSE_FIRST, dp=2, zero_stage=3, microbatches=3, micro_batch_size=4, recompute="swiglu"
    ),
    "few experts in a forward": routed(
        shortened(QWEN3_30B, 3), dp=8, zero_stage=3, ep=8, microbatches=2, micro_batch_size=4, recompute="full"
    ),
    "the head once more": routed(
        DENSE_FIRST, dp=2, tp=2, etp=1, pp=2, ep=2, zero_stage=2, microbatches=2, micro_batch_size=8
    ),
    "a stage of a dense layer": routed(DENSE_FIRST, dp=4, tp=2, etp=1, pp=2, zero_stage=3, microbatches=4),
    "the second of two layers with experts": routed(
        shortened(QWEN3_30B, 4), dp=2, zero_stage=3, micro_batch_size=4, recompute="full", recompute_every=2
    ),
    "one micro-batch": routed(shortened(QWEN3_30B, 4), dp=2, pp=2, zero_stage=3, micro_batch_size=4),
}


@pytest.mark.parametrize("name", sampled(list(UNITS), 2, seconds=4))
def test_units_that_are_gathered_are_those_of_the_stage(name: str) -> None:
    """ZeRO 3 gathers blocks of the stage's own layers, and no unit before the first one of the first micro-batch. In a
    last backward the head of the micro-batch before is gathered again."""
    case = UNITS[name]
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.001)


@pytest.mark.parametrize("name", sampled(list(AGAIN), 2, seconds=3))
def test_second_forwards_end_at_the_traced_peak(name: str) -> None:
    """The outputs of the experts' last products exist beside the received gradients."""
    case = AGAIN[name]
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=0.001)
