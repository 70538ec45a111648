"""Parts that the readers of several families share: the ends of a model, positions, attention, latents, experts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from workloads.spec.config_json.fields import Fields
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import FULL, Attention, HeadNorm, LatentAttention, Rope
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP, Score
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.spans import Full, Span, Window
from workloads.spec.model_spec import MOST_LAYERS

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "swigluoai": "clamped_silu",
    "situ": "situ",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Activations by their names in config.json."""


def layer_count(fields: Fields) -> int:
    count = fields.count("num_hidden_layers")
    if count > MOST_LAYERS:
        raise InvalidExperiment(f"{fields.label}: num_hidden_layers={count:,} must be at most {MOST_LAYERS:,}")
    return count


def activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> str:
    return ACTIVATIONS[str(fields.choice(name, tuple(ACTIVATIONS), default))]


def assemble(fields: Fields, layers: Iterable[Layer], *, tied: bool = False, **options: Any) -> LayeredModel:
    """The model with its ends. ``tied``: whether the head shares the embedding if the file does not say."""
    modules, left_out = predicted_ahead(fields), options.pop("left_out", ())
    if modules and (blocks := _blocks_ahead(fields)) > 1:
        left_out = (*left_out, f"{modules} modules of multi-token prediction, each of {blocks} blocks of one part")
        modules = 0
    return LayeredModel(
        name=fields.label,
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        layers=tuple(layers),
        norm_eps=fields.number("rms_norm_eps", 1e-6, also=("layer_norm_epsilon", "layernorm_epsilon", "norm_eps")),
        longest=fields.count("max_position_embeddings", 0, also=("model_max_length", "max_seq_len"), least=0) or None,
        predicted_ahead=modules,
        left_out=left_out,
        **options,
    )


def _blocks_ahead(fields: Fields) -> int:
    """Blocks of one module of multi-token prediction, where the file lists them (Nemotron 3)."""
    patterns = [fields.value(name, "") for name in ("mtp_hybrid_override_pattern", "mtp_layers_block_type")]
    return max(len(pattern or "") for pattern in patterns)


def predicted_ahead(fields: Fields) -> int:
    """Modules of multi-token prediction that the file names. MiniMax-M3 names one that is trained and seven of a
    decoder of drafts."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    modules = [fields.count(name, 0, least=0) for name in names if fields.given(name)]
    fields.ignore(*names, "use_mtp", "mtp_transformer_layers", "mtp_use_dedicated_embeddings")
    return modules[0] if modules else 0


def rope(fields: Fields, kind: str | None = None, theta: str = "rope_theta") -> Rope:
    """Positions, as transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``, for each kind of layer
    or for all) writes them."""
    parameters, proportional = fields.value("rope_parameters", None), False
    share = fields.number("partial_rotary_factor", 1.0)
    scaling = fields.value("rope_scaling", None)
    base = fields.number(theta, 10_000.0)
    fields.ignore("original_max_position_embeddings", "rope_interleave")
    if isinstance(parameters, Mapping):
        own = parameters.get(kind, parameters) if kind is not None else parameters
        if isinstance(own, Mapping):
            named = Fields(f"{fields.label}: rope_parameters", own)
            base, share = named.number("rope_theta", base), named.number("partial_rotary_factor", share)
            known = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
            scaling = {name: value for name, value in own.items() if name not in known and not isinstance(value, dict)}
            called = scaling.get("rope_type", "default")
            proportional = called == "proportional" and share != 1.0
            scaling = None if called == "default" or scaling == {"rope_type": "proportional"} else scaling
    return Rope(base, share, _scaling(scaling) if scaling else "", proportional)


def _scaling(given: Mapping[str, Any]) -> str:
    """The scaling of positions, with its kind under the name of today (``rope_type``; it was ``type``)."""
    kind = given.get("rope_type", given.get("type"))
    named = {name: value for name, value in given.items() if name not in ("rope_type", "type")}
    return json.dumps({**named, "rope_type": kind}, sort_keys=True)


def grouped(
    fields: Fields,
    *,
    span: Span = FULL,
    positions: Rope | None = None,
    bias: bool = False,
    norm: HeadNorm = "none",
    head_dim: int | None = None,
    **options: Any,
) -> Attention:
    """Grouped-query attention by the usual names."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads, also=("num_attention_groups",))
    if heads % kv_heads:
        raise InvalidExperiment(
            f"{fields.label}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}"
        )
    size = head_dim or head_size(fields, heads)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        **{"value_dim": size, **options},
        span=span,
        rope=positions,
        bias=bias,
        norm=norm,
    )


def head_size(fields: Fields, heads: int) -> int:
    if fields.given("head_dim"):
        return fields.count("head_dim")
    fields.ignore("head_dim")
    hidden = fields.count("hidden_size")
    if hidden % heads:
        raise InvalidExperiment(
            f"{fields.label}: head_dim is missing, and hidden_size={hidden} is no multiple of "
            f"num_attention_heads={heads}"
        )
    return hidden // heads


def spans_of(fields: Fields, count: int, *, at_least: bool = False) -> list[Span]:
    """Span of each layer, from ``layer_types`` and ``sliding_window``. ``at_least``: kinds of multi-token modules may
    follow."""
    kinds = fields.listing("layer_types", count, at_least=at_least)
    spans: list[Span] = []
    for kind in kinds:
        if kind == "full_attention":
            spans.append(Full())
        elif kind == "sliding_attention":
            spans.append(Window(fields.count("sliding_window")))
        else:
            raise InvalidExperiment(
                f"{fields.label}: layer_types has {kind!r}; it may hold full_attention and sliding_attention"
            )
    fields.ignore("sliding_window")
    return spans


def latent(fields: Fields, *, positions: Rope | None, **options: Any) -> LatentAttention:
    """Latent attention by the names of DeepSeek."""
    heads = fields.count("num_attention_heads")
    nope, rotated = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    fields.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    return LatentAttention(
        heads=heads,
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=fields.count("v_head_dim"),
        q_rank=fields.count("q_lora_rank", 0, least=0),
        rope=positions,
        bias=fields.flag("attention_bias", False),
        **options,
    )


class RouterOptions(TypedDict):
    """How experts are chosen and weighted, by the names of `RoutedMLP`."""

    score: Score
    normalize: bool
    scale: float
    groups: int
    correction: bool
    balance_loss: float


def router(
    fields: Fields, *, score: Score = "softmax", normalize: bool = True, correction: bool = False
) -> RouterOptions:
    """How experts are chosen, by the names of DeepSeek. The arguments: what the family does if the file does not
    say."""
    scores: tuple[Score, ...] = ("softmax", "sigmoid", "sqrtsoftplus", score)
    methods = ("noaux_tc", "greedy", "group_limited_greedy")
    method = fields.choice("topk_method", methods, methods[0] if correction else methods[1])
    groups = fields.count("n_group", 1, also=("num_expert_group",), least=0)
    fields.ignore("topk_group", "use_grouped_topk")
    # Mixtral and its like take the loss of the router only if asked; the pretraining did.
    loss = fields.number("router_aux_loss_coef", 0.0, also=("aux_loss_alpha",))
    return {
        "score": fields.choice("scoring_func", scores, score),
        "normalize": fields.flag("norm_topk_prob", normalize),
        "scale": fields.number(
            "routed_scaling_factor", 1.0, also=("router_scaling_factor", "moe_routed_scaling_factor")
        ),
        "groups": max(1, groups),
        "correction": method == "noaux_tc",
        "balance_loss": 0.0 if method == "noaux_tc" else loss,
    }


class Clamp(TypedDict, total=False):
    """Constants of clamped_silu, by the names of `DenseMLP`; empty for other activations."""

    limit: float
    slope: float
    offset: float


def clamp(fields: Fields, *, limit: float, slope: float, offset: float) -> Clamp:
    """Constants by the names of gpt-oss. The arguments: what the family does if the file does not say."""
    return {
        "limit": fields.number("swiglu_limit", limit),
        "slope": fields.number("swiglu_alpha", slope),
        "offset": offset,
    }


def routed(
    fields: Fields,
    *,
    experts: int,
    width: int,
    act: str,
    options: RouterOptions,
    shared: int = 0,
    shared_width: int | None = None,
    gated: bool = True,
    clamped: Clamp | None = None,
    chosen: int | None = None,
    **more: Any,
) -> RoutedMLP:
    """Experts of one size, beside ``shared`` shared ones of ``shared_width`` (that of an expert if not given)."""
    constants: Clamp = clamped or {}
    chosen = chosen or fields.count(
        "num_experts_per_tok", also=("num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k", "moe_topk")
    )
    if chosen > experts:
        raise InvalidExperiment(f"{fields.label}: num_experts_per_tok={chosen} must be at most {experts} experts")
    beside = None
    if shared:
        beside = DenseMLP(width=shared * (shared_width or width), activation=act, gated=gated, **constants)
    return RoutedMLP(
        experts=experts,
        chosen=chosen,
        expert=DenseMLP(width=width, activation=act, gated=gated, bias=more.pop("expert_bias", False), **constants),
        shared=beside,
        shared_experts=shared,
        **options,
        **more,
    )


def sizes_of_layers(fields: Fields, count: int, known: tuple[str, ...]) -> list[dict[str, int]]:
    """Sizes of each layer that differ from those of the model: ``per_layer_config`` of transformers 5, a mapping from
    the number of a layer to its fields. ``known``: the fields that may differ."""
    sizes: list[dict[str, int]] = [{} for _ in range(count)]
    if not fields.given("per_layer_config"):
        return sizes
    given = fields.part("per_layer_config")
    for number in given.names():
        if not number.isdigit() or int(number) >= count:
            raise InvalidExperiment(f"{given.label}: {number} is no layer of {count}")
        layer = given.part(number)
        sizes[int(number)] = {name: layer.count(name) for name in known if layer.given(name)}
        layer.refuse_unread()
    return sizes


def expert_count(fields: Fields) -> int:
    """Number of routed experts, by any of the names that transformers 4 and 5 write for one model."""
    return fields.count("num_experts", also=("num_local_experts", "n_routed_experts", "moe_num_experts"))


def shared_count(fields: Fields, default: Any) -> int:
    """Number of shared experts, by any of their names."""
    return fields.count("n_shared_experts", default, also=("num_shared_experts", "moe_num_shared_experts"), least=0)


def factors(fields: Fields) -> tuple[str, ...]:
    """Factors of embeddings, residuals and logits by the names of Granite, as `LayeredModel.same_cost` names them."""
    named = {
        "embeddings multiplied by": fields.number("embedding_multiplier", 1.0),
        "residuals multiplied by": fields.number("residual_multiplier", 1.0),
        "logits divided by": fields.number("logits_scaling", 1.0),
    }
    return tuple(f"{what} {factor:g}" for what, factor in named.items() if factor != 1.0)


def scored(attention: Attention, scale: float) -> Attention:
    """Attention that multiplies products of queries and keys by ``scale``."""
    usual = math.isclose(scale, attention.head_dim**-0.5, rel_tol=1e-9)
    return attention if usual else dataclasses.replace(attention, score_scale=scale)


def routed_from(fields: Fields, count: int) -> list[bool]:
    """Which layers have experts: those that ``mlp_layer_types`` calls sparse (transformers 5), or those from
    ``first_k_dense_replace`` on, one in ``moe_layer_freq``, or a list of 0 and 1."""
    if fields.given("mlp_layer_types"):
        fields.ignore("first_k_dense_replace", "moe_layer_freq")
        kinds = fields.listing("mlp_layer_types", count, at_least=True)
        if set(kinds) - {"dense", "sparse"}:
            raise InvalidExperiment(f"{fields.label}: mlp_layer_types may hold dense and sparse")
        return [kind == "sparse" for kind in kinds]
    first = fields.count("first_k_dense_replace", 0, least=0)
    frequency = fields.value("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return [entry == 1 for entry in fields.listing("moe_layer_freq", count)]
    step = fields.count("moe_layer_freq", 1)
    return [layer >= first and layer % step == 0 for layer in range(count)]
