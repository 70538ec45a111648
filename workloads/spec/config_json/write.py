"""A model's layers as the config.json of a family of transformers that computes them.

Every writer makes a candidate of the sizes that it finds. A candidate counts only if its reader (`families.FAMILIES`)
makes the same model of it, so a writer may take what it does not understand for granted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from workloads.spec.config_json.read import layers_from_config
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, LatentAttention, Rope
from workloads.spec.layer_kinds.layer_list import LayerList
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, Mamba2
from workloads.spec.layer_kinds.spans import Chunk, Full, Window
from workloads.spec.model_spec import ModelSpec, layers_of

Config = dict[str, Any]


class Parts:
    """The first part of each kind in a model's layers."""

    def __init__(self, model: ModelSpec) -> None:
        listed = layers_of(model)
        self.model = model
        self.layers: list[Layer] = [listed.kinds[at] for at in listed.order]
        self.listed = listed
        mixers, mlps = [layer.mixer for layer in self.layers], [layer.mlp for layer in self.layers]
        self.attention = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
        self.latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
        self.delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaRule)), None)
        self.mamba = next((mixer for mixer in mixers if isinstance(mixer, Mamba2)), None)
        self.dense = next((mlp for mlp in mlps if isinstance(mlp, DenseMLP)), None)
        self.routed = next((mlp for mlp in mlps if isinstance(mlp, RoutedMLP)), None)

    def rope(self, span: type[Window | Full | Chunk] | None = None) -> Config:
        """``rope_parameters`` of the first layer of attention with positions, or of the first with a span."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        ropes = [m.rope for m in mixers if m.rope is not None and (span is None or isinstance(m.span, span))]
        return _rope(ropes[0]) if ropes else {"rope_type": "default", "rope_theta": 10_000.0}

    def spans(self) -> Config:
        """``layer_types`` and the window."""
        windows = [isinstance(getattr(layer.mixer, "span", None), Window) for layer in self.layers]
        sizes = [
            m.span.size
            for layer in self.layers
            if isinstance(m := layer.mixer, Attention) and isinstance(m.span, Window)
        ]
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        return {"layer_types": kinds, "sliding_window": sizes[0] if sizes else None}

    def rotated(self) -> list[int]:
        """``no_rope_layers``: 1 for layers with positions, in spite of the name."""
        return [int(isinstance(layer.mixer, Attention) and layer.mixer.rope is not None) for layer in self.layers]


def _rope(rope: Rope) -> Config:
    scaling = json.loads(rope.scaling) if rope.scaling else {"rope_type": "default"}
    kind = {"rope_type": "proportional"} if rope.proportional else {}
    share = {"partial_rotary_factor": rope.rotated} if rope.rotated != 1.0 else {}
    return {**scaling, **kind, "rope_theta": rope.theta, **share}


def _common(parts: Parts) -> Config:
    model, attention = parts.model, parts.attention
    assert attention is not None
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": len(parts.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _experts(routed: RoutedMLP) -> Config:
    return {"num_experts_per_tok": routed.chosen, "router_aux_loss_coef": routed.balance_loss}


def _of_deepseek(routed: RoutedMLP) -> Config:
    """Names of experts that DeepSeek's files have begun."""
    return {
        "num_experts_per_tok": routed.chosen,
        "n_routed_experts": routed.experts,
        "moe_intermediate_size": routed.expert.width,
        "n_shared_experts": routed.shared_experts,
        "norm_topk_prob": routed.normalize,
        "routed_scaling_factor": routed.scale,
        "n_group": routed.groups,
        "topk_group": routed.groups,
    }


def _gpt_oss(parts: Parts) -> Config:
    routed, attention = parts.routed, parts.attention
    assert routed is not None and attention is not None
    return {
        **_common(parts),
        **parts.spans(),
        **_experts(routed),
        "attention_bias": attention.bias,
        "num_local_experts": routed.experts,
        "intermediate_size": routed.expert.width,
        "swiglu_limit": routed.expert.limit,
        "rope_parameters": parts.rope(),
    }


def _qwen3_5(parts: Parts) -> Config:
    delta = parts.delta
    assert delta is not None
    kinds = ["linear_attention" if layer.mixer == delta else "full_attention" for layer in parts.layers]
    return {
        **_common(parts),
        "layer_types": kinds,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.kernel,
        "rope_parameters": parts.rope(),
    }


def _qwen3_5_dense(parts: Parts) -> Config:
    assert parts.dense is not None
    return {**_qwen3_5(parts), "intermediate_size": parts.dense.width}


def _qwen3_5_routed(parts: Parts) -> Config:
    routed = parts.routed
    assert routed is not None and routed.shared is not None
    return {
        **_qwen3_5(parts),
        **_experts(routed),
        "num_experts": routed.experts,
        "moe_intermediate_size": routed.expert.width,
        "shared_expert_intermediate_size": routed.shared.width,
    }


def _nemotron_h(parts: Parts) -> Config:
    mamba, routed, dense = parts.mamba, parts.routed, parts.dense
    assert mamba is not None
    letters = "".join(
        ("E" if isinstance(layer.mlp, RoutedMLP) else "-") if layer.mlp else "M" if layer.mixer == mamba else "*"
        for layer in parts.layers
    )
    config = {
        **_common(parts),
        "hybrid_override_pattern": letters,
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "ssm_state_size": mamba.state,
        "conv_kernel": mamba.kernel,
        "use_bias": mamba.bias,
        "use_conv_bias": mamba.convolution_bias,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": parts.model.norm_eps,
    }
    del config["rms_norm_eps"], config["num_hidden_layers"]
    if dense is not None:
        config |= {"intermediate_size": dense.width}
    if routed is not None:
        width = routed.shared.width // routed.shared_experts if routed.shared is not None else 0
        config |= {**_of_deepseek(routed), "moe_shared_expert_intermediate_size": width or routed.expert.width}
        config |= {"moe_latent_size": routed.latent} if routed.latent else {}
    return config


def _llama4(parts: Parts) -> Config:
    routed, attention = parts.routed, parts.attention
    assert routed is not None and attention is not None
    chunks = [
        m.span.size for layer in parts.layers if isinstance(m := layer.mixer, Attention) and isinstance(m.span, Chunk)
    ]
    first = next(at for at, layer in enumerate(parts.layers) if layer.routed)
    return {
        **_common(parts),
        **_experts(routed),
        "num_local_experts": routed.experts,
        "intermediate_size": routed.expert.width,
        "intermediate_size_mlp": parts.dense.width if parts.dense is not None else routed.expert.width,
        "interleave_moe_layer_step": first + 1,
        "attention_chunk_size": chunks[0] if chunks else None,
        "attn_temperature_tuning": False,
        "no_rope_layers": parts.rotated(),
        "use_qk_norm": attention.norm == "without_weight",
        "rope_parameters": parts.rope(),
    }


def _minimax_m2(parts: Parts) -> Config:
    routed, attention = parts.routed, parts.attention
    assert routed is not None and attention is not None
    share = attention.rope.rotated if attention.rope is not None else 1.0
    return {
        **_common(parts),
        "num_experts_per_tok": routed.chosen,
        "num_local_experts": routed.experts,
        "intermediate_size": routed.expert.width,
        "rotary_dim": round(share * attention.head_dim),
        "rope_parameters": parts.rope(),
    }


def _glm4_moe(parts: Parts) -> Config:
    routed, attention = parts.routed, parts.attention
    assert routed is not None and routed.shared is not None and attention is not None
    return {
        **_common(parts),
        **_of_deepseek(routed),
        **_method(routed),
        "intermediate_size": parts.dense.width if parts.dense is not None else routed.expert.width,
        "first_k_dense_replace": sum(not layer.routed for layer in parts.layers),
        "use_qk_norm": attention.norm == "head",
        "attention_bias": attention.bias,
        # The class rotates a half where the file does not say.
        "rope_parameters": {"partial_rotary_factor": 1.0, **parts.rope()},
    }


def _method(routed: RoutedMLP) -> Config:
    """The names of DeepSeek for what balances experts. Its classes with sigmoid scores have the biases in any case;
    they stay 0 where nothing moves them."""
    if routed.correction:
        return {}
    return {"topk_method": "greedy", "router_aux_loss_coef": routed.balance_loss}


def _deepseek(parts: Parts) -> Config:
    """Latent attention, and experts beside shared ones after dense layers. Without experts all layers are dense, and
    the sizes of experts have no effect."""
    latent, routed, dense, model = parts.latent, parts.routed, parts.dense, parts.model
    assert latent is not None and latent.rope is not None and (routed is None or routed.shared is not None)
    config = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": len(parts.layers),
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": latent.bias,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": _rope(latent.rope),
        "first_k_dense_replace": sum(not layer.routed for layer in parts.layers),
        "intermediate_size": dense.width if dense is not None else 1,
    }
    if routed is None:
        return {**config, "num_experts_per_tok": 1, "n_routed_experts": 2, "moe_intermediate_size": 1}
    return {**config, **_of_deepseek(routed)}


def _deepseek_v3(parts: Parts) -> Config:
    return {**_deepseek(parts), **({} if parts.routed is None else _method(parts.routed))}


def _deepseek_v2(parts: Parts) -> Config:
    """Scores by softmax, which are not divided by their sum."""
    routed = parts.routed
    assert routed is not None and not routed.normalize
    return {**_deepseek(parts), "topk_method": "greedy", "router_aux_loss_coef": routed.balance_loss}


def _dense(parts: Parts) -> Config:
    assert parts.dense is not None
    return {**_common(parts), "intermediate_size": parts.dense.width, "rope_parameters": parts.rope()}


def _smollm3(parts: Parts) -> Config:
    return {**_dense(parts), "no_rope_layers": parts.rotated()}


def _gemma(parts: Parts) -> Config:
    assert parts.dense is not None and parts.attention is not None
    scale = parts.attention.score_scale
    return {
        **_common(parts),
        **parts.spans(),
        "intermediate_size": parts.dense.width,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2) if scale else parts.attention.head_dim,
        "final_logit_softcapping": parts.listed.logit_cap or None,
    }


def _gemma2(parts: Parts) -> Config:
    return {**_gemma(parts), "attn_logit_softcapping": 50.0, "rope_parameters": parts.rope()}


def _gemma3(parts: Parts) -> Config:
    return {**_gemma(parts), "rope_parameters": _by_span(parts)}


def _by_span(parts: Parts) -> Config:
    return {"full_attention": parts.rope(Full), "sliding_attention": parts.rope(Window)}


def _gemma4(parts: Parts) -> Config:
    routed = parts.routed
    dense = parts.dense if routed is None else routed.shared
    mixers = [layer.mixer for layer in parts.layers if isinstance(layer.mixer, Attention)]
    full = next(mixer for mixer in mixers if isinstance(mixer.span, Full))
    sliding = next(mixer for mixer in mixers if isinstance(mixer.span, Window))
    assert dense is not None
    config = {
        **_common(parts),
        **parts.spans(),
        "head_dim": sliding.head_dim,
        "num_key_value_heads": sliding.kv_heads,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "attention_k_eq_v": full.shared_kv,
        "intermediate_size": dense.width,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": parts.listed.logit_cap or None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": routed is not None,
        "rope_parameters": _by_span(parts),
    }
    if routed is not None:
        config |= {"num_experts": routed.experts, "top_k_experts": routed.chosen}
        config |= {"moe_intermediate_size": routed.expert.width}
    return config


WRITERS: Mapping[str, Callable[[Parts], Config]] = {
    "gpt_oss": _gpt_oss,
    "qwen3_5_moe_text": _qwen3_5_routed,
    "qwen3_5_text": _qwen3_5_dense,
    "nemotron_h": _nemotron_h,
    "llama4_text": _llama4,
    "gemma4_text": _gemma4,
    "gemma3_text": _gemma3,
    "gemma2": _gemma2,
    "olmo2": _dense,
    "olmo3": lambda parts: {**_dense(parts), **parts.spans()},
    "smollm3": _smollm3,
    "minimax_m2": _minimax_m2,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
}
"""By ``model_type``. Llama, Qwen3 and their mixtures are written elsewhere
(`workloads.rules.transformers_kinds`)."""


@lru_cache(maxsize=64)
def _written(model: ModelSpec) -> str | None:
    parts = Parts(model)
    for kind, write in WRITERS.items():
        try:
            config = {"model_type": kind, **write(parts)}
            read = layers_from_config(model.name, config)
        except (AssertionError, InvalidExperiment, StopIteration):
            continue  # it lacks a part, or has a size that the family has not
        same = LayerList.of(read) == parts.listed
        ends = read.hidden_size, read.vocab_size, read.tie_embeddings, read.norm_eps
        if same and ends == (model.hidden_size, model.vocab_size, model.tie_embeddings, model.norm_eps):
            return json.dumps(config)
    return None


def config_of(model: ModelSpec) -> Config | None:
    """The fields of a config.json, ``model_type`` included, of a family of transformers that has exactly the model's
    layers; None if there is none here. Modules of multi-token prediction are in no family's class."""
    text = _written(model)
    return None if text is None else json.loads(text)
