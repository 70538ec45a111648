"""Attention of published models whose heads are not as large as ``hidden / heads``, recognized by the sizes of a row.

A table's columns do not describe latent attention, and seldom the size of a head. A row that has the sizes of one of
these models, or of a cut of it to fewer layers, has its attention, and says so. Sizes: config.json of each model on
Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workloads.spec.model_spec import MLASpec


class Shape(NamedTuple):
    name: str
    hidden: int
    heads: int
    kv_heads: int
    num_experts: int
    """0: a dense model."""
    expert_ffn: int
    head_dim: int
    """Columns of a head's query."""
    mla: MLASpec | None = None
    dense_layers: int = 0
    """First layers without experts."""
    groups: tuple[int, int] = (1, 1)
    """Equal groups of experts, and from how many a token chooses (n_group, topk_group)."""


def _latent(q_lora_rank: int) -> MLASpec:
    return MLASpec(q_lora_rank=q_lora_rank, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


SHAPES = (
    Shape("DeepSeek-V2-Lite", 2048, 16, 16, 64, 1408, 192, _latent(0), 1),
    Shape("DeepSeek-V2", 5120, 128, 128, 160, 1536, 192, _latent(1536), 1, (8, 3)),
    Shape("DeepSeek-V3", 7168, 128, 128, 256, 2048, 192, _latent(1536), 3, (8, 4)),
    Shape("Kimi-K2", 7168, 64, 64, 384, 2048, 192, _latent(1536), 1),
    Shape("Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 128),
    Shape("Qwen3-235B-A22B", 4096, 64, 4, 128, 1536, 128),
    Shape("Qwen3-Coder-480B-A35B", 6144, 96, 8, 160, 2560, 128),
    Shape("gpt-oss-20b", 2880, 64, 8, 32, 2880, 64),
    Shape("gpt-oss-120b", 2880, 64, 8, 128, 2880, 64),
    Shape("GLM-4.5", 5120, 96, 8, 160, 1536, 128, None, 3),
    Shape("GLM-4.5-Air", 4096, 96, 8, 128, 1408, 128, None, 1),
    Shape("Qwen3-0.6B", 1024, 16, 8, 0, 0, 128),
    Shape("Qwen3-4B", 2560, 32, 8, 0, 0, 128),
    Shape("Qwen3-32B", 5120, 64, 8, 0, 0, 128),
    Shape("Mistral-Nemo-12B", 5120, 32, 8, 0, 0, 128),
)


def attention_of(
    n: dict[str, float | None], model: Mapping[str, float], published: bool, note: list[str]
) -> tuple[float, MLASpec | None]:
    """(columns of all queries, latent attention or None) of a row. ``n``: numbers of its columns, of which
    ``dense_layers`` is filled in for a published model; ``model``: fields of `Points`; ``published``: whether published
    models are recognized.

    Latent attention counts as queries of ``hidden`` columns: the form knows its row as a dense model of that size.
    """
    known = _shape_of(n, model) if published and n["head_dim"] is None else None
    if known is None:
        return (n["head_dim"] or model["hidden"] / model["heads"]) * model["heads"], None
    note.append(f"attention of {known.name}, whose sizes the row has")
    if known.dense_layers and n["dense_layers"] is None:
        first = known.dense_layers if model["layers"] > 2 * known.dense_layers else 1
        n["dense_layers"] = float(first)
        note.append(f"dense_layers not given: {first}, as {known.name} has such layers")
    return (model["hidden"], known.mla) if known.mla is not None else (known.head_dim * model["heads"], None)


def groups_of(n: Mapping[str, float | None], model: Mapping[str, float]) -> tuple[int, int]:
    """Equal groups of experts, and from how many a token chooses, of a published model; one group of others."""
    known = _shape_of(n, model)
    return (1, 1) if known is None else known.groups


def _shape_of(n: Mapping[str, float | None], model: Mapping[str, float]) -> Shape | None:
    """The published model whose sizes a row has."""
    sizes = (model["hidden"], model["heads"], model["kv_heads"])
    experts = (n["num_experts"] or 0, n["expert_ffn"] or 0)
    return next((one for one in SHAPES if (one[1:4], one[4:6]) == (sizes, experts)), None)
