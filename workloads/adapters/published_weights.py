"""Our weights in the parameters of transformers' classes: which weights a parameter holds, and in what order.

One name for each part of a layer in any family, because families agree where they have the same part. What differs is
in `_TRANSPOSED`, `_PAIRS` and `_SHIFTED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workloads.spec import kind_weights, weights
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight

_TRANSPOSED = ("gpt_oss", "llama4_text")
"""Families whose experts multiply from the right: weights are (experts, inputs, outputs)."""
_PAIRS = ("llama4_text", "ernie4_5", "ernie4_5_moe", "helium")
"""Families that rotate neighbouring columns of a head; ours rotate columns half a head apart."""
_LATENT_PAIRS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu")
"""The same of the rotated columns of latent attention, the last ones of a query and of the key that heads share."""
_SHIFTED = ("gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose norms multiply by one plus their weight, except those of recurrent heads."""
_ENDS = {
    **dict.fromkeys(("model.embed_tokens.weight", "model.embeddings.weight"), weights.embedding),
    **dict.fromkeys(("model.norm.weight", "model.norm_f.weight"), weights.final_norm),
    "lm_head.weight": weights.head,
}
_NORMS = {
    "input_layernorm": ("attention_norm",),
    "pre_feedforward_layernorm": ("ffn_norm",),
    # In families with a norm of the attention's output it is that one.
    "post_attention_layernorm": ("attention_out_norm", "ffn_norm"),
    "post_feedforward_layernorm": ("ffn_out_norm",),
    "post_feedforward_layernorm_1": ("shared_out_norm",),
    "post_feedforward_layernorm_2": ("experts_out_norm",),
    "pre_feedforward_layernorm_2": ("experts_norm",),
    "norm": ("attention_norm", "ffn_norm"),
    "q_norm": ("attention.q_norm", "attention.q_whole_norm"),
    "k_norm": ("attention.k_norm", "attention.k_whole_norm"),
    "q_a_layernorm": ("attention.q_norm",),
    "kv_a_layernorm": ("attention.kv_norm",),
}
"""By the end of a norm's name: ours, of which a layer has one."""
_PLAIN = {
    **{f"{one}_proj.weight": (f"attention.{one}",) for one in "qkvo"},
    **{f"{one}_proj.bias": (f"attention.{one}_bias",) for one in "qkvo"},
    "sinks": ("attention.sinks",),
    # latent attention
    "q_a_proj.weight": ("attention.q_down",),
    "q_b_proj.weight": ("attention.q_up",),
    "kv_a_proj_with_mqa.weight": ("attention.kv_down",),
    "kv_b_proj.weight": ("attention.kv_up",),
    **dict.fromkeys(
        ("router.weight", "mlp.gate.weight", "mixer.gate.weight", "router.proj.weight"), ("experts.router",)
    ),
    "router.bias": ("experts.router_bias",),
    "router.scale": ("experts.router_norm",),
    "router.per_expert_scale": ("experts.router_scales",),
    "shared_expert_gate.weight": ("shared.scale",),
    # the gated delta rule
    "in_proj_qkv.weight": ("attention.q", "attention.k", "attention.v"),
    "in_proj_z.weight": ("attention.gate",),
    "in_proj_b.weight": ("attention.rate",),
    "in_proj_a.weight": ("attention.decay",),
    "linear_attn.dt_bias": ("attention.decay_bias",),
    "linear_attn.A_log": ("attention.log_rate",),
    "linear_attn.norm.weight": ("attention.norm",),
    "linear_attn.conv1d.weight": ("attention.q_kernel", "attention.k_kernel", "attention.v_kernel"),
    # KDA
    "f_a_proj.weight": ("attention.decay_down",),
    "f_b_proj.weight": ("attention.decay_up",),
    "b_proj.weight": ("attention.rate",),
    "g_a_proj.weight": ("attention.gate_down",),
    "g_b_proj.weight": ("attention.gate_up",),
    # Mamba-2
    "mixer.in_proj.weight": tuple(f"attention.{one}" for one in ("z", "x", "b", "c", "steps")),
    "mixer.dt_bias": ("attention.step_bias",),
    "mixer.A_log": ("attention.decay",),
    "mixer.D": ("attention.skip",),
    "mixer.norm.weight": ("attention.norm",),
    "mixer.conv1d.weight": tuple(f"attention.{one}_kernel" for one in "xbc"),
    "mixer.conv1d.bias": tuple(f"attention.{one}_kernel_bias" for one in "xbc"),
    "out_proj.weight": ("attention.out",),
}
"""By the end of a parameter's name: our weights, one below the other."""
_ROTATED = tuple(f"self_attn.{name}.weight" for name in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"))
"""Parameters of latent attention that end with rotated columns, of each head or of the one key."""
_EXPERTS = {
    "gate_up_proj": ("experts.gate", "experts.up"),
    "gate_up_proj_bias": ("experts.gate_bias", "experts.up_bias"),
    "up_proj": ("experts.up",),
    "down_proj": ("experts.down",),
    "down_proj_bias": ("experts.down_bias",),
}
"""By the name in ``experts``: our weights, below each other in every expert."""


def value_of(
    kind: str, m: ModelSpec, name: str, value: Callable[[Weight], Tensor], *, gradients: bool = False
) -> Tensor:
    """What the parameter ``name`` of the class for ``model_type`` ``kind`` holds, if ``value`` returns what each of our
    weights holds: values, or ``gradients``, which have no constants."""
    shift = 1.0 if kind in _SHIFTED and not gradients else 0.0
    if name in _ENDS:
        found = value(_ENDS[name](m))
        return found - shift if found.dim() == 1 else found
    matched = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    assert matched is not None, name
    layer, short = int(matched[1]), matched[2]
    prefix = f"layers.{layer}."
    ours = {weight.name.removeprefix(prefix): weight for weight in kind_weights.block(m, layer)}
    before, _, end = short.removesuffix(".weight").rpartition(".")
    part = before.rpartition(".")[2]
    if part == "experts":
        return _experts(kind, [value(ours[one]) for one in _EXPERTS[end]])
    if end in _NORMS and part not in ("linear_attn", "mixer"):
        return value(next(ours[one] for one in _NORMS[end] if one in ours)) - shift
    if (dense := _dense(short, ours)) is not None:
        return value(dense)
    names = next(names for last, names in _PLAIN.items() if f".{short}".endswith(f".{last}"))
    return _joined(kind, m, layer, short, ours, [value(ours[one]) for one in names], value)


def _dense(short: str, ours: Mapping[str, Weight]) -> Weight | None:
    """The weight of a dense MLP or of a shared expert."""
    found = re.search(r"(shared_experts?\.|(?:mlp|feed_forward|mixer)\.)(gate|up|down)_proj\.weight$", short)
    if found is None:
        return None
    shared = found[1].startswith("shared") or "shared.up" in ours
    return ours[f"{'shared' if shared else 'ffn'}.{found[2]}"]


def _experts(kind: str, parts: list[Tensor]) -> Tensor:
    """One parameter of all experts. gpt-oss has gates and values in turn, others all gates first."""
    in_turn = kind == "gpt_oss" and len(parts) == 2
    joined = torch.stack(parts, 2).flatten(1, 2) if in_turn else torch.cat(parts, 1)
    if joined.shape[2] == 1:  # biases, which are columns here
        return joined.squeeze(2)
    return joined.transpose(1, 2) if kind in _TRANSPOSED else joined


def _joined(
    kind: str,
    m: ModelSpec,
    layer: int,
    short: str,
    ours: Mapping[str, Weight],
    parts: list[Tensor],
    value: Callable[[Weight], Tensor],
) -> Tensor:
    joined = torch.cat(parts)
    mixer = None if m.layers is None else m.layers.kinds[m.layers.order[layer]].mixer
    if "conv1d.weight" in short:
        return joined.unsqueeze(1)
    if short == "self_attn.q_proj.weight" and "attention.gate" in ours and isinstance(mixer, Attention):
        # Queries of a head, then its gates.
        both = (joined, value(ours["attention.gate"]))
        return torch.cat([one.unflatten(0, (mixer.heads, -1)) for one in both], 1).flatten(0, 1)
    if kind in _LATENT_PAIRS and short in _ROTATED:
        assert m.mla is not None
        heads = 1 if short == "self_attn.kv_a_proj_with_mqa.weight" else m.num_heads
        return last_in_pairs(joined, heads, m.mla.qk_rope_head_dim)
    if kind in _PAIRS and short in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        size = mixer.head_dim if isinstance(mixer, Attention) else m.head_dim
        return joined.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
    return joined


def last_in_pairs(rows: Tensor, heads: int, rotated: int) -> Tensor:
    """The rows of ``heads`` heads, of which the last ``rotated`` of each come as neighbouring pairs instead of
    halves."""
    plain, turned = rows.unflatten(0, (heads, -1)).split([rows.shape[0] // heads - rotated, rotated], 1)
    return torch.cat([plain, turned.unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)], 1).flatten(0, 1)
