"""Readers of families of models with latent, sparse or compressed attention: DeepSeek, Kimi, GLM."""

from __future__ import annotations

import dataclasses
from typing import Any

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    latent,
    layer_count,
    rope,
    routed,
    routed_from,
    router,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import CompressedAttention, Indexer
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import HyperConnections, Layer, LayeredModel
from workloads.spec.layer_kinds.recurrent import KimiDelta


def read_deepseek(fields: Fields, model_type: str) -> LayeredModel:
    """DeepSeek-V2 and V3, Kimi K2, and with an indexer DeepSeek-V3.2 and GLM-5."""
    count, act = layer_count(fields), activation(fields)
    v2 = model_type == "deepseek_v2"
    options = router(fields, score="softmax" if v2 else "sigmoid", normalize=not v2, correction=not v2)
    experts = routed(
        fields,
        experts=fields.count("n_routed_experts"),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=options,
        shared=fields.count("n_shared_experts", 0, least=0),
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    if fields.given("mlp_layer_types"):
        routes = [kind == "sparse" for kind in fields.listing("mlp_layer_types", count)]
        fields.ignore("first_k_dense_replace", "moe_layer_freq")
    else:
        routes = routed_from(fields, count, fields.count("first_k_dense_replace", 0, least=0))
    indexer = _indexer(fields) if model_type in ("deepseek_v32", "glm_moe_dsa") else None
    owners = _owners(fields, count) if indexer is not None else [True] * count
    positions = rope(fields)
    layers = [
        Layer(
            mixer=latent(fields, positions=positions, indexer=indexer, owns_indexer=owns),
            mlp=experts if route else dense,
        )
        for owns, route in zip(owners, routes, strict=True)
    ]
    return assemble(fields, layers)


def _indexer(fields: Fields) -> Indexer:
    fields.ignore("indexer_rope_interleave")
    return Indexer(
        heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        chosen=fields.count("index_topk"),
    )


def _owners(fields: Fields, count: int) -> list[bool]:
    """Which layers have an indexer of their own: all, those marked full in ``indexer_types``, or one in
    ``index_topk_freq`` (GLM-5.2)."""
    fields.ignore("index_share_for_mtp_iteration")
    step, offset = fields.count("index_topk_freq", 1), fields.count("index_skip_topk_offset", 2, least=0)
    if not fields.given("indexer_types"):
        return [max(at - offset + 1, 0) % step == 0 for at in range(count)]
    kinds = fields.listing("indexer_types", count)
    if set(kinds) - {"full", "shared"}:
        raise InvalidExperiment(f"{fields.label}: indexer_types may hold full and shared")
    return [kind == "full" for kind in kinds]


_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def read_deepseek_v4(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields)
    fields.choice("num_key_value_heads", (1,), 1)
    fields.choice("attention_bias", (False,), False)
    fields.ignore("hc_eps", "hc_sinkhorn_iters", "swiglu_limit", "compress_rope_theta")
    experts = routed(
        fields,
        experts=fields.count("n_routed_experts"),
        width=fields.count("moe_intermediate_size"),
        act="clamped_silu" if fields.given("swiglu_limit") else act,
        options=router(fields, score="sqrtsoftplus", correction=True),
        shared=fields.count("n_shared_experts", 1, least=0),
    )
    rope(fields)
    ratios = fields.listing("compress_ratios", count, at_least=True)
    indexer = _indexer(fields)
    hashed = fields.count("num_hash_layers", 3, least=0)
    looked_up = dataclasses.replace(experts, hashed=True, correction=False)
    layers = []
    for at, ratio in enumerate(ratios):
        if ratio not in _RATIOS:
            raise InvalidExperiment(f"{fields.label}: compress_ratios has {ratio!r}; it may hold 0, 4 and 128")
        attention = CompressedAttention(
            heads=fields.count("num_attention_heads"),
            head_dim=fields.count("head_dim"),
            q_rank=fields.count("q_lora_rank"),
            output_groups=fields.count("o_groups"),
            output_rank=fields.count("o_lora_rank"),
            window=fields.count("sliding_window"),
            ratio=ratio,
            rope_dim=fields.count("qk_rope_head_dim"),
            indexer=indexer if ratio == 4 else None,
        )
        layers.append(Layer(mixer=attention, mlp=looked_up if at < hashed else experts))
    return assemble(fields, layers, streams=HyperConnections(fields.count("hc_mult")))


def read_kimi_linear(fields: Fields, model_type: str) -> LayeredModel:
    """Kimi Linear and Kimi K3: KDA, and latent attention without positions in some layers."""
    count, act = layer_count(fields), activation(fields)
    fields.choice("mla_use_nope", (True,), True)
    fields.ignore(
        *("activation_situ_beta", "activation_situ_linear_beta", "rope_theta", "rope_scaling", "head_dim"),
        *("first_k_dense_replace", "moe_layer_freq"),
    )
    left_out = []
    if fields.given("attn_res_block_size"):
        fields.ignore("attn_res_block_size")
        left_out.append("residuals across blocks (attn_res_block_size)")
    linear = fields.part("linear_attn_config")
    delta = KimiDelta(
        heads=linear.count("num_heads"),
        head_dim=linear.count("head_dim"),
        kernel=linear.count("short_conv_kernel_size"),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
    )
    attention = latent(fields, positions=None, output_gate=fields.flag("mla_use_output_gate", False))
    full, deltas = linear.value("full_attn_layers"), linear.value("kda_layers")
    if (
        not isinstance(full, list)
        or not isinstance(deltas, list)
        or _once([*full, *deltas]) != set(range(1, count + 1))
    ):
        raise InvalidExperiment(f"{linear.label}: full_attn_layers and kda_layers must name each layer once, from 1 on")
    linear.ignore("gate_lower_bound")
    linear.refuse_unread()
    score = fields.choice("moe_router_activation_func", ("sigmoid", "softmax"), "sigmoid")
    options = router(fields, score=score, normalize=fields.flag("moe_renormalize", True), correction=True)
    narrow = fields.count("routed_expert_hidden_size", 0, least=0)
    experts = routed(
        fields,
        experts=fields.count("num_experts"),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=options,
        shared=fields.count("num_shared_experts", 0, least=0),
        latent=narrow,
        latent_norm=fields.flag("latent_moe_use_norm", False) and narrow > 0,
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    routes = routed_from(fields, count, fields.count("first_k_dense_replace", 0, least=0))
    layers = [
        Layer(mixer=attention if at + 1 in full else delta, mlp=experts if routes[at] else dense) for at in range(count)
    ]
    return assemble(fields, layers, left_out=tuple(left_out))


def _once(numbers: list[Any]) -> set[int] | None:
    """The numbers of a list that has only whole numbers, each once; None for any other list."""
    distinct = {number for number in numbers if isinstance(number, int)}
    return distinct if len(distinct) == len(numbers) else None
