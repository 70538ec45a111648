"""Readers of Granite (dense, with experts, with Mamba-2), and of HyperCLOVA X and Bamba, which share parts with it."""

from __future__ import annotations

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    expert_count,
    factors,
    grouped,
    head_size,
    layer_count,
    rope,
    routed,
    router,
    scored,
    spans_of,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import FULL, Attention, Rope
from workloads.spec.layer_kinds.mlp import MLP, DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel, Mixer
from workloads.spec.layer_kinds.recurrent import Mamba2
from workloads.spec.layer_kinds.spans import Span


def read_granite(fields: Fields, model_type: str) -> LayeredModel:
    """Granite with attention alone. Its models with windows have sinks, and a base of positions for each layer."""
    count, act, heads = layer_count(fields), activation(fields), fields.count("num_attention_heads")
    windows = model_type.endswith("_swa")
    mlp: MLP
    if model_type.startswith("granitemoe"):
        mlp = _experts(fields, act, shared=fields.count("shared_intermediate_size", 0, least=0))
    else:
        mlp = DenseMLP(width=fields.count("intermediate_size"), activation=act, bias=fields.flag("mlp_bias", False))
    norms = 2
    if model_type == "hyperclovax":
        fields.assume({"use_post_norm": True, "attention_multiplier": head_size(fields, heads) ** -0.5})
        norms = 4 if fields.flag("use_post_norm") else 2
    spans = spans_of(fields, count) if windows else [FULL] * count
    positions = _positions(fields, count) if windows else [rope(fields)] * count
    layers = [
        Layer(mixer=_attention(fields, one, span, sinks=windows), mlp=mlp, norms=norms)
        for one, span in zip(positions, spans, strict=True)
    ]
    return assemble(fields, layers, tied=model_type == "granite_swa", same_cost=factors(fields))


def _attention(fields: Fields, positions: Rope | None, span: Span = FULL, *, sinks: bool = False) -> Attention:
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, span=span, positions=positions, bias=bias, output_bias=bias, sinks=sinks)
    return scored(attention, fields.number("attention_multiplier", 1.0))


def _positions(fields: Fields, count: int) -> list[Rope | None]:
    """Positions of each layer by their bases in ``layer_rope_theta``, of which 0 means none."""
    shared = rope(fields)
    if not fields.given("layer_rope_theta"):
        return [shared] * count
    bases = fields.listing("layer_rope_theta", count)
    if not all(isinstance(base, int | float) and base >= 0 for base in bases):
        raise InvalidExperiment(f"{fields.label}: layer_rope_theta may hold numbers of at least 0")
    return [Rope(float(base), shared.rotated, shared.scaling) if base else None for base in bases]


def _experts(fields: Fields, act: str, *, shared: int) -> RoutedMLP:
    """Experts weighted by the softmax of the chosen scores, beside a shared one of width ``shared`` (0: none)."""
    return routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("intermediate_size"),
        act=act,
        options=router(fields, score="softmax_of_chosen"),
        shared=1 if shared else 0,
        shared_width=shared or None,
    )


def read_granite_hybrid(fields: Fields, model_type: str) -> LayeredModel:
    """Granite 4: Mamba-2 and attention, with experts beside a shared one, or with the shared one alone."""
    count, act = layer_count(fields), activation(fields)
    rotated = fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    fields.choice("normalization_function", ("rmsnorm",), "rmsnorm")
    attention = _attention(fields, rope(fields) if rotated else None)
    fields.ignore("rope_parameters", "rope_theta", "rope_scaling", "init_method")
    mamba = _mamba(fields)
    shared = fields.count("shared_intermediate_size", 1024)
    mlp: MLP
    if fields.count("num_local_experts", 8, least=0):
        mlp = _experts(fields, act, shared=shared)
    else:
        mlp = DenseMLP(width=shared, activation=act)
        fields.ignore("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef")
    mixers: dict[str, Mixer] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
    }
    kinds = fields.listing("layers_block_type" if fields.given("layers_block_type") else "layer_types", count)
    if wrong := [kind for kind in kinds if kind not in mixers]:
        raise InvalidExperiment(f"{fields.label}: layer_types has {wrong[0]!r}; it may hold {', '.join(mixers)}")
    layers = [Layer(mixer=mixers[kind], mlp=mlp) for kind in kinds]
    return assemble(fields, layers, same_cost=factors(fields))


def read_bamba(fields: Fields, model_type: str) -> LayeredModel:
    """Mamba-2, and attention in some layers, with a dense MLP in every layer."""
    fields.assume({"partial_rotary_factor": 0.5})
    if (share := fields.number("partial_rotary_factor")) != 0.5:
        raise InvalidExperiment(f"{fields.label}: partial_rotary_factor={share:g} must be 0.5, as transformers has it")
    fields.ignore("attn_rotary_emb", "z_loss_coefficient")
    count, act = layer_count(fields), activation(fields)
    bias = fields.flag("attention_bias", False)
    attention, mamba = grouped(fields, positions=rope(fields), bias=bias, output_bias=bias), _mamba(fields)
    mlp = DenseMLP(width=fields.count("intermediate_size"), activation=act, bias=fields.flag("mlp_bias", False))
    places = fields.value("attn_layer_indices", [])
    if not isinstance(places, list) or set(places) - set(range(count)):
        raise InvalidExperiment(f"{fields.label}: attn_layer_indices may hold the numbers of {count} layers")
    return assemble(fields, [Layer(mixer=attention if at in places else mamba, mlp=mlp) for at in range(count)])


def _mamba(fields: Fields) -> Mamba2:
    """Mamba-2 by the names of Bamba."""
    fields.ignore("mamba_chunk_size", "time_step_limit")
    heads, width = fields.count("mamba_n_heads"), fields.count("mamba_expand", 2) * fields.count("hidden_size")
    size = width // heads if fields.value("mamba_d_head", "auto") == "auto" else fields.count("mamba_d_head")
    if heads * size != width:
        raise InvalidExperiment(
            f"{fields.label}: mamba_n_heads={heads} times mamba_d_head={size} must be mamba_expand times hidden_size, "
            f"{width}"
        )
    return Mamba2(
        heads=heads,
        head_dim=size,
        groups=fields.count("mamba_n_groups"),
        state=fields.count("mamba_d_state"),
        kernel=fields.count("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias", False),
        convolution_bias=fields.flag("mamba_conv_bias", True),
    )
