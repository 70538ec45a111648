"""torchtitan 0.3's Qwen3 with experts and its DeepSeek-V3 in our shape, of the parts of its own flavors.

Its layers take experts or a dense MLP each, so that dense layers may come first, and experts with sigmoid scores, a
factor of the weights and shared experts go with either kind of attention. Latent attention is DeepSeek-V3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.deepseek_v3 import make_mla_attention_config
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3

from workloads.spec import weights
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, MoESpec

_INIT: Mapping[str, Any] = {"weight": skip_param_init}
_EXPERTS: Mapping[str, Any] = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)


def parts(e: Experiment) -> tuple[Any, list[Any], Any]:
    """(class of the model, configurations of all layers, function that makes it parallel)."""
    m = e.model
    block, model, parallelize = (
        (Qwen3TransformerBlock, Qwen3Model, parallelize_qwen3)
        if m.mla is None
        else (DeepSeekV3TransformerBlock, DeepSeekV3Model, parallelize_deepseekv3)
    )
    layers = [
        block.Config(
            attention_norm=_norm(m, m.hidden_size),
            ffn_norm=_norm(m, m.hidden_size),
            attention=_grouped(e) if m.mla is None else _latent(e),
            **_feed_forward(m, layer),
        )
        for layer in range(m.num_layers)
    ]
    return model, layers, parallelize


def _norm(m: ModelSpec, size: int) -> Any:
    return RMSNorm.Config(normalized_shape=size, eps=m.norm_eps, param_init=_INIT)


def _grouped(e: Experiment) -> Any:
    m = e.model
    return make_gqa_config(
        dim=m.hidden_size,
        n_heads=m.num_heads,
        n_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        wqkv_param_init=dict(_INIT),
        wo_param_init=dict(_INIT),
        inner_attention=get_attention_config("flex"),
        fuse_qkv=True,
        qk_norm=_norm(m, m.head_dim) if m.qk_norm else None,
        rope=CosSinRoPE.Config(dim=m.head_dim, max_seq_len=e.seq_len, theta=m.rope_theta),
    )


def _latent(e: Experiment) -> Any:
    m, mla = e.model, e.model.mla
    assert mla is not None
    made = make_mla_attention_config(
        layer_id=0,  # for initial values alone, which are ours
        dim=m.hidden_size,
        n_heads=m.num_heads,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        attn_backend="flex",
        linear_init=dict(_INIT),
        norm_init=dict(_INIT),
        depth_init=lambda _: dict(_INIT),
        rope=ComplexRoPE.Config(dim=mla.qk_rope_head_dim, max_seq_len=e.seq_len, theta=m.rope_theta),
    )
    made.q_norm, made.kv_norm = _norm(m, mla.q_lora_rank or 1), _norm(m, mla.kv_lora_rank)
    return made


def _feed_forward(m: ModelSpec, layer: int) -> dict[str, Any]:
    if m.moe is not None and weights.routed(m, layer):
        return {"moe": _experts(m.hidden_size, m.moe)}
    return {"feed_forward": _dense(m.hidden_size, m.ffn_hidden_size)}


def _dense(hidden: int, width: int) -> Any:
    return make_ffn_config(dim=hidden, hidden_dim=width, w1_param_init=dict(_INIT), w2w3_param_init=dict(_INIT))


def _experts(hidden: int, moe: MoESpec) -> Any:
    return make_moe_config(
        num_experts=moe.num_experts,
        load_balance_coeff=None,
        router=make_router_config(
            dim=hidden,
            num_experts=moe.num_experts,
            gate_param_init=dict(_INIT),
            top_k=moe.experts_per_token,
            score_func=moe.gate,
            route_norm=moe.normalize_weights,
            route_scale=moe.weight_scale,
        ),
        routed_experts=make_routed_experts_config(
            dim=hidden,
            hidden_dim=moe.expert_hidden_size,
            num_experts=moe.num_experts,
            top_k=moe.experts_per_token,
            param_init=dict(_EXPERTS),
            comm_backend="standard",
        ),
        shared_experts=_dense(hidden, moe.num_shared_experts * moe.expert_hidden_size)
        if moe.num_shared_experts
        else None,
    )
