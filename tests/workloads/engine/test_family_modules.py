"""The engine computes the losses and gradients of transformers' classes of families that it runs by kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.workloads.engine import test_published_modules as published
from workloads.adapters.published_weights import value_of
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight

pytestmark = pytest.mark.slow

_HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_WHOLE = {"rope_type": "default", "rope_theta": 500_000.0}
_DENSE: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "rope_parameters": _WHOLE,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_ROUTED: dict[str, Any] = {**_DENSE, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OF_DEEPSEEK: dict[str, Any] = {
    **_ROUTED,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
# Without factors of residuals, embeddings and logits, which the engine lacks.
_GRANITE: dict[str, Any] = {**_DENSE, "attention_multiplier": 0.3}
_GRANITE_EXPERTS = {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 4,
}
SIZES: Mapping[str, dict[str, Any]] = {
    "bamba": {**_DENSE, **_MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1], "rope_parameters": _HALF},
    "cwm": {**_DENSE, **_WINDOWS, "bos_token_id": 1, "eos_token_id": 1},
    "ernie4_5": _DENSE,
    "ernie4_5_moe": {
        **_DENSE,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_end_index": 1,
    },
    "exaone4": {**_DENSE, **_WINDOWS},
    "exaone_moe": {**_ROUTED, **_WINDOWS, "num_experts": 8, "first_k_dense_replace": 1, "num_shared_experts": 2},
    "glm": {**_DENSE, "attention_bias": True, "rope_parameters": _HALF},
    "glm4": {**_DENSE, "attention_bias": True, "rope_parameters": _HALF},
    "glm4_moe_lite": {**_OF_DEEPSEEK, **_LATENT},
    "granite": _GRANITE,
    "granite_swa": {**_GRANITE, **_WINDOWS, "layer_rope_theta": [1e4, 5e5], "tie_word_embeddings": False},
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoehybrid": {
        **_GRANITE_EXPERTS,
        **_MAMBA,
        **_RECURRENT,
        "mamba_n_groups": 1,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 20,
    },
    "helium": _DENSE,
    "hy_v3": {**_ROUTED, "num_experts": 8, "num_shared_experts": 1, "attention_bias": True},
    "internlm3": _DENSE,
    "kimi_linear": {
        **_LATENT,
        **_RECURRENT,
        "q_lora_rank": None,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
        "num_shared_experts": 1,
        "linear_head_dim": 6,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.5,
        "linear_conv_kernel_dim": 4,
    },
    "mellum": {
        **_ROUTED,
        **_WINDOWS,
        "num_local_experts": 8,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {
            "full_attention": _WHOLE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "olmo_hybrid": {
        **_DENSE,
        **_RECURRENT,
        "rms_norm_eps": 1e-5,  # that of the norm of recurrent heads, which is fixed
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": False,
    },
    "sarvam_mla": {**_OF_DEEPSEEK, **_LATENT, "q_lora_rank": None},
    "sarvam_moe": _OF_DEEPSEEK,
    "solar_open": {name: size for name, size in _OF_DEEPSEEK.items() if name != "intermediate_size"},
    "vaultgemma": {
        **_DENSE,
        **_WINDOWS,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 0.4,
    },
    "youtu": {**_DENSE, **_LATENT},
}
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "bamba": {
        "pre_ff_layernorm": "pre_feedforward_layernorm",
        "model.final_layernorm": "model.norm",
        ".mamba.": ".mixer.",
    },
    "glm4": {
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    "granitemoehybrid": {".mamba.": ".mixer.", "shared_mlp.output_linear": "mlp.down_proj"},
    "kimi_linear": {  # its first layer is KDA
        "layers.0.self_attn.o_proj": "layers.0.linear_attn.out_proj",
        "self_attn.o_norm": "linear_attn.norm",
        "self_attn.conv1d": "linear_attn.conv1d",
        "self_attn.forget_gate": "linear_attn",
    },
    "olmo_hybrid": {
        "linear_attn.o_proj": "linear_attn.out_proj",
        "a_proj": "in_proj_a",
        "b_proj": "in_proj_b",
        "g_proj": "in_proj_z",
        "o_norm": "norm",
    },
}
"""Names of parts as `published_weights` knows them, of families that no adapter runs."""
_FUSED = {"mlp.gate_up_proj": "mlp.{}_proj", "shared_mlp.input_linear": "mlp.{}_proj"}
"""Gates and values of an MLP in one product."""


def renamed_value(
    kind: str, m: ModelSpec, name: str, value: Callable[[Weight], Tensor], *, gradients: bool = False
) -> Tensor:
    """As `value_of`, of families with other names, and of GLM, which rotates neighbours in half of each head."""
    known = next((name.replace(own, ours) for own, ours in _RENAMED.get(kind, {}).items() if own in name), name)
    for fused, part in _FUSED.items():
        if fused in known and "experts" not in known:
            both = (known.replace(fused, part.format(one)) for one in ("gate", "up"))
            return torch.cat([value_of(kind, m, one, value, gradients=gradients) for one in both])
    held = value_of(kind, m, known, value, gradients=gradients)
    if kind == "kimi_linear" and name.endswith("A_log"):
        return held.view(1, 1, -1, 1)
    if kind in ("glm", "glm4") and ("q_proj" in known or "k_proj" in known):
        turned, plain = held.unflatten(0, (-1, published.COMMON["head_dim"])).chunk(2, 1)
        turned = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([turned, plain], 1).flatten(0, 1)
    return held


def without_constants(module: nn.Module) -> nn.Module:
    """The module with buffers in place of parameters that take no gradient: biases of the choice of experts."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(part, name)
                part.register_buffer(name, parameter.data)
    return module


@pytest.mark.parametrize("kind", SIZES)
def test_losses_and_gradients_are_those_of_the_class(
    gloo_pool: Pool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = published.published_module
    monkeypatch.setattr(published, "published_module", lambda *given: without_constants(usual(*given)))
    published.check_losses_and_gradients(gloo_pool, kind, SIZES[kind], renamed_value)
