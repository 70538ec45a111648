"""The closed form where layers save less than their gradients take, and where a stage has a single layer: the peaks of
reductions, beside the real engine on FakeTensors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.traced import experiment, traced
from tests.workloads.costs.shapes import LLAMA_1B, LLAMA_8B
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of
from workloads.spec.model_spec import ModelSpec, model_from_dict, model_to_dict

pytestmark = pytest.mark.slow


def small(num_layers: int = 3) -> ModelSpec:
    sizes = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_hidden_size": 512}
    return model_from_dict({**model_to_dict(LLAMA_8B), **sizes, "num_layers": num_layers, "vocab_size": 1024})


def few_tokens(rounds: int = 1, seq_len: int = 16, **fields: Any) -> Experiment:
    sequences = rounds * fields.get("dp", 1)
    return Experiment.canonical(model=small(), seq_len=seq_len, global_batch_size=sequences, **fields)


FEW_TOKENS = {
    f"ZeRO {stage}, {rounds} x {tokens} tokens": few_tokens(
        rounds, tokens, dp=dp, zero_stage=stage, gradient_accumulation_fusion=False
    )
    for stage, dp in ((0, 1), (0, 2), (1, 2), (2, 4), (3, 4))
    for rounds in (1, 3)
    for tokens in (16, 128)
} | {
    f"ZeRO {stage}, Adafactor": few_tokens(
        2, dp=dp, zero_stage=stage, optimizer="adafactor", gradient_accumulation_fusion=False
    )
    for stage, dp in ((0, 1), (2, 4), (3, 4))
}


FEW_TOKENS |= {
    f"ZeRO {stage}, dp {dp}, {rounds} x {tokens} tokens, fused": few_tokens(
        rounds, tokens, dp=dp, zero_stage=stage, gradient_accumulation_fusion=True
    )
    for stage, dp in ((0, 1), (0, 2), (1, 2), (1, 4))
    for rounds in (2, 3)
    for tokens in (16, 128)
}


@pytest.mark.parametrize("name", sampled(list(FEW_TOKENS), 2, seconds=2))
def test_reductions_of_all_layers_are_in_the_peak(name: str) -> None:
    case = FEW_TOKENS[name]
    assert estimate_memory(case).peak_bytes == pytest.approx(traced(case, 0), rel=0.001)


def stages(rounds: int, **fields: Any) -> Experiment:
    sequences = rounds * fields.get("dp", 1)
    return Experiment.canonical(
        model=small(6), seq_len=128, global_batch_size=sequences, pp=2, pp_split="even", **fields
    )


STAGES = {
    f"{schedule}, ZeRO {zero}, {rounds} x 128 tokens": stages(
        rounds, dp=min(zero + 1, 2), zero_stage=zero, pp_schedule=schedule, gradient_accumulation_fusion=False
    )
    for schedule in ("1f1b", "gpipe")
    for zero in (0, 1, 2, 3)
    for rounds in (1, 2, 4)
}


@pytest.mark.parametrize("name", sampled(list(STAGES), 2, seconds=3))
def test_last_reductions_of_stages_are_in_the_peak(name: str) -> None:
    """A stage's output, the gradient that it received and that of its input are there until the backward ends. With
    ZeRO 3 a stage with few tokens peaks when its last layer is gathered, beside the layer's input or in the backward of
    the head."""
    case = STAGES[name]
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(2)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.002)


ONE_LAYER = {
    **{
        f"ZeRO {stage}, {rounds} micro-batches": experiment(
            layers=1, dp=8, zero_stage=stage, micro_batch_size=8, microbatches=rounds
        )
        for stage in (0, 2, 3)
        for rounds in (1, 2)
    },
    "tied, ZeRO 3": experiment(LLAMA_1B, layers=1, dp=8, zero_stage=3, micro_batch_size=8, microbatches=2),
    "four stages, ZeRO 3": experiment(
        layers=4, dp=8, zero_stage=3, pp=4, pp_split="even", micro_batch_size=4, microbatches=8
    ),
    **{
        f"{name}, split backwards": experiment(
            layers=layers,
            dp=8,
            pp=2,
            pp_schedule="interleaved_zero_bubble",
            virtual_stages=2,
            micro_batch_size=2,
            microbatches=4,
        )
        for name, layers in (("chunks", 4), ("chunks of two", 8))
    },
}


@pytest.mark.parametrize("name", sampled(list(ONE_LAYER), 2, seconds=4))
def test_stages_and_chunks_of_one_layer_are_those_of_the_engine(name: str) -> None:
    """Among them split backwards, whose deferred gradients hold nothing of the graph."""
    case = ONE_LAYER[name]
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.001)
