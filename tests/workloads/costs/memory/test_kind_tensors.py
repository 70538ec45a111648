"""What layers of each kind save, derived by hand."""

from __future__ import annotations

from typing import Any

from tests.workloads.costs.published import PUBLISHED, published
from workloads.costs.memory.kind_sizes import kind_bytes
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.model_layers import layers_of

T = 4096
"""Tokens of a micro-batch."""


def layout(model: Any, **fields: Any) -> Experiment:
    return Experiment.canonical(model=model, global_batch_size=16, seq_len=T, **fields)


def saved(name: str, kind: int, **fields: Any) -> dict[str, int]:
    """Bytes by name of what one layer's mixer and MLP save."""
    e = layout(published(name), **fields)
    tensors = kind_tensors(layers_of(e.model).kinds[kind], Sizes.of(e, 2), e.model.streams)
    return {one.name: one.bytes for one in tensors.mixer + tensors.mlp}


def test_attention_with_biases_and_sinks_saves_no_more_than_without() -> None:
    # gpt-oss: 64 heads and 8 key and value heads of 64
    assert saved("openai/gpt-oss-20b", 0) == {
        "projected": 2 * T * (64 + 2 * 8) * 64,
        "rotated": 2 * T * (64 + 8) * 64,
        "softmax": 4 * T * 64,
        "attention output": 2 * T * 64 * 64,
    }


def test_an_output_gate_saves_itself_and_the_product() -> None:
    # Qwen3.5-27B's full attention: 24 heads and 4 key and value heads of 256, tp 2
    tensors = saved("Qwen/Qwen3.5-27B", 1, tp=2)
    assert tensors["gate"] == tensors["gated output"] == tensors["attention output"] == 2 * T * 24 * 256 // 2
    assert tensors["norm of heads: statistics"] == 4 * T * 28 // 2


def test_shared_keys_and_values_are_projected_once() -> None:
    # Gemma 4's full layers: 16 heads and 2 of keys, of 512
    assert saved("google/gemma-4-26B-A4B", 1)["projected"] == 2 * T * (16 + 2) * 512


def of_mixer(name: str) -> dict[str, int]:
    """Bytes of what the first layer saves in its mixer."""
    return {what: size for what, size in saved(name, 0).items() if what not in ("gate and up", "product")}


def test_the_gated_delta_rule_saves_its_projection_and_the_gated_norm() -> None:
    # Qwen3.5-27B: 16 key heads and 48 value heads of 128
    assert of_mixer("Qwen/Qwen3.5-27B") == {
        "projected": 2 * T * ((2 * 16 + 2 * 48) * 128 + 2 * 48),
        "gated norm": 2 * T * 48 * 128,
    }
    # Only norms of the stream are made again alone: making the gated norm again takes the whole recurrence.
    assert kind_bytes(
        layout(published("Qwen/Qwen3.5-27B"), recompute="norm"), _kind("Qwen/Qwen3.5-27B", 0), 2, recomputed=True
    ).saved == (
        kind_bytes(layout(published("Qwen/Qwen3.5-27B")), _kind("Qwen/Qwen3.5-27B", 0), 2, recomputed=False).saved
        - 2 * 2 * T * 5120
    )


def test_kda_saves_its_projections_latents_and_the_gated_norm() -> None:
    # Kimi K3: 96 heads of 128, gates in full rank
    assert of_mixer("moonshotai/Kimi-K3") == {
        "projected": 2 * T * (4 * 96 * 128 + 96),
        "latents of decay and gate": 2 * T * 128,
        "decay and gate": 2 * T * 96 * 128,
        "gated norm": 2 * T * 96 * 128,
    }


def _kind(name: str, at: int) -> Layer:
    return layers_of(published(name)).kinds[at]


def test_mamba_saves_its_projection_and_the_gated_norm() -> None:
    # Nemotron 3 Nano: 64 heads of 64, 8 groups of state 128
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    assert saved(name, 0) == {
        "projected": 2 * T * (2 * 64 * 64 + 2 * 8 * 128 + 64),
        "gated norm": 2 * T * 64 * 64,
    }
    e = layout(published(name))
    own = kind_bytes(e, _kind(name, 0), 2, recomputed=False)
    assert own.saved == sum(saved(name, 0).values()) + 2 * 2 * T * 2688 + 4 * T


def test_an_indexer_saves_its_choice() -> None:
    assert saved("zai-org/GLM-5", 0)["choice of the indexer"] == 4 * T * 2048


def test_streams_lie_between_layers() -> None:
    e = layout(published("deepseek-ai/DeepSeek-V4-Flash"), recompute="full")
    kind = layers_of(e.model).kinds[0]
    assert kind_bytes(e, kind, 2, recomputed=True).saved == 4 * 2 * T * 4096


def test_every_kind_of_published_models_has_tensors() -> None:
    for name in PUBLISHED:
        for recompute in ("none", "selective", "full"):
            e = layout(published(name), recompute=recompute)
            for kind in layers_of(e.model).kinds:
                own, kept = (kind_bytes(e, kind, 2, recomputed=on) for on in (True, False))
                assert 0 < own.saved <= kept.saved
                assert max(own.working, own.mixing) > 0 and own.deferred > 0
