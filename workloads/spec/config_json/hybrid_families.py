"""Readers of families that mix attention with recurrent layers: Qwen3-Next and Qwen3.5, MiniMax-01, Nemotron-H, OLMo
Hybrid."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    expert_count,
    grouped,
    layer_count,
    rope,
    routed,
    router,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.mlp import MLP, DenseMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, LightningAttention, Mamba2


def read_qwen_next(fields: Fields, model_type: str) -> LayeredModel:
    """Qwen3-Next and Qwen3.5, dense or with experts."""
    count, act = layer_count(fields), activation(fields)
    bias = fields.flag("attention_bias", False)
    gate = "element" if fields.flag("attn_output_gate", True) else "none"
    attention = grouped(fields, positions=rope(fields), bias=bias, output_bias=bias, norm="head", gate=gate)
    delta = _delta(fields)
    if fields.value("mlp_only_layers", []) or fields.count("decoder_sparse_step", 1) != 1:
        raise InvalidExperiment(f"{fields.label}: mlp_only_layers and decoder_sparse_step are not understood here")
    mlp: MLP
    if fields.given("num_experts"):
        fields.ignore("intermediate_size")
        shared = fields.count("shared_expert_intermediate_size", 0, least=0)
        mlp = routed(
            fields,
            experts=expert_count(fields),
            width=fields.count("moe_intermediate_size"),
            act=act,
            options=router(fields),
            shared=1 if shared else 0,
            shared_width=shared or None,
            shared_gate=shared > 0,
        )
    else:
        mlp = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    layers = []
    for kind in _kinds(fields, count):
        if kind not in ("full_attention", "linear_attention"):
            raise InvalidExperiment(
                f"{fields.label}: layer_types has {kind!r}; it may hold full_attention and linear_attention"
            )
        layers.append(Layer(mixer=attention if kind == "full_attention" else delta, mlp=mlp))
    return assemble(fields, layers)


def read_olmo_hybrid(fields: Fields, model_type: str) -> LayeredModel:
    """OLMo Hybrid: layers with the gated delta rule have norms of inputs, those with attention norms of outputs."""
    count, act = layer_count(fields), activation(fields)
    fields.ignore(*("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"))
    bias = fields.flag("attention_bias", False)
    positions = None if _has_no_base(fields) else rope(fields)
    fields.ignore("rope_parameters", "rope_theta", "rope_scaling")
    attention = grouped(fields, positions=positions, bias=bias, output_bias=bias, norm="all_heads")
    mlp = DenseMLP(width=fields.count("intermediate_size"), activation=act)
    kinds = {
        "linear_attention": Layer(mixer=_delta(fields), mlp=mlp),
        "full_attention": Layer(mixer=attention, mlp=mlp, outputs_normed=True),
    }
    listed = fields.listing("layer_types", count)
    if set(listed) - set(kinds):
        raise InvalidExperiment(f"{fields.label}: layer_types may hold full_attention and linear_attention")
    named = {
        "rates of the gated delta rule of up to 2": fields.flag("linear_allow_neg_eigval", True),
        "norms of recurrent heads with an epsilon of 1e-05": fields.number("rms_norm_eps", 1e-6) != 1e-5,
    }
    same_cost = tuple(name for name, differs in named.items() if differs)
    return assemble(fields, [kinds[kind] for kind in listed], same_cost=same_cost)


def _has_no_base(fields: Fields) -> bool:
    """Whether the base of positions is given as null, which means no positions; a base that is missing is the usual
    one."""
    parameters = fields.value("rope_parameters", None)
    if isinstance(parameters, Mapping):
        return "rope_theta" in parameters and parameters["rope_theta"] is None
    return "rope_theta" in fields.names() and not fields.given("rope_theta")


def _delta(fields: Fields) -> GatedDeltaRule:
    return GatedDeltaRule(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        kernel=fields.count("linear_conv_kernel_dim"),
    )


def _kinds(fields: Fields, count: int) -> list[str]:
    step = fields.count("full_attention_interval", 4)
    if fields.given("layer_types"):
        return fields.listing("layer_types", count)
    return ["linear_attention" if (at + 1) % step else "full_attention" for at in range(count)]


def read_minimax(fields: Fields, model_type: str) -> LayeredModel:
    """MiniMax-01: lightning attention and full attention, experts in every layer. Factors of residuals cost nothing."""
    count, act = layer_count(fields), activation(fields)
    sides = [f"{part}_{factor}_factor" for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")]
    fields.ignore(*sides, "sliding_window")
    full = grouped(fields, positions=rope(fields))
    linear = LightningAttention(heads=full.heads, head_dim=full.head_dim, block=fields.count("block_size", 256))
    experts = routed(
        fields,
        experts=fields.count("num_local_experts"),
        width=fields.count("intermediate_size"),
        act=act,
        options=router(fields),
    )
    usual = ["linear_attention" if at % 2 else "full_attention" for at in range(count)]
    kinds = fields.listing("layer_types", count) if fields.given("layer_types") else usual
    if wrong := [kind for kind in kinds if kind not in ("full_attention", "linear_attention")]:
        raise InvalidExperiment(
            f"{fields.label}: layer_types has {wrong[0]!r}; it may hold full_attention and linear_attention"
        )
    return assemble(fields, [Layer(mixer=full if kind == "full_attention" else linear, mlp=experts) for kind in kinds])


def read_nemotron_h(fields: Fields, model_type: str) -> LayeredModel:
    """Nemotron-H and Nemotron 3: every block has one part alone, either a mixer or an MLP, and one norm."""
    if not fields.given("num_hidden_layers"):
        named = fields.value("layers_block_type", None) or fields.value("hybrid_override_pattern")
        fields.assume({"num_hidden_layers": len(named)})
    count, hidden = layer_count(fields), fields.count("hidden_size")
    fields.ignore(
        *("expand", "chunk_size", "mamba_hidden_act", "rope_theta", "partial_rotary_factor", "time_step_floor"),
        *("time_step_max", "time_step_min", "time_step_limit", "time_step_rank", "sliding_window"),
        *("mamba_dt_init_floor", "mamba_dt_limit", "mamba_dt_max", "mamba_dt_min", "mamba_expand", "mamba_chunk_size"),
        *("rope_parameters", "rope_scaling", "moe_shared_expert_overlap"),
        *("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    )
    act = activation(fields, "mlp_hidden_act", "relu2")
    bias = fields.flag("attention_bias", False)
    attention = grouped(
        fields, bias=bias, output_bias=bias, head_dim=fields.count("attention_head_dim", also=("head_dim",))
    )
    mamba = Mamba2(
        heads=fields.count("mamba_num_heads"),
        head_dim=fields.count("mamba_head_dim"),
        groups=fields.count("n_groups", also=("mamba_n_groups",)),
        state=fields.count("ssm_state_size"),
        kernel=fields.count("conv_kernel", also=("mamba_d_conv",)),
        bias=fields.flag("mamba_proj_bias", False, also=("use_bias",)),
        convolution_bias=fields.flag("use_conv_bias", True, also=("mamba_conv_bias",)),
    )
    blocks = {"M": Layer(mixer=mamba, mlp=None, norms=1), "*": Layer(mixer=attention, mlp=None, norms=1)}
    pattern = _pattern(fields, count)
    if "-" in pattern:
        dense = DenseMLP(
            width=fields.count("intermediate_size"), activation=act, gated=False, bias=fields.flag("mlp_bias", False)
        )
        blocks["-"] = Layer(mixer=None, mlp=dense, norms=1)
    fields.ignore("intermediate_size", "mlp_bias")
    if "E" in pattern:
        narrow = fields.count("moe_latent_size", 0, least=0)
        experts = routed(
            fields,
            experts=expert_count(fields),
            width=fields.count("moe_intermediate_size"),
            act=act,
            options=router(fields, score="sigmoid", correction=True),
            shared=fields.count("n_shared_experts", 0, least=0),
            shared_width=fields.count("moe_shared_expert_intermediate_size", least=1)
            if fields.given("moe_shared_expert_intermediate_size")
            else None,
            gated=False,
            latent=narrow if narrow != hidden else 0,
        )
        blocks["E"] = Layer(mixer=None, mlp=experts, norms=1)
    else:  # transformers 5 writes its defaults of experts into files of models that have none
        fields.ignore(
            *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
            *("moe_latent_size", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group"),
            *("norm_topk_prob",),
        )
    return assemble(fields, [blocks[letter] for letter in pattern])


_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}


def _pattern(fields: Fields, count: int) -> list[str]:
    """One letter a block: M Mamba-2, * attention, - MLP, E experts."""
    if fields.given("layers_block_type"):
        kinds = fields.listing("layers_block_type", count)
        fields.ignore("hybrid_override_pattern")
        letters = [_LETTERS.get(str(kind), str(kind)) for kind in kinds]
    else:
        letters = list(str(fields.value("hybrid_override_pattern")))
    if len(letters) != count or set(letters) - set("M*-E"):
        raise InvalidExperiment(
            f"{fields.label}: hybrid_override_pattern must have {count} letters of M, *, - and E; it has {len(letters)}"
        )
    return letters
