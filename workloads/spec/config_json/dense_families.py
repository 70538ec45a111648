"""Readers of families of dense models of attention: Llama and what differs from it in an option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import activation, assemble, grouped, layer_count, rope, spans_of
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import HeadNorm, Rope
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.spans import Full, Span, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """How a family differs from Llama."""

    qkv_bias: bool | None = None
    """None: ``attention_bias`` says."""
    output_bias: bool | None = None
    """None: as ``qkv_bias``."""
    norm: HeadNorm = "none"
    norms: int = 2
    outputs_normed: bool = False
    gated: bool = True
    act: str = "silu"
    act_name: str = "hidden_act"
    tied: bool = False
    scaled_embedding: bool = False
    scalar: str = ""
    """Field whose value, in place of a head's size, is the square of what scores are divided by."""
    bias_fields: tuple[str, ...] = ("attention_bias",)
    """Fields that say whether attention has biases, which agree."""
    mlp_bias_fields: tuple[str, ...] = ("mlp_bias",)
    listed: bool = False
    """Whether ``layer_types`` must be there: no other field says which layers have windows."""
    window_rotated_alone: bool = False
    """Where some layers have windows, the others have no positions."""
    same_cost: tuple[str, ...] = ()
    """As of `LayeredModel`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that published files of the family leave out."""


_GEMMA3 = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
}
_GLM = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
_GEMMA2 = {"sliding_window_pattern": 2, "query_pre_attn_scalar": 256}
NORMED_AFTER_ROTATION = "norms of queries and keys after their rotation"
DENSE: Mapping[str, Dense] = {
    "llama": Dense(),
    "cwm": Dense(qkv_bias=False, listed=True, defaults={"head_dim": 128, "rope_theta": 1_000_000.0}),
    "ernie4_5": Dense(
        bias_fields=("use_bias",),
        mlp_bias_fields=("use_bias",),
        tied=True,
        defaults={"head_dim": 128, "rope_theta": 500_000.0},
    ),
    "exaone4": Dense(
        qkv_bias=False,
        norm="head",
        outputs_normed=True,
        window_rotated_alone=True,
        defaults={"sliding_window_pattern": 4},
    ),
    "glm": Dense(output_bias=False, defaults=_GLM),
    "glm4": Dense(output_bias=False, norms=4, defaults=_GLM),
    "helium": Dense(defaults={"head_dim": 128, "rope_theta": 100_000.0}),
    "hunyuan_v1_dense": Dense(norm="head", same_cost=(NORMED_AFTER_ROTATION,)),
    "internlm3": Dense(
        bias_fields=("attention_bias", "qkv_bias"), mlp_bias_fields=("mlp_bias", "bias"), defaults={"head_dim": 128}
    ),
    "iquestcoder": Dense(defaults={"head_dim": 128}),
    "mistral": Dense(qkv_bias=False),
    "ministral": Dense(qkv_bias=False),
    "ministral3": Dense(qkv_bias=False),
    "phi3": Dense(qkv_bias=False),
    "qwen2": Dense(qkv_bias=True, output_bias=False),
    "mimo": Dense(qkv_bias=True, output_bias=False),
    "qwen3": Dense(norm="head"),
    "qwen3_vl_text": Dense(norm="head"),
    "smollm3": Dense(tied=True),
    "seed_oss": Dense(),
    "olmo2": Dense(norm="all_heads", outputs_normed=True),
    "olmo3": Dense(norm="all_heads", outputs_normed=True),
    "apertus": Dense(norm="head", gated=False, act="xielu"),
    "arcee": Dense(gated=False, act="relu2"),
    "gemma": Dense(act="gelu_pytorch_tanh", act_name="hidden_activation", tied=True, scaled_embedding=True),
    "gemma2": Dense(
        norms=4,
        act="gelu_pytorch_tanh",
        act_name="hidden_activation",
        tied=True,
        scaled_embedding=True,
        scalar="query_pre_attn_scalar",
        defaults=_GEMMA2,
    ),
    "vaultgemma": Dense(
        act="gelu_pytorch_tanh",
        act_name="hidden_activation",
        tied=True,
        scaled_embedding=True,
        scalar="query_pre_attn_scalar",
        defaults=_GEMMA2,
    ),
    "gemma3_text": Dense(
        norm="head",
        norms=4,
        act="gelu_pytorch_tanh",
        act_name="hidden_activation",
        tied=True,
        scaled_embedding=True,
        scalar="query_pre_attn_scalar",
        defaults=_GEMMA3,
    ),
}


def published_by_hunyuan(fields: Fields) -> None:
    """Fields of Hunyuan's own files that its class in transformers does not read."""
    fields.assume({"head_dim": fields.value("attention_head_dim", None)})
    for name, only in (("use_cla", False), ("use_qk_norm", True), ("use_rotary_pos_emb", True), ("mlp_bias", False)):
        fields.choice(name, (only,), only)
    fields.choice("norm_type", ("rms",), "rms")
    fields.ignore(
        "cla_share_factor", "class_num", "dense_list", "mask_init_id", "org_vocab_size", "pad_id", "pool_type"
    )
    fields.ignore("im_end_id", "im_newline_id", "im_start_id", "text_end_id", "text_start_id")


def read_dense(fields: Fields, model_type: str) -> LayeredModel:
    family = DENSE[model_type]
    fields.assume(family.defaults)
    if model_type == "hunyuan_v1_dense":
        published_by_hunyuan(fields)
    count = layer_count(fields)
    said = fields.flag(family.bias_fields[0], False, also=family.bias_fields[1:])
    bias = said if family.qkv_bias is None else family.qkv_bias
    output_bias = bias if family.output_bias is None else family.output_bias
    if model_type == "seed_oss":
        output_bias = fields.flag("attention_out_bias", False)
    fields.choice("use_mrope", (False,), False)
    if model_type == "apertus":
        fields.choice("qk_norm", (True,), True)
        fields.choice("post_norm", (False,), False)
    if family.act_name != "hidden_act":
        fields.ignore("hidden_act")
    mlp = DenseMLP(
        width=fields.count("intermediate_size"),
        activation=activation(fields, family.act_name, family.act),
        gated=family.gated,
        bias=fields.flag(family.mlp_bias_fields[0], False, also=family.mlp_bias_fields[1:]),
    )
    soft_cap = fields.value("attn_logit_softcapping", None) is not None
    fields.ignore(
        "query_pre_attn_scalar", "attention_multiplier", "rope_local_base_freq", "use_bidirectional_attention"
    )
    scalar = fields.number(family.scalar) if family.scalar else 0.0
    layers, rotated = [], _rotated(fields, count)
    windowed, spans = fields.given("sliding_window"), _spans(fields, count, listed=family.listed)
    if family.window_rotated_alone and windowed:
        rotated = [isinstance(span, Window) for span in spans]
    for span, has_rope in zip(spans, rotated, strict=True):
        kind = "sliding_attention" if isinstance(span, Window) else "full_attention"
        attention = grouped(
            fields,
            span=span,
            positions=_positions(fields, kind) if has_rope else None,
            bias=bias,
            output_bias=output_bias,
            norm=family.norm,
            soft_cap=soft_cap,
        )
        if scalar and scalar != attention.head_dim:
            attention = replace(attention, score_scale=scalar**-0.5)
        layers.append(Layer(mixer=attention, mlp=mlp, norms=family.norms, outputs_normed=family.outputs_normed))
    logit_cap = fields.number("final_logit_softcapping", 0.0)
    return assemble(
        fields,
        layers,
        tied=family.tied,
        logit_cap=logit_cap,
        scaled_embedding=family.scaled_embedding,
        same_cost=family.same_cost,
    )


def _positions(fields: Fields, kind: str) -> Rope:
    """Positions of a layer. Gemma 3 has another base in sliding layers, which is not scaled; transformers 5 writes it
    with those of the other kind."""
    local = kind == "sliding_attention" and fields.given("rope_local_base_freq")
    if not local or fields.given("rope_parameters"):
        return rope(fields, kind)
    return Rope(fields.number("rope_local_base_freq"))


def _spans(fields: Fields, count: int, *, listed: bool = False) -> list[Span]:
    """Span of each layer: ``layer_types``, which must be there if ``listed``, a window every so many layers, or one
    window for all."""
    fields.ignore("max_window_layers", "use_sliding_window", "sliding_window_pattern", "_sliding_window_pattern")
    if listed or fields.given("layer_types"):
        return spans_of(fields, count)
    if not fields.given("sliding_window") or fields.value("use_sliding_window", True) is False:
        fields.ignore("sliding_window")
        return [Full()] * count
    window = Window(fields.count("sliding_window"))
    if fields.given("max_window_layers"):
        first = fields.count("max_window_layers", least=0)
        return [window if layer >= first else Full() for layer in range(count)]
    if fields.given("sliding_window_pattern"):
        step = fields.count("sliding_window_pattern")
        return [window if (layer + 1) % step else Full() for layer in range(count)]
    return [window] * count


def _rotated(fields: Fields, count: int) -> list[bool]:
    """Which layers rotate queries and keys: 1 in ``no_rope_layers``, whose name says the opposite."""
    fields.ignore("no_rope_layer_interval")
    if not fields.given("no_rope_layers"):
        return [True] * count
    entries = fields.listing("no_rope_layers", count)
    if set(entries) - {0, 1}:
        raise InvalidExperiment(f"{fields.label}: no_rope_layers may hold 0 and 1")
    return [entry == 1 for entry in entries]
