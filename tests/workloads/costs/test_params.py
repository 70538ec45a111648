from __future__ import annotations

import pytest

from tests.workloads.costs.shapes import DEEPSEEK_V3, LLAMA_1B, LLAMA_8B, LLAMA_70B, MIXTRAL, QWEN3_14B, QWEN3_30B, TINY
from workloads.costs.params import (
    active_params,
    local_params,
    matmul_params,
    num_params,
    playbook_params,
    stage_params,
    stages,
)
from workloads.experiment import Experiment, ModelSpec


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
        (active_params(MIXTRAL), 12.9e9, 0.01),
        (active_params(QWEN3_30B), 3.3e9, 0.02),  # the card gives two digits of 3.35
        (active_params(DEEPSEEK_V3), 37e9, 0.02),  # likewise, of 37.55
        (matmul_params(DEEPSEEK_V3), 36.7e9, 0.01),  # README_WEIGHTS.md of the release
    ],
)
def test_near_published_counts(count: int, published: float, tolerance: float) -> None:
    assert count == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_1B, MIXTRAL, DEEPSEEK_V3])
@pytest.mark.parametrize(("pp", "virtual", "v_shaped"), [(1, 1, False), (3, 1, False), (4, 2, False), (4, 2, True)])
def test_stages_hold_the_model_once(model: ModelSpec, pp: int, virtual: int, v_shaped: bool) -> None:
    held = stages(model, pp, virtual, v_shaped)
    apart = model.tie_embeddings and held[0].has_head is False
    copies = model.vocab_size * model.hidden_size if apart else 0  # both ends train a copy
    assert sum(stage.total for stage in held) == num_params(model) + copies
    assert sum(stage.num_layers for stage in held) == model.num_layers
    assert sum(stage.has_head for stage in held) == 1


def test_first_stages_take_the_dense_layers() -> None:
    assert [s.dense_layers for s in stages(DEEPSEEK_V3, 61)] == [1, 1, 1] + [0] * 58
    assert stage_params(DEEPSEEK_V3, 2, 0).dense_layers == 3


def test_v_shape_puts_both_ends_on_the_first_rank() -> None:
    first = stages(LLAMA_1B, 4, 2, True)[0]
    assert first.embedding > 0
    assert first.has_head
    assert first.head == 0, "the tied weight is already there"


def test_playbook_counts_tied_embeddings_twice_with_a_pipeline() -> None:
    assert playbook_params(LLAMA_1B, 1) == num_params(LLAMA_1B)
    assert playbook_params(LLAMA_1B, 2) - num_params(LLAMA_1B) == 128256 * 2048
    assert playbook_params(LLAMA_8B, 4) == num_params(LLAMA_8B)


def test_norms_are_not_split() -> None:
    layers = stage_params(LLAMA_8B, 1, 0).layers
    experiment = Experiment(model=LLAMA_8B, tp=8, global_batch_size=1)
    norms = 32 * 2 * 4096
    assert local_params(experiment, layers) == ((layers.total - norms) // 8 + norms, 0)


def test_experts_are_split_over_ep_and_tp() -> None:
    layers = stage_params(MIXTRAL, 1, 0).layers
    experiment = Experiment(model=MIXTRAL, tp=2, ep=4, dp_shard=4, zero_stage=1, global_batch_size=4)
    assert local_params(experiment, layers)[1] == 32 * 8 * 3 * 4096 * 14336 // 8
