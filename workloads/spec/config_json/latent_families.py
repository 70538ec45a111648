"""Readers of families of models with latent, sparse or compressed attention: DeepSeek, Kimi, GLM."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    expert_count,
    latent,
    layer_count,
    rope,
    routed,
    routed_from,
    router,
    shared_count,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import CompressedAttention, Indexer
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import HyperConnections, Layer, LayeredModel
from workloads.spec.layer_kinds.recurrent import KimiDelta

_SCALES = {"glm4_moe_lite": 1.8, "sarvam_mla": 2.5}
"""Factor of experts' weights if the file does not say, of families whose first layer alone is dense then."""


def read_deepseek(fields: Fields, model_type: str) -> LayeredModel:
    """DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash and Sarvam, and with an indexer DeepSeek-V3.2 and GLM-5."""
    if model_type in _SCALES:
        fields.assume({"first_k_dense_replace": 1, "routed_scaling_factor": _SCALES[model_type]})
    count, act = layer_count(fields), activation(fields)
    v2 = model_type == "deepseek_v2"
    options = router(fields, score="softmax" if v2 else "sigmoid", normalize=not v2, correction=not v2)
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=options,
        shared=shared_count(fields, 0),
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    routes = routed_from(fields, count)
    indexer = _indexer(fields) if model_type in ("deepseek_v32", "glm_moe_dsa") else None
    _same_attention(fields, count, "full_attention" if indexer is None else "indexed_attention")
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


def read_latent_dense(fields: Fields, model_type: str) -> LayeredModel:
    """Youtu-LLM, and MiniCPM3 with factors of embeddings, residuals and logits: latent attention without experts."""
    count, act, hidden = layer_count(fields), activation(fields), fields.count("hidden_size")
    same_cost: tuple[str, ...] = ()
    if model_type == "minicpm3":
        fields.assume({"v_head_dim": hidden // fields.count("num_attention_heads")})
        depth, base = fields.number("scale_depth", 1.4), fields.count("dim_model_base", 256)
        same_cost = (
            f"embeddings multiplied by {fields.number('scale_emb', 12.0):g}",
            f"residuals multiplied by {depth / math.sqrt(count):g}",
            f"logits divided by {hidden / base:g}",
        )
    fields.ignore("embedding_initializer_range")
    attention = latent(fields, positions=rope(fields))
    mlp = DenseMLP(width=fields.count("intermediate_size"), activation=act, bias=fields.flag("mlp_bias", False))
    return assemble(fields, [Layer(mixer=attention, mlp=mlp)] * count, tied=True, same_cost=same_cost)


def _same_attention(fields: Fields, count: int, kind: str) -> None:
    """Raises `InvalidExperiment` if ``layer_types`` (transformers 5) names another kind of attention."""
    if fields.given("layer_types") and set(fields.listing("layer_types", count, at_least=True)) != {kind}:
        raise InvalidExperiment(f"{fields.label}: layer_types may hold only {kind}")


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
    fields.ignore("hc_eps", "hc_sinkhorn_iters", "compress_rope_theta")
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act="clamped_silu" if fields.given("swiglu_limit") else act,
        clamped={"limit": fields.number("swiglu_limit")} if fields.given("swiglu_limit") else None,
        options=router(fields, score="sqrtsoftplus", correction=True),
        shared=fields.count("n_shared_experts", 1, least=0),
    )
    rope(fields)
    ratios = _compress_ratios(fields, count)
    indexer = _indexer(fields)
    by_token = _looked_up(fields, count)
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
        layers.append(Layer(mixer=attention, mlp=looked_up if by_token[at] else experts))
    return assemble(fields, layers, streams=HyperConnections(fields.count("hc_mult")))


def _compress_ratios(fields: Fields, count: int) -> list[Any]:
    """Compression of each layer, from ``compress_ratios``, or from ``layer_types`` and ``compress_rates``
    (transformers 5)."""
    if not fields.given("layer_types"):
        return fields.listing("compress_ratios", count, at_least=True)
    kinds = fields.listing("layer_types", count, at_least=True)
    rates = {"sliding_attention": 0}
    if fields.given("compress_rates"):
        given = fields.part("compress_rates")
        rates |= {kind: given.count(kind) for kind in _RATIOS.values() if given.given(kind)}
        given.refuse_unread()
    else:
        rates |= {kind: ratio for ratio, kind in _RATIOS.items()}
    fields.ignore("compress_ratios")
    return [rates.get(str(kind), kind) for kind in kinds]


def _looked_up(fields: Fields, count: int) -> list[bool]:
    """Which layers look their experts up by the token: those that ``mlp_layer_types`` calls hash_moe (transformers 5),
    or the first ``num_hash_layers``."""
    if not fields.given("mlp_layer_types"):
        hashed = fields.count("num_hash_layers", 3, least=0)
        return [at < hashed for at in range(count)]
    fields.ignore("num_hash_layers")
    kinds = fields.listing("mlp_layer_types", count, at_least=True)
    if set(kinds) - {"hash_moe", "moe"}:
        raise InvalidExperiment(f"{fields.label}: mlp_layer_types may hold hash_moe and moe")
    return [kind == "hash_moe" for kind in kinds]


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
    delta, is_full = _kimi_delta(fields, count)
    attention = latent(fields, positions=None, output_gate=fields.flag("mla_use_output_gate", False))
    score = fields.choice("moe_router_activation_func", ("sigmoid", "softmax"), "sigmoid")
    options = router(
        fields, score=score, normalize=fields.flag("moe_renormalize", True, also=("norm_topk_prob",)), correction=True
    )
    narrow = fields.count("routed_expert_hidden_size", 0, least=0)
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=options,
        shared=fields.count("num_shared_experts", 0, also=("n_shared_experts",), least=0),
        latent=narrow,
        latent_norm=fields.flag("latent_moe_use_norm", False) and narrow > 0,
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    routes = routed_from(fields, count)
    layers = [
        Layer(mixer=attention if is_full[at] else delta, mlp=experts if routes[at] else dense) for at in range(count)
    ]
    return assemble(fields, layers, left_out=tuple(left_out))


def _kimi_delta(fields: Fields, count: int) -> tuple[KimiDelta, list[bool]]:
    """The KDA layer, and which layers have attention instead, by ``linear_attn_config``, or by ``layer_types`` and the
    fields that transformers 5 makes of it."""
    if not fields.given("linear_attn_config"):
        kinds = fields.listing("layer_types", count)
        if set(kinds) - {"full_attention", "linear_attention"}:
            raise InvalidExperiment(f"{fields.label}: layer_types may hold full_attention and linear_attention")
        delta = KimiDelta(
            heads=fields.count("linear_num_heads"),
            head_dim=fields.count("linear_head_dim"),
            kernel=fields.count("linear_conv_kernel_dim"),
        )
        return delta, [kind == "full_attention" for kind in kinds]
    fields.ignore("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    linear = fields.part("linear_attn_config")
    delta = KimiDelta(
        heads=linear.count("num_heads"),
        head_dim=linear.count("head_dim"),
        kernel=linear.count("short_conv_kernel_size"),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
    )
    full, deltas = linear.value("full_attn_layers"), linear.value("kda_layers")
    if (
        not isinstance(full, list)
        or not isinstance(deltas, list)
        or _once([*full, *deltas]) != set(range(1, count + 1))
    ):
        raise InvalidExperiment(f"{linear.label}: full_attn_layers and kda_layers must name each layer once, from 1 on")
    linear.ignore("gate_lower_bound")
    linear.refuse_unread()
    return delta, [at + 1 in full for at in range(count)]


def _once(numbers: list[Any]) -> set[int] | None:
    """The numbers of a list that has only whole numbers, each once; None for any other list."""
    distinct = {number for number in numbers if isinstance(number, int)}
    return distinct if len(distinct) == len(numbers) else None
