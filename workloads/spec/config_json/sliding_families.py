"""Readers of families with experts and sliding layers whose heads are of their own: Step, MiMo-V2, Gemma 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    expert_count,
    grouped,
    layer_count,
    rope,
    routed,
    routed_from,
    router,
    shared_count,
    sizes_of_layers,
    spans_of,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, Gate, Rope
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP, Score
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.spans import Full, Window


def read_step(fields: Fields, model_type: str) -> LayeredModel:
    """Step 3.5 and 3.7: gates of heads; sliding layers may have heads of their own (``attention_other_setting``)."""
    count, act = layer_count(fields), activation(fields)
    fields.ignore("query_pre_attn_scalar", "mtp_layer_types", "mtp_mlp_layer_types", "num_sliding_attention_heads")
    fields.ignore("need_fp32_gate", "zero_centered", "swiglu_limits", "swiglu_limits_shared", "yarn_only_types")
    fields.choice("attention_bias", (False,), False)
    fields.choice("use_head_wise_attn_gate", (True,), True)
    fields.choice("att_impl_type", ("GQA",), "GQA")
    options = router(fields, score="sigmoid", correction=fields.flag("use_moe_router_bias", True))
    options["scale"] = fields.number("moe_router_scaling_factor", 1.0)
    options["normalize"] = fields.flag("norm_expert_weight", True)
    fields.choice("moe_router_activation", ("sigmoid",), "sigmoid")
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=options,
        shared=fields.count("n_shared_experts", 1, least=0),
        shared_width=fields.count("share_expert_dim", also=("share_expert_dims",)),
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    routes = _enumerated(fields, count) or routed_from(fields, count)
    heads, kv_heads = _other_heads(fields)
    sizes = sizes_of_layers(fields, count, ("num_attention_heads",))
    layers = []
    for at, span in enumerate(spans_of(fields, count, at_least=True)):
        positions = _rope_of_layer(fields, at, "sliding_attention" if isinstance(span, Window) else "full_attention")
        attention = grouped(fields, span=span, positions=positions, norm="head", gate="head")
        own_heads = sizes[at].get("num_attention_heads", heads if isinstance(span, Window) else None)
        if own_heads is not None:
            attention = dataclasses.replace(attention, heads=own_heads)
        if isinstance(span, Window) and kv_heads is not None:
            attention = dataclasses.replace(attention, kv_heads=kv_heads)
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
        return fields.count("num_sliding_attention_heads", 0, least=0) or None, None
    other = fields.part("attention_other_setting")
    other.choice("attention_type", ("sliding_attention",), "sliding_attention")
    size = fields.count("head_dim")
    other.choice("head_dim", (size,), size)
    other.choice("true_head_dim", (size,), size)
    heads = other.count("num_attention_heads")
    kv_heads = other.count("num_attention_groups", 0, least=0) or None
    other.refuse_unread()
    return heads, kv_heads


def _rope_of_layer(fields: Fields, at: int, kind: str) -> Rope:
    """Positions of a layer, whose base and share may be lists with an entry for each layer, or given for each kind of
    layer (transformers 5)."""
    own: dict[str, Any] = {}
    for name, plain in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        value = fields.value(name, None)
        if isinstance(value, list) and at < len(value):
            own[plain] = value[at]
        elif isinstance(value, list):
            raise InvalidExperiment(f"{fields.label}: {name} has {len(value)} entries; layer {at} has none")
    scaling = fields.value("rope_scaling", None)
    if not own:
        return rope(fields, kind)
    fields.ignore("rope_parameters", "partial_rotary_factor")
    return rope(Fields(fields.label, {"rope_scaling": scaling, **own}))


def read_mimo_v2(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields)
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_value_scale", 1.0)
    window = _mimo_window(fields)
    # What the class of transformers does, whose own files name neither.
    native = not fields.given("hybrid_layer_pattern")
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
        kv_heads=fields.count("swa_num_key_value_heads", 2 * full.kv_heads if native else full.kv_heads),
        head_dim=fields.count("swa_head_dim", full.head_dim),
        value_dim=fields.count("swa_v_head_dim", full.value_dim),
        span=Window(window),
        rope=rope(fields, theta="swa_rope_theta"),
        bias=bias,
        sinks=fields.flag("add_swa_attention_sink_bias", native),
        value_scale=scale,
    )
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=router(fields, score="sigmoid", correction=True),
        shared=fields.count("n_shared_experts", 0, least=0),
    )
    dense = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    if not native:
        slides = [kind == 1 for kind in fields.listing("hybrid_layer_pattern", count)]
        fields.ignore("layer_types", "sliding_window")
    else:
        slides = [isinstance(span, Window) for span in spans_of(fields, count)]
    layers = [
        Layer(mixer=sliding if slide else full, mlp=experts if route else dense)
        for slide, route in zip(slides, routed_from(fields, count), strict=True)
    ]
    return assemble(fields, layers)


def _mimo_window(fields: Fields) -> int:
    """Tokens that a query of a sliding layer sees, itself included. ``sliding_window_size``, and in published files
    ``sliding_window`` beside it, count the tokens before the query; transformers 5 writes the sum to
    ``sliding_window``."""
    window = fields.count("sliding_window", 0, least=0)
    if not fields.given("sliding_window_size"):
        if not window:
            raise InvalidExperiment(f"{fields.label}: sliding_window is missing")
        return window
    before = fields.count("sliding_window_size", also=("attention_chunk_size",))
    if window not in (0, before, before + 1):
        raise InvalidExperiment(
            f"{fields.label}: sliding_window={window} must be sliding_window_size={before}, or one more"
        )
    return before + 1


def read_exaone_moe(fields: Fields, model_type: str) -> LayeredModel:
    """EXAONE with experts: where some layers have windows, the others have no positions."""
    fields.assume({"first_k_dense_replace": 1, "routed_scaling_factor": 2.5})
    count, act = layer_count(fields), activation(fields)
    windowed = fields.given("sliding_window")
    experts, dense = _beside_dense(fields, act, shared=shared_count(fields, 1))
    fields.ignore("sliding_window_pattern", "first_last_k_dense_replace", "is_moe_layer")
    layers = []
    for span, route in zip(spans_of(fields, count), routed_from(fields, count), strict=True):
        positions = rope(fields) if isinstance(span, Window) or not windowed else None
        attention = grouped(fields, span=span, positions=positions, norm="head")
        layers.append(Layer(mixer=attention, mlp=experts if route else dense))
    return assemble(fields, layers)


def _beside_dense(
    fields: Fields, act: str, *, shared: int, shared_width: int | None = None, score: Score = "sigmoid"
) -> tuple[RoutedMLP, DenseMLP]:
    """Experts, with a bias of their choice if scored by a sigmoid, and the MLP of layers without experts."""
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=router(fields, score=score, correction=score == "sigmoid"),
        shared=shared,
        shared_width=shared_width,
    )
    return experts, DenseMLP(width=fields.count("intermediate_size"), activation=act)


def read_afmoe(fields: Fields, model_type: str) -> LayeredModel:
    """Trinity of Arcee: sandwich norms, gates of attention, positions in layers with windows alone."""
    fields.assume({"head_dim": 128, "num_experts_per_tok": 6, "num_dense_layers": 1})
    count, act = layer_count(fields), activation(fields)
    fields.choice("score_func", ("sigmoid",), "sigmoid")
    fields.choice("route_norm", (True,), True)
    for name in ("num_expert_groups", "num_limited_groups"):
        fields.choice(name, (1,), 1)
    fields.ignore("global_attn_every_n_layers", "load_balance_coeff", "use_grouped_mm")
    experts, dense = _beside_dense(fields, act, shared=shared_count(fields, 2))
    experts = dataclasses.replace(experts, scale=fields.number("route_scale", 1.0))
    bias, first = fields.flag("attention_bias", False), fields.count("num_dense_layers", least=0)
    layers = []
    for at, span in enumerate(spans_of(fields, count)):
        positions = rope(fields) if isinstance(span, Window) else None
        attention = grouped(
            fields, span=span, positions=positions, bias=bias, output_bias=bias, norm="head", gate="element"
        )
        layers.append(Layer(mixer=attention, mlp=experts if at >= first else dense, norms=4))
    return assemble(fields, layers, scaled_embedding=fields.flag("mup_enabled", False))


_GATES: Mapping[bool | str, Gate] = {True: "head", "per-head": "head", "per-element": "element"}


_LAGUNA_ROPE = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0},
}
_MELLUM_ROPE = {"full_attention": {"rope_theta": 500_000.0}, "sliding_attention": {"rope_theta": 10_000.0}}


def read_laguna(fields: Fields, model_type: str) -> LayeredModel:
    """Laguna of Poolside: gates of attention by softplus, and a number of heads for each layer."""
    count, act = layer_count(fields), activation(fields)
    fields.assume({"head_dim": 128, "rope_parameters": _LAGUNA_ROPE, "layer_types": ["full_attention"] * count})
    for name in ("moe_apply_router_weight_on_input", "qkv_bias", "swa_attention_sink_enabled"):
        fields.choice(name, (False,), False)
    fields.ignore("decoder_sparse_step", "gating_types", "mlp_only_layers")
    fields.assume({"first_k_dense_replace": 1})
    experts, dense = _beside_dense(fields, act, shared=1, shared_width=fields.count("shared_expert_intermediate_size"))
    gate = _GATES[fields.choice("gating", tuple(_GATES), True)]
    same_cost = ["output gates by softplus"]
    if fields.number("moe_router_logit_softcapping", 0.0):
        same_cost.append("a cap of the router's scores")
    bias, usual = fields.flag("attention_bias", False), fields.count("num_attention_heads")
    given = fields.given("num_attention_heads_per_layer")
    heads = fields.listing("num_attention_heads_per_layer", count) if given else [usual] * count
    layers = []
    for at, (span, route) in enumerate(zip(spans_of(fields, count), routed_from(fields, count), strict=True)):
        kind = "sliding_attention" if isinstance(span, Window) else "full_attention"
        attention = grouped(
            fields, span=span, positions=rope(fields, kind), bias=bias, output_bias=bias, norm="head", gate=gate
        )
        own = Fields(fields.label, {"num_attention_heads_per_layer": heads[at]}).count("num_attention_heads_per_layer")
        if own % attention.kv_heads:
            raise InvalidExperiment(
                f"{fields.label}: num_key_value_heads={attention.kv_heads} must divide "
                f"num_attention_heads_per_layer, which has {own}"
            )
        layers.append(Layer(mixer=dataclasses.replace(attention, heads=own), mlp=experts if route else dense))
    return assemble(fields, layers, same_cost=tuple(same_cost))


def read_mellum(fields: Fields, model_type: str) -> LayeredModel:
    """Mellum of JetBrains: as Qwen3 with experts, with windows and dense layers."""
    count, act = layer_count(fields), activation(fields)
    fields.assume({"head_dim": 128, "rope_parameters": _MELLUM_ROPE, "layer_types": ["full_attention"] * count})
    fields.ignore("mtp_layer_types", "mtp_mlp_layer_types")
    experts, dense = _beside_dense(fields, act, shared=0, score="softmax")
    bias = fields.flag("attention_bias", False)
    layers = []
    for span, route in zip(spans_of(fields, count), routed_from(fields, count), strict=True):
        kind = "sliding_attention" if isinstance(span, Window) else "full_attention"
        attention = grouped(fields, span=span, positions=rope(fields, kind), bias=bias, output_bias=bias, norm="head")
        layers.append(Layer(mixer=attention, mlp=experts if route else dense))
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
            experts=expert_count(fields),
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
    sizes = sizes_of_layers(fields, count, ("head_dim", "num_key_value_heads"))
    for span, own in zip(spans_of(fields, count), sizes, strict=True):
        full = isinstance(span, Full)
        size = own.get("head_dim", full_size if full else sliding_size)
        kv_heads = fields.count("num_key_value_heads")
        if full and shared:
            kv_heads = fields.count("num_global_key_value_heads", kv_heads)
        kv_heads = own.get("num_key_value_heads", kv_heads)
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
            value_norm=True,
            score_scale=1.0,
        )
        layers.append(Layer(mixer=attention, mlp=mlp or dense, norms=norms))
    fields.ignore("num_global_key_value_heads")
    logit_cap = fields.number("final_logit_softcapping", 0.0)
    return assemble(fields, layers, tied=True, logit_cap=logit_cap, scaled_embedding=True)
