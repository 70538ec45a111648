"""Our weights in the parameters of torchtitan's gpt-oss and Llama 4, of both versions, and of 0.3's Qwen3 with experts
and DeepSeek-V3.

E experts, D columns of the hidden state, F columns of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workloads.adapters.published_weights import last_in_pairs
from workloads.rules.torchtitan_kinds import kinds_family
from workloads.spec import kind_weights, weights
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.model_spec import ModelSpec, layers_of
from workloads.spec.weights import Weight

_ENDS = {
    "tok_embeddings.weight": weights.embedding,
    "norm.weight": weights.final_norm,
    **dict.fromkeys(("output.weight", "lm_head.weight"), weights.head),
}
_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention_norm.weight": ("attention_norm",),
    "ffn_norm.weight": ("ffn_norm",),
    **{f"attention.w{one}.weight": (f"attention.{one}",) for one in "qkvo"},
    **{f"attention.w{one}.bias": (f"attention.{one}_bias",) for one in "qkvo"},
    "attention.qkv_linear.wqkv.weight": ("attention.q", "attention.k", "attention.v"),
    "attention.qkv_linear.wqkv.bias": ("attention.q_bias", "attention.k_bias", "attention.v_bias"),
    "attention.sinks": ("attention.sinks",),
    "attention.q_norm.weight": ("attention.q_norm",),
    "attention.k_norm.weight": ("attention.k_norm",),
    "attention.wq_a.weight": ("attention.q_down",),
    "attention.wq_b.weight": ("attention.q_up",),
    "attention.wkv_a.weight": ("attention.kv_down",),
    "attention.kv_norm.weight": ("attention.kv_norm",),
    "attention.wkv_b.weight": ("attention.kv_up",),
    "feed_forward.w1.weight": ("ffn.gate",),
    "feed_forward.w2.weight": ("ffn.down",),
    "feed_forward.w3.weight": ("ffn.up",),
    "moe.router.gate.weight": ("experts.router",),
    "moe.router.gate.bias": ("experts.router_bias",),
    "moe.experts.w1": ("experts.gate",),
    "moe.experts.w2": ("experts.down",),
    "moe.experts.w3": ("experts.up",),
    "moe.experts.mlp1_weight": ("experts.gate", "experts.up"),
    "moe.experts.mlp1_bias": ("experts.gate_bias", "experts.up_bias"),
    "moe.experts.mlp2_weight": ("experts.down",),
    "moe.experts.mlp2_bias": ("experts.down_bias",),
    "moe.shared_experts.w1.weight": ("shared.gate",),
    "moe.shared_experts.w2.weight": ("shared.down",),
    "moe.shared_experts.w3.weight": ("shared.up",),
}
"""Names of a layer's parameters in 0.2.2, and ours in each."""
_LATENT_ROTATED = ("attention.wq.weight", "attention.wq_b.weight", "attention.wkv_a.weight")
"""Parameters of latent attention that end with rotated columns, of each head or of the one key."""
_SUFFIXES = re.compile(r"_(EGD|EG|EFD|EDF|ED)$")
"""Shapes at the end of 0.3's names."""


def value_of(m: ModelSpec, name: str, value: Callable[[Weight], Tensor]) -> Tensor:
    """What the parameter ``name`` holds, if ``value`` returns what each of our weights holds."""
    if name in _ENDS:
        return value(_ENDS[name](m))
    matched = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    assert matched is not None, name
    layer, short = int(matched[1]), _SUFFIXES.sub("", matched[2])
    short = short.replace("moe.routed_experts.inner_experts.", "moe.experts.")
    ours = {weight.name.removeprefix(f"layers.{layer}."): weight for weight in kind_weights.block(m, layer)}
    parts = [value(ours[one]) for one in _PARTS[short]]
    listed = layers_of(m)
    mixer = listed.kinds[listed.order[layer]].mixer
    if isinstance(mixer, LatentAttention):
        (found,) = parts
        heads = 1 if short == "attention.wkv_a.weight" else mixer.heads
        return last_in_pairs(found, heads, mixer.rope_dim) if short in _LATENT_ROTATED else found
    assert isinstance(mixer, Attention)
    if short.startswith("attention.qkv_linear"):  # rows of one group of heads beside each other
        return torch.cat([part.unflatten(0, (mixer.kv_heads, -1)) for part in parts], 1).flatten(0, 1)
    if len(parts) == 2:  # gates and values of an expert in turn
        parts = [torch.stack(parts, 2).flatten(1, 2)]
    (found,) = parts
    if short.endswith(("mlp1_bias", "mlp2_bias")):  # columns in ours
        return found.squeeze(2)
    if kinds_family(m) == "llama4" and short in ("attention.wq.weight", "attention.wk.weight"):
        # Its Llama 4 rotates neighbouring elements of a head, and we rotate the halves. Without positions the order of
        # a head's elements counts for nothing.
        return found.unflatten(0, (-1, 2, mixer.head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return found
