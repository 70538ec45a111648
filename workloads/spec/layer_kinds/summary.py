"""The fields of `ModelSpec` that stand for a list of layers: sizes by which rules and tables read any model."""

from __future__ import annotations

from functools import reduce
from typing import Any

from workloads.spec.layer_kinds.attention import Attention, BlockSparseAttention, CompressedAttention, LatentAttention
from workloads.spec.layer_kinds.layer_list import LayerList
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.weight import Splits

BIAS_STEP = 0.001
"""Change of a bias of the choice of experts after a step, which no file says: that of DeepSeek-V3."""


def summary(layers: LayerList) -> dict[str, Any]:
    """Fields that follow from the layers. Heads and columns are those that tensor parallelism may divide in every
    layer, their greatest common divisors; the size of a head is the largest. Experts are those of the first routed
    layer, latents those of the first latent attention."""
    splits = reduce(Splits.both, (layer.splits for layer in layers.kinds), Splits())
    mixers = [layer.mixer for layer in layers.kinds]
    latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
    routed = next((layer.mlp for layer in layers.kinds if isinstance(layer.mlp, RoutedMLP)), None)
    dense = [isinstance(layers.kinds[at].mlp, DenseMLP) for at in layers.order]
    heads = splits.heads or splits.recurrent_heads or 1
    kv_heads = splits.kv_heads if latent is None else heads
    ropes = [
        mixer.rope for mixer in mixers if isinstance(mixer, Attention | LatentAttention) and mixer.rope is not None
    ]
    return {
        "num_layers": len(layers.order),
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "head_dim": max([_head_size(mixer) for mixer in mixers], default=1),
        "ffn_hidden_size": splits.columns or (routed.chosen * routed.expert.width if routed is not None else 1),
        "qk_norm": latent is None and any(isinstance(mixer, Attention) and mixer.norm == "head" for mixer in mixers),
        **({"rope_theta": ropes[0].theta} if ropes else {}),
        "moe": None if routed is None else experts(routed, sum(dense)),
        "mla": None if latent is None else latents(latent),
    }


def _head_size(mixer: object) -> int:
    if isinstance(mixer, BlockSparseAttention):
        mixer = mixer.attention
    if isinstance(mixer, Attention | CompressedAttention):
        return mixer.head_dim
    return mixer.nope_dim + mixer.rope_dim if isinstance(mixer, LatentAttention) else 1


def latents(mixer: LatentAttention) -> dict[str, Any]:
    return {
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
    }


def experts(mlp: RoutedMLP, dense_layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_experts": mlp.experts,
        "experts_per_token": mlp.chosen,
        "expert_hidden_size": mlp.expert.width,
        "num_shared_experts": mlp.shared_experts,
        "num_dense_layers": dense_layers,
        "gate": "sigmoid" if mlp.score == "sigmoid" else "softmax",
        "normalize_weights": mlp.normalize or mlp.score == "softmax_of_chosen",
        "weight_scale": mlp.scale,
    }
    if mlp.correction:
        fields |= {"balance": "bias", "balance_coefficient": BIAS_STEP}
    elif mlp.balance_loss:
        fields |= {"balance": "aux_loss", "balance_coefficient": mlp.balance_loss}
    return fields
