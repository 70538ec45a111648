from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from tests.workloads.costs.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    QWEN3_14B,
    QWEN3_30B,
    QWEN3_235B,
    TINY,
)
from workloads.costs.shape.params import (
    active_params_with_embedding,
    active_params_without_embedding,
    local_params,
    matmul_params,
    num_params,
    playbook_params,
)
from workloads.costs.shape.partition import (
    StageParams,
    experiment_layers,
    experiment_stages,
    head_in_layers,
    stage_layers,
)
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PipelineSplit
from workloads.spec.model_spec import ModelSpec, MoESpec

GPT_OSS_20B = ModelSpec(
    name="gpt_oss_20b",
    num_layers=24,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=2880,
    vocab_size=201088,
    moe=MoESpec(num_experts=32, experts_per_token=4, expert_hidden_size=2880),
)
GPT_OSS_120B = replace(
    GPT_OSS_20B,
    name="gpt_oss_120b",
    num_layers=36,
    moe=MoESpec(num_experts=128, experts_per_token=4, expert_hidden_size=2880),
)
"""Without the biases and attention sinks of the published models, which no `ModelSpec` has."""


def test_a_tied_embedding_is_active_as_the_output_projection() -> None:
    assert active_params_without_embedding(LLAMA_1B) == active_params_with_embedding(LLAMA_1B) == num_params(LLAMA_1B)
    assert num_params(LLAMA_8B) - active_params_without_embedding(LLAMA_8B) == 128256 * 4096


def test_tiny_by_hand() -> None:
    # attention: q 8x8, k and v 8x4 each, o 8x8 = 192; SwiGLU 3 x 8x16 = 384; two norms of 8. Four such layers.
    # embedding and head 32x8 each, final norm 8.
    assert num_params(TINY) == 4 * (192 + 384 + 16) + 2 * 256 + 8
    assert matmul_params(TINY) == 4 * (192 + 384) + 256


@pytest.mark.parametrize(
    ("model", "published"),
    [
        # Exact counts of the Hugging Face checkpoints.
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_70B, 70_553_706_496),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_30B, 30_532_122_624),
        (QWEN3_14B, 14_768_307_200),
    ],
)
def test_equals_checkpoints(model: ModelSpec, published: int) -> None:
    assert num_params(model) == published


@pytest.mark.parametrize(
    ("count", "published", "tolerance"),
    [
        (num_params(DEEPSEEK_V3), 671e9, 0.01),
        (active_params_with_embedding(MIXTRAL), 12.9e9, 0.01),
        (active_params_with_embedding(QWEN3_30B), 3.3e9, 0.02),  # the card gives two digits of 3.35
        (num_params(QWEN3_235B), 235e9, 0.001),
        (active_params_with_embedding(QWEN3_235B), 22e9, 0.01),
        (num_params(DEEPSEEK_V2_LITE), 15.7e9, 0.001),
        # arXiv:2405.04434, appendix B: 2.4 billion "activated for each token": 2.45 without the input embedding
        (active_params_without_embedding(DEEPSEEK_V2_LITE), 2.4e9, 0.03),
        (active_params_without_embedding(DEEPSEEK_V3), 37e9, 0.015),
        # arXiv:2508.10925, table 1: "unembedding parameters towards active, but not embeddings"
        (num_params(GPT_OSS_120B), 116.83e9, 0.001),
        (active_params_without_embedding(GPT_OSS_120B), 5.13e9, 0.001),
        (active_params_without_embedding(GPT_OSS_20B), 3.61e9, 0.001),
        (active_params_with_embedding(GPT_OSS_120B), 5.71e9, 0.001),
        (matmul_params(DEEPSEEK_V3), 36.7e9, 0.01),  # README_WEIGHTS.md of the release
    ],
)
def test_near_published_counts(count: int, published: float, tolerance: float) -> None:
    assert count == pytest.approx(published, rel=tolerance)


def held(
    model: ModelSpec, pp: int, schedule: str = "1f1b", virtual: int = 1, split: PipelineSplit = "even"
) -> tuple[StageParams, ...]:
    fields = {"pp_schedule": schedule, "virtual_stages": virtual, "pp_split": split} if pp > 1 else {}
    return experiment_stages(Experiment.canonical(model=model, pp=pp, global_batch_size=1, **fields))


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_1B, MIXTRAL, DEEPSEEK_V3])
@pytest.mark.parametrize("split", ["even", "balanced"])
@pytest.mark.parametrize(
    ("pp", "schedule", "virtual"),
    [(1, "none", 1), (3, "1f1b", 1), (4, "interleaved_1f1b", 2), (4, "zero_bubble_v", 2), (2, "dualpipe_v", 2)],
)
def test_stages_hold_the_model_once(
    model: ModelSpec, split: PipelineSplit, pp: int, schedule: str, virtual: int
) -> None:
    ranks = held(model, pp, schedule, virtual, split)
    copies = model.vocab_size * model.hidden_size if model.tie_embeddings and pp > 1 else 0  # both ends train a copy
    assert sum(rank.total for rank in ranks) == num_params(model) + copies
    assert sum(rank.num_layers for rank in ranks) == model.num_layers
    assert sum(rank.has_head for rank in ranks) == 1


def test_first_stages_take_the_dense_layers() -> None:
    assert [s.of_kind[0] for s in held(DEEPSEEK_V3, 61)] == [1, 1, 1] + [0] * 58
    assert held(DEEPSEEK_V3, 2)[0].of_kind[0] == 3


def test_v_shape_puts_both_ends_on_the_first_rank() -> None:
    first = held(LLAMA_1B, 4, "zero_bubble_v", 2)[0]
    assert first.has_head
    assert first.embedding == first.head == 128256 * 2048, "they are different stages, each with a copy"


def test_a_balanced_split_makes_up_for_the_head() -> None:
    assert 2 < head_in_layers(LLAMA_8B, 4096) < 2.3  # 525 M parameters beside 218 M and attention
    assert [len(layers) for layers in stage_layers(LLAMA_8B, "1f1b", 2, 1, "balanced", 4096)] == [17, 15]
    assert [len(layers) for layers in stage_layers(LLAMA_8B, "1f1b", 2, 1, "even", 4096)] == [16, 16]
    v_shaped = stage_layers(LLAMA_8B, "zero_bubble_v", 2, 2, "balanced", 4096)
    assert [len(layers) for layers in v_shaped] == [9, 9, 8, 6], "rank 0 holds the first and the last stage"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_smaller_largest_rank(seed: int) -> None:
    draw = random.Random(seed)
    pp = draw.choice([2, 3, 4])
    model = replace(TINY, num_layers=draw.randint(pp, 9), vocab_size=draw.choice([64, 512, 4096]))
    head = head_in_layers(model, 64)

    def largest(counts: Sequence[int]) -> float:
        return max(count + (head if rank == pp - 1 else 0) for rank, count in enumerate(counts))

    found = [len(layers) for layers in stage_layers(model, "1f1b", pp, 1, "balanced", 64)]
    assert sum(found) == model.num_layers
    every = (c for c in product(range(1, model.num_layers + 1), repeat=pp) if sum(c) == model.num_layers)
    assert largest(found) == pytest.approx(min(largest(counts) for counts in every))


@pytest.mark.parametrize("split", ["even", "balanced"])
def test_stages_are_contiguous(split: PipelineSplit) -> None:
    case = Experiment.canonical(model=LLAMA_70B, pp=8, pp_split=split, global_batch_size=8)
    layers = [layer for stage in experiment_layers(case) for layer in stage]
    assert layers == list(range(80))


def test_playbook_counts_tied_embeddings_twice_with_a_pipeline() -> None:
    assert playbook_params(LLAMA_1B, 1) == num_params(LLAMA_1B)
    assert playbook_params(LLAMA_1B, 2) - num_params(LLAMA_1B) == 128256 * 2048
    assert playbook_params(LLAMA_8B, 4) == num_params(LLAMA_8B)


def test_norms_are_not_split() -> None:
    layers = held(LLAMA_8B, 1)[0].layers
    experiment = Experiment(model=LLAMA_8B, tp=8, global_batch_size=1)
    norms = 32 * 2 * 4096
    assert local_params(experiment, layers) == ((layers.total - norms) // 8 + norms, 0)


def test_experts_are_split_over_ep_and_etp() -> None:
    layers = held(MIXTRAL, 1)[0].layers
    experiment = Experiment(model=MIXTRAL, tp=2, ep=4, dp_shard=4, zero_stage=1, global_batch_size=4)
    assert local_params(experiment, layers)[1] == 32 * 8 * 3 * 4096 * 14336 // 4
    assert local_params(experiment.replace(etp=2), layers)[1] == 32 * 8 * 3 * 4096 * 14336 // 8
