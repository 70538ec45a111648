"""Readers of families of models with softmax attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.spec.config_json.dense_families import NORMED_AFTER_ROTATION, published_by_hunyuan
from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.parts import (
    activation,
    assemble,
    clamp,
    expert_count,
    grouped,
    layer_count,
    rope,
    routed,
    routed_from,
    router,
    shared_count,
    spans_of,
)
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, BlockSparseAttention, Indexer
from workloads.spec.layer_kinds.mlp import MLP, DenseMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.spans import Chunk, Full, Window


def read_mixtral(fields: Fields, model_type: str) -> LayeredModel:
    act = activation(fields)
    window = Window(fields.count("sliding_window")) if fields.given("sliding_window") else Full()
    mlp = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("intermediate_size"),
        act=act,
        options=router(fields),
    )
    layer = Layer(mixer=grouped(fields, span=window, positions=rope(fields)), mlp=mlp)
    return assemble(fields, [layer] * layer_count(fields))


def read_qwen_moe(fields: Fields, model_type: str) -> LayeredModel:
    """Qwen2 and Qwen3 with experts, OLMoE and FlexOlmo, whose norms are of outputs."""
    if model_type == "flex_olmo":
        fields.assume({"rope_theta": 500_000.0})
    count, act = layer_count(fields), activation(fields)
    qwen2, olmoe = model_type == "qwen2_moe", model_type in ("olmoe", "flex_olmo")
    bias = fields.flag("qkv_bias", True) if qwen2 else fields.flag("attention_bias", False)
    kinds = fields.listing("layer_types", count) if fields.given("layer_types") else []
    if fields.value("use_sliding_window", False) or set(kinds) - {"full_attention"}:
        raise InvalidExperiment(f"{fields.label}: sliding windows are not understood beside these experts")
    fields.ignore("sliding_window", "max_window_layers")
    attention = grouped(
        fields,
        positions=rope(fields),
        bias=bias,
        output_bias=bias and not qwen2,
        norm="none" if qwen2 else "all_heads" if olmoe else "head",
    )
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("intermediate_size" if olmoe else "moe_intermediate_size"),
        act=act,
        options=router(fields, normalize=False),
        shared=1 if qwen2 else 0,
        shared_width=fields.count("shared_expert_intermediate_size") if qwen2 else None,
        shared_gate=qwen2,
    )
    only, step = fields.value("mlp_only_layers", []), fields.count("decoder_sparse_step", 1)
    if not isinstance(only, list):
        raise InvalidExperiment(f"{fields.label}: mlp_only_layers must be a list")
    dense = _dense(fields, act, needed=bool(only) or step > 1)
    layers = [
        Layer(
            mixer=attention,
            mlp=dense if dense and (at in only or (at + 1) % step) else experts,
            outputs_normed=model_type == "flex_olmo",
        )
        for at in range(count)
    ]
    return assemble(fields, layers)


def _dense(fields: Fields, act: str, *, needed: bool, name: str = "intermediate_size") -> DenseMLP | None:
    """The MLP of layers without experts; None if there are none, whatever width the file names."""
    if not needed:
        fields.ignore(name)
        return None
    return DenseMLP(width=fields.count(name), activation=act)


def read_minimax_m2(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields)
    normed = fields.flag("use_qk_norm", True)
    fields.choice("qk_norm_type", ("per_layer",), "per_layer")
    fields.choice("shared_intermediate_size", (0,), 0)
    size = fields.count("head_dim")
    positions = rope(fields)
    rotated = fields.count("rotary_dim", size)
    if rotated != size:
        positions = type(positions)(positions.theta, rotated / size, positions.scaling)
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("intermediate_size"),
        act=act,
        options=router(fields, score="sigmoid", correction=fields.flag("use_routing_bias", True)),
    )
    fields.ignore("attn_type_list")
    attention = grouped(fields, positions=positions, norm="all_heads" if normed else "none")
    return assemble(fields, [Layer(mixer=attention, mlp=experts)] * count)


def read_minimax_m3(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields)
    fields.choice("attention_output_gate", (False,), False)
    fields.choice("qk_norm_type", ("per_head",), "per_head")
    fields.ignore("use_gemma_norm", "rotary_dim")
    # MiniMaxM3VLTextConfig of transformers
    clamped = clamp(fields, limit=7.0, slope=1.702, offset=1.0) if act == "clamped_silu" else None
    fields.ignore("swiglu_alpha", "swiglu_limit")
    attention = grouped(fields, positions=rope(fields), norm="head" if fields.flag("use_qk_norm", True) else "none")
    indexed, where = _block_sparse(fields, count, attention)
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size", also=("intermediate_size",)),
        act=act,
        options=router(fields, score="sigmoid", correction=fields.flag("use_routing_bias", True)),
        shared=fields.count("n_shared_experts", 1 if fields.given("shared_intermediate_size") else 0, least=0),
        shared_width=fields.count("shared_intermediate_size", 0, least=0) or None,
        clamped=clamped,
    )
    dense = DenseMLP(width=fields.count("dense_intermediate_size"), activation=act, **(clamped or {}))
    routes = routed_from(fields, count)
    layers = [
        Layer(mixer=indexed if chosen else attention, mlp=experts if routes[at] else dense)
        for at, chosen in enumerate(where)
    ]
    return assemble(fields, layers)


def _block_sparse(fields: Fields, count: int, attention: Attention) -> tuple[BlockSparseAttention, list[bool]]:
    """Attention over chosen blocks, and which layers have it, by ``sparse_attention_config``, or by ``layer_types`` and
    the fields that transformers 5 makes of it."""
    if not fields.given("sparse_attention_config"):
        fields.ignore("index_local_blocks")
        block = fields.count("index_block_size")
        indexer = Indexer(
            heads=fields.count("index_n_heads"),
            head_dim=fields.count("index_head_dim"),
            chosen=fields.count("index_topk_blocks") * block,
        )
        kinds = fields.listing("layer_types", count)
        if set(kinds) - {"full_attention", "minimax_m3_sparse"}:
            raise InvalidExperiment(f"{fields.label}: layer_types may hold full_attention and minimax_m3_sparse")
        where = [kind == "minimax_m3_sparse" for kind in kinds]
        return BlockSparseAttention(attention=attention, indexer=indexer, block=block), where
    fields.ignore(
        *("index_local_blocks", "index_block_size", "index_n_heads", "index_head_dim", "index_topk_blocks"),
        "layer_types",
    )
    sparse = fields.part("sparse_attention_config")
    block = sparse.count("sparse_block_size")
    indexer = Indexer(
        heads=sparse.count("sparse_num_index_heads"),
        head_dim=sparse.count("sparse_index_dim"),
        chosen=sparse.count("sparse_topk_blocks") * block,
    )
    chosen = sparse.listing("sparse_attention_freq", count)
    if sparse.listing("sparse_disable_index_value", count) != chosen:
        raise InvalidExperiment(f"{sparse.label}: sparse_disable_index_value must equal sparse_attention_freq")
    sparse.choice("use_sparse_attention", (True,), True)
    sparse.ignore("sparse_init_block", "sparse_local_block", "sparse_score_type")
    sparse.refuse_unread()
    return BlockSparseAttention(attention=attention, indexer=indexer, block=block), [bool(one) for one in chosen]


def read_gpt_oss(fields: Fields, model_type: str) -> LayeredModel:
    count = layer_count(fields)
    fields.ignore("initial_context_length")
    activation(fields)
    bias = fields.flag("attention_bias", True)
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("intermediate_size"),
        act="clamped_silu",
        options=router(fields, score="softmax_of_chosen"),
        clamped=clamp(fields, limit=7.0, slope=1.702, offset=1.0),  # GptOssConfig of transformers
        expert_bias=True,
        router_bias=True,
    )
    layers = [
        Layer(
            mixer=grouped(fields, span=span, positions=rope(fields), bias=bias, output_bias=bias, sinks=True),
            mlp=experts,
        )
        for span in spans_of(fields, count)
    ]
    return assemble(fields, layers)


def read_llama4(fields: Fields, model_type: str) -> LayeredModel:
    count, act = layer_count(fields), activation(fields)
    chunk = Chunk(fields.count("attention_chunk_size"))
    bias = fields.flag("attention_bias", False)
    normed = fields.flag("use_qk_norm", True)
    fields.ignore(
        "attn_temperature_tuning", "attn_scale", "floor_scale", "for_llm_compressor", "moe_layers", "layer_types"
    )
    interval = fields.count("no_rope_layer_interval", 4)
    rotated = (
        [entry == 1 for entry in fields.listing("no_rope_layers", count)]
        if fields.value("no_rope_layers", None)
        else [bool((at + 1) % interval) for at in range(count)]
    )
    width = fields.count("intermediate_size")
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=width,
        act=act,
        options=router(fields, score="sigmoid", normalize=False),
        shared=1,
        weights_inputs=True,
    )
    step = fields.count("interleave_moe_layer_step", 1)
    dense = _dense(fields, act, needed=step > 1, name="intermediate_size_mlp")
    layers: list[Layer] = []
    for at in range(count):
        attention = grouped(
            fields,
            span=chunk if rotated[at] else Full(),
            positions=rope(fields) if rotated[at] else None,
            bias=bias,
            output_bias=bias,
            norm="without_weight" if normed and rotated[at] else "none",
        )
        mlp: MLP = dense if dense is not None and (at + 1) % step else experts
        layers.append(Layer(mixer=attention, mlp=mlp))
    return assemble(fields, layers)


_GLM4_MOE: Mapping[str, Mapping[str, Any]] = {
    "dots1": {"use_qk_norm": True},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "sarvam_moe": {
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "head_dim": 64,
        "rope_theta": 8_000_000.0,
        "routed_scaling_factor": 2.5,
    },
    "solar_open": {"head_dim": 128, "rope_theta": 1_000_000.0},
}
"""What families of GLM-4.5's layers take for fields that a file leaves out."""


def read_glm4_moe(fields: Fields, model_type: str) -> LayeredModel:
    """GLM-4.5 and its like, dots.llm1, Sarvam, and Solar Open, which has experts in every layer and no norm of queries
    and keys."""
    fields.assume(_GLM4_MOE.get(model_type, {}))
    if model_type == "dots1":
        fields.ignore("max_window_layers")
    if model_type == "solar_open":
        fields.choice("use_qk_norm", (False,), False)
        fields.choice("first_k_dense_replace", (0,), 0)
    if model_type == "sarvam_moe":
        width = fields.count("moe_intermediate_size")
        for name, only in (("use_rmsnorm", True), ("moe_router_enable_expert_bias", True)):
            fields.choice(name, (only,), only)
        fields.choice("score_function", ("sigmoid",), "sigmoid")
        fields.choice("moe_shared_expert_intermediate_size", (width,), width)
    count, act = layer_count(fields), activation(fields)
    attention = grouped(
        fields,
        positions=rope(fields),
        bias=fields.flag("attention_bias", False, also=("use_qkv_bias",)),
        norm="head" if fields.flag("use_qk_norm", False) else "none",
    )
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=router(fields, score="sigmoid", correction=True),
        shared=shared_count(fields, 0),
    )
    routes = routed_from(fields, count)
    dense = _dense(fields, act, needed=not all(routes))
    return assemble(fields, [Layer(mixer=attention, mlp=dense if dense and not route else experts) for route in routes])


def read_hy_v3(fields: Fields, model_type: str) -> LayeredModel:
    """Hy3 of Tencent: as GLM-4.5, with biases of the attention's output if there are any."""
    fields.assume(
        {"head_dim": 128, "rope_theta": 11_158_840.0, "first_k_dense_replace": 1, "router_scaling_factor": 2.826}
    )
    count, act = layer_count(fields), activation(fields)
    fields.choice("mlp_bias", (False,), False)
    fields.choice("qk_norm", (True,), True)
    fields.ignore("enable_moe_fp32_combine")
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, positions=rope(fields), bias=bias, output_bias=bias, norm="head")
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size", also=("expert_hidden_dim",)),
        act=act,
        options=router(fields, score="sigmoid", correction=True),
        shared=shared_count(fields, 1),
    )
    routes = routed_from(fields, count)
    dense = _dense(fields, act, needed=not all(routes))
    return assemble(fields, [Layer(mixer=attention, mlp=dense if dense and not route else experts) for route in routes])


def read_hunyuan_moe(fields: Fields, model_type: str) -> LayeredModel:
    """Hunyuan with experts in every layer, beside a shared one. Sizes of experts may be lists of equal entries."""
    published_by_hunyuan(fields)
    count, act, width = layer_count(fields), activation(fields), fields.count("intermediate_size")
    fields.choice("use_mixed_mlp_moe", (True,), True)
    fields.choice("moe_layer_num_skipped", (0,), 0)
    for name, only in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if fields.given(name) and _in_each_layer(fields, name, count) != only:
            raise InvalidExperiment(f"{fields.label}: {name} must be {only}, which transformers takes in any case")
    fields.ignore("moe_drop_tokens", "moe_random_routing_dropped_token")
    bias = fields.flag("attention_bias", False)
    attention = grouped(fields, positions=rope(fields), bias=bias, output_bias=bias, norm="head")
    experts = routed(
        fields,
        experts=_in_each_layer(fields, "num_experts", count),
        chosen=_in_each_layer(fields, "moe_topk", count),
        width=width,
        act=act,
        options=router(fields),
        shared=1,
    )
    return assemble(fields, [Layer(mixer=attention, mlp=experts)] * count, same_cost=(NORMED_AFTER_ROTATION,))


def _in_each_layer(fields: Fields, name: str, count: int) -> int:
    """A whole number that holds for all layers, which a file may give for each."""
    if not isinstance(fields.value(name), list):
        return fields.count(name)
    entries = fields.listing(name, count)
    if len(set(entries)) != 1:
        raise InvalidExperiment(f"{fields.label}: {name} may not differ by layer")
    return Fields(fields.label, {name: entries[0]}).count(name)


def read_ernie_moe(fields: Fields, model_type: str) -> LayeredModel:
    """ERNIE 4.5 with experts in some layers."""
    fields.assume({"rope_theta": 500_000.0})
    count, act = layer_count(fields), activation(fields)
    fields.choice("use_bias", (False,), False)
    fields.choice("use_rmsnorm", (True,), True)
    fields.ignore("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free")
    attention = grouped(fields, positions=rope(fields))
    experts = routed(
        fields,
        experts=expert_count(fields),
        width=fields.count("moe_intermediate_size"),
        act=act,
        options=router(fields, correction=True),
        shared=shared_count(fields, 2),
    )
    first, step = fields.count("moe_layer_start_index", 1, least=0), fields.count("moe_layer_interval", 1)
    last = fields.value("moe_layer_end_index", -1)
    last = count - 1 if last == -1 else fields.count("moe_layer_end_index", least=0)
    routes = [first <= at <= last and (at + 1) % step == 0 for at in range(count)]
    dense = _dense(fields, act, needed=not all(routes))
    layers = [Layer(mixer=attention, mlp=dense if dense and not route else experts) for route in routes]
    return assemble(fields, layers, tied=True)
