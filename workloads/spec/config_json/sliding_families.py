"""Readers of families with experts and sliding layers whose heads are of their own: Step, MiMo-V2, Gemma 4."""

from __future__ import annotations

import dataclasses
from typing import Any

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    grouped,
    layer_count,
    rope,
    routed,
    routed_from,
    router,
    spans_of,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, Rope
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.spans import Full, Window


def read_step(fields: Fields, model_type: str) -> LayeredModel:
    """Step 3.5 and 3.7: gates of heads; sliding layers may have heads of their own (``attention_other_setting``)."""
    count, act = layer_count(fields), activation(fields)
    fields.ignore("need_fp32_gate", "zero_centered", "swiglu_limits", "swiglu_limits_shared", "yarn_only_types")
    fields.choice("use_head_wise_attn_gate", (True,), True)
    fields.choice("att_impl_type", ("GQA",), "GQA")
    options = router(fields, score="sigmoid", correction=fields.flag("use_moe_router_bias", True))
    options["scale"] = fields.number("moe_router_scaling_factor", 1.0)
    options["normalize"] = fields.flag("norm_expert_weight", True)
    fields.choice("moe_router_activation", ("sigmoid",), "sigmoid")
    experts = routed(
        fields,
        experts=fields.count("num_experts", also=("moe_num_experts",)),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=options,
        shared=fields.count("n_shared_experts", 1, least=0),
        shared_width=fields.count("share_expert_dim", also=("share_expert_dims",)),
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    routes = _enumerated(fields, count) or routed_from(fields, count, fields.count("first_k_dense_replace", 0, least=0))
    heads, kv_heads = _other_heads(fields)
    layers = []
    for at, span in enumerate(spans_of(fields, count, at_least=True)):
        attention = grouped(fields, span=span, positions=_rope_of_layer(fields, at), norm="head", gate="head")
        if isinstance(span, Window) and heads is not None:
            attention = dataclasses.replace(attention, heads=heads, kv_heads=kv_heads or attention.kv_heads)
        layers.append(Layer(mixer=attention, mlp=experts if routes[at] else dense))
    return assemble(fields, layers)


def _enumerated(fields: Fields, count: int) -> list[bool] | None:
    """Which layers have experts, from their numbers in ``moe_layers_enum``; None if the file does not have it."""
    if not fields.given("moe_layers_enum"):
        return None
    fields.ignore("first_k_dense_replace", "moe_layer_freq")
    numbers = {number.strip() for number in str(fields.value("moe_layers_enum")).split(",")}
    return [str(at) in numbers for at in range(count)]


def _other_heads(fields: Fields) -> tuple[int | None, int | None]:
    """Heads, and those of keys and values, of sliding layers; None if they are those of the others."""
    if not fields.given("attention_other_setting"):
        return None, None
    other = fields.part("attention_other_setting")
    other.choice("attention_type", ("sliding_attention",), "sliding_attention")
    size = fields.count("head_dim")
    other.choice("head_dim", (size,), size)
    other.choice("true_head_dim", (size,), size)
    heads = other.count("num_attention_heads")
    kv_heads = other.count("num_attention_groups", 0, least=0) or None
    other.refuse_unread()
    return heads, kv_heads


def _rope_of_layer(fields: Fields, at: int) -> Rope:
    """Positions of a layer, whose base and share may be lists with an entry for each layer."""
    own: dict[str, Any] = {}
    for name, plain in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        value = fields.value(name, None)
        if isinstance(value, list) and at < len(value):
            own[plain] = value[at]
        elif isinstance(value, list):
            raise InvalidExperiment(f"{fields.label}: {name} has {len(value)} entries; layer {at} has none")
    scaling = fields.value("rope_scaling", None)
    if not own:
        return rope(fields)
    fields.ignore("rope_parameters", "partial_rotary_factor")
    return rope(Fields(fields.label, {"rope_scaling": scaling, **own}))


def read_mimo_v2(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields)
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_value_scale", 1.0)
    window = fields.count("sliding_window", also=("sliding_window_size", "attention_chunk_size"))
    # The class counts past tokens; the query comes on top.
    full = grouped(
        fields,
        positions=rope(fields),
        bias=bias,
        value_dim=fields.count("v_head_dim"),
        sinks=fields.flag("add_full_attention_sink_bias", False),
        value_scale=scale,
    )
    sliding = Attention(
        heads=fields.count("swa_num_attention_heads", full.heads),
        kv_heads=fields.count("swa_num_key_value_heads", full.kv_heads),
        head_dim=fields.count("swa_head_dim", full.head_dim),
        value_dim=fields.count("swa_v_head_dim", full.value_dim),
        span=Window(window + 1),
        rope=rope(fields, theta="swa_rope_theta"),
        bias=bias,
        sinks=fields.flag("add_swa_attention_sink_bias", False),
        value_scale=scale,
    )
    experts = routed(
        fields,
        experts=fields.count("n_routed_experts"),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=router(fields, score="sigmoid", correction=True),
        shared=fields.count("n_shared_experts", 0, least=0),
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    pattern, routes = fields.listing("hybrid_layer_pattern", count), routed_from(fields, count, 0)
    layers = [
        Layer(mixer=sliding if kind == 1 else full, mlp=experts if routes[at] else dense)
        for at, kind in enumerate(pattern)
    ]
    return assemble(fields, layers)


def read_gemma4(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        fields.choice(name, (0,), 0)
    fields.choice("use_double_wide_mlp", (False,), False)
    fields.ignore("vocab_size_per_layer_input", "use_bidirectional_attention", "hidden_act")
    bias, width = fields.flag("attention_bias", False), fields.count("intermediate_size")
    dense, mlp, norms = DenseMLP(width=width, activation=act), None, 4
    if fields.flag("enable_moe_block", False):
        chosen: dict[str, Any] = {"chosen": fields.count("top_k_experts", also=("num_experts_per_tok",))}
        mlp = RoutedMLP(
            experts=fields.count("num_experts"),
            expert=DenseMLP(width=fields.count("moe_intermediate_size"), activation=act),
            shared=dense,
            router_scales=True,
            **chosen,
        )
        norms = 7
    fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    sliding_size, full_size = fields.count("head_dim"), fields.count("global_head_dim", fields.count("head_dim"))
    shared = fields.flag("attention_k_eq_v", False)
    layers = []
    for span in spans_of(fields, count):
        full = isinstance(span, Full)
        size = full_size if full else sliding_size
        kv_heads = fields.count("num_key_value_heads")
        if full and shared:
            kv_heads = fields.count("num_global_key_value_heads", kv_heads)
        attention = Attention(
            heads=fields.count("num_attention_heads"),
            kv_heads=kv_heads,
            head_dim=size,
            value_dim=size,
            span=span,
            rope=rope(fields, "full_attention" if full else "sliding_attention"),
            bias=bias,
            output_bias=bias,
            norm="head",
            shared_kv=full and shared,
        )
        layers.append(Layer(mixer=attention, mlp=mlp or dense, norms=norms))
    fields.ignore("num_global_key_value_heads")
    logit_cap = fields.value("final_logit_softcapping", None) is not None
    return assemble(fields, layers, tied=True, logit_cap=logit_cap)
