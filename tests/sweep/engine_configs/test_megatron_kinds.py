"""What is exported for Megatron of layers that numbers cannot describe, read by its own command line where `packages`
has installed it, and what is refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from sweep.engine_configs.export import engine_config
from sweep.engine_configs.megatron_kinds import pattern
from tests.sweep.engine_configs.layouts import layout
from tests.sweep.engine_configs.megatron_reads import VERSION, folder
from tests.sweep.engine_configs.test_megatron_parser import job, run
from workloads.costs.shape.partition import experiment_layers
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.layer_list import LayerList
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, Mamba2
from workloads.spec.layer_kinds.spans import Full, Window
from workloads.spec.model_layers import layers_of

installed = pytest.mark.skipif(
    not folder().is_dir() or importlib.util.find_spec("triton") is None,
    reason=f"megatron-core {VERSION} or triton not installed ({__package__}/packages)",
)
ALL_OR_NONE = pytest.mark.drawn(one_in=1, whole=True)
"""One start of Megatron, which takes most of the time, reads for all of them."""
FIELDS: Mapping[str, Any] = {"dp": 4, "zero_stage": 1, "ep": 2, "global_batch_size": 8}
STAGES: Mapping[str, Any] = {"dp": 2, "zero_stage": 1, "pp": 2, "global_batch_size": 8}
CHOSEN = {
    "gpt-oss": layout("gpt_oss_20b_8_layers", **FIELDS),
    "gpt-oss, stages": layout("gpt_oss_20b_8_layers", **STAGES),
    "gpt-oss, cp": layout("gpt_oss_20b_8_layers", cp=2, cp_kind="ulysses", attention="cudnn", global_batch_size=8),
    "Qwen3.5": layout("qwen3_5_35b_a3b_8_layers", **FIELDS),
    "Qwen3.5 with a module": layout("qwen3_5_35b_a3b_8_layers", modules=1, **FIELDS),
    "Nemotron": layout("nemotron_3_nano_14_layers", **FIELDS),
    "Nemotron, stages": layout("nemotron_3_nano_14_layers", **STAGES),
    "Nemotron, virtual stages": layout(
        "nemotron_3_nano_14_layers", **STAGES, pp_schedule="interleaved_1f1b", virtual_stages=2
    ),
}


def changed(
    e: Experiment, mixer: Mapping[str, Any], mlp: Mapping[str, Any] | None = None, kinds: tuple[int, ...] = (0,)
) -> Experiment:
    """The layout with other fields in some kinds of layers."""
    layers = layers_of(e.model)
    new = list(layers.kinds)
    for at in kinds:
        new[at] = dataclasses.replace(
            new[at],
            mixer=dataclasses.replace(new[at].mixer, **mixer),
            mlp=dataclasses.replace(new[at].mlp, **(mlp or {})),
        )
    listed: LayerList = dataclasses.replace(layers, kinds=tuple(new))
    return e.replace(model=dataclasses.replace(e.model, layers=listed))


def main_layers(e: Experiment) -> list[Layer]:
    layers = layers_of(e.model).without_modules()
    return [layers.kinds[at] for at in layers.order]


@cache
def read() -> dict[str, dict[str, Any]]:
    """What Megatron made of every job: one process for all."""
    jobs = {name: job(e) for name, e in CHOSEN.items()}
    jobs["two activations"] = job(CHOSEN["Nemotron"], {"--swiglu": ""})
    jobs["heads of two"] = job(CHOSEN["Qwen3.5"], {"--linear-num-key-heads": "3"})
    jobs["a pattern of another length"] = job(CHOSEN["gpt-oss"], {"--no-rope-freq": "[0,1]"})
    return run(jobs)[1]


def expected(e: Experiment) -> dict[str, Any]:
    """What the layers mean, by the names of Megatron's arguments and configuration."""
    layers = main_layers(e)
    attention = next(layer.mixer for layer in layers if isinstance(layer.mixer, Attention))
    windows = [isinstance(getattr(layer.mixer, "span", Full()), Window) for layer in layers]
    routed = next(layer.mlp for layer in layers if isinstance(layer.mlp, RoutedMLP))
    found: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": e.model.hidden_size,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        "kv_channels": attention.head_dim,
        "softmax_type": "learnable" if attention.sinks else "vanilla",
        "attention_output_gate": attention.gate == "element",
        "qk_layernorm": attention.norm == "head",
        "add_bias_linear": attention.bias,
        "add_qkv_bias": attention.bias,
        "bias_activation_fusion": routed.expert.activation == "silu",
        "bias_dropout_fusion": not routed.expert.bias,
        "position_embedding_type": "rope" if attention.rope else "none",
        "rotary_percent": attention.rope.rotated if attention.rope else 1.0,
        "num_moe_experts": routed.experts,
        "moe_router_topk": routed.chosen,
        "moe_ffn_hidden_size": routed.expert.width,
        "moe_shared_expert_intermediate_size": routed.shared.width if routed.shared is not None else None,
        "moe_shared_expert_gate": routed.shared_gate,
        "gated_linear_unit": routed.expert.gated,
        "glu_linear_offset": routed.expert.offset,
        "activation_func_clamp_value": routed.expert.limit or None,
        "mtp_num_layers": e.model.mtp_modules or None,
    }
    if any(windows):
        found |= {"window_size": [127, 0], "window_attn_skip_freq": [int(window) for window in windows]}
    else:
        found |= {"window_size": None}
    delta = [isinstance(layer.mixer, GatedDeltaRule) for layer in layers]
    if any(delta):
        rule = next(layer.mixer for layer in layers if isinstance(layer.mixer, GatedDeltaRule))
        found |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [int(d) for d in delta]}
        found |= {"linear_num_key_heads": rule.key_heads, "linear_num_value_heads": rule.value_heads}
        found |= {"linear_key_head_dim": rule.key_dim, "linear_value_head_dim": rule.value_dim}
    return found


@installed
@pytest.mark.slow
@ALL_OR_NONE
@pytest.mark.parametrize("name", CHOSEN)
def test_it_takes_what_is_exported(name: str) -> None:
    e, found = CHOSEN[name], read()[name]
    assert "refused" not in found, found
    values = {**found["args"], **found["config"]}
    wanted = expected(e)
    assert {key: values[key] for key in wanted} == wanted
    activation = next(layer.mlp.expert for layer in main_layers(e) if isinstance(layer.mlp, RoutedMLP)).activation
    names = {"clamped_silu": "quick_gelu", "silu": "silu", "relu2": "squared_relu"}
    assert names[activation] in str(values["activation_func"])
    if "Nemotron" in name:
        assert found["args"]["hybrid_layer_pattern"].replace("|", "") == symbols(main_layers(e))
        assert found["args"]["virtual_pipeline_model_parallel_size"] == (
            e.virtual_stages if e.virtual_stages > 1 else None
        )
        parts = found["args"]["hybrid_layer_pattern"].split("|")
        assert [len(part) for part in parts] == [len(stage) for stage in experiment_layers(e)]
        rule = next(layer.mixer for layer in main_layers(e) if isinstance(layer.mixer, Mamba2))
        sizes = {"num_heads": rule.heads, "head_dim": rule.head_dim, "num_groups": rule.groups, "state_dim": rule.state}
        assert {key: values[f"mamba_{key}"] for key in sizes} == sizes


def symbols(layers: list[Layer]) -> str:
    """Megatron's letters: E routed experts, M Mamba-2, * attention."""
    return "".join("E" if layer.mlp else "M" if isinstance(layer.mixer, Mamba2) else "*" for layer in layers)


@installed
@pytest.mark.slow
@ALL_OR_NONE
def test_what_is_written_could_not_be_left_out() -> None:
    assert "AssertionError" in read()["two activations"]["refused"]
    assert "multiple of" in read()["heads of two"]["refused"]
    assert "no_rope" in read()["a pattern of another length"]["refused"]


OSS, QWEN, NEMOTRON = CHOSEN["gpt-oss"], CHOSEN["Qwen3.5"], CHOSEN["Nemotron"]
OSS_MLP = next(layer.mlp for layer in main_layers(OSS) if isinstance(layer.mlp, RoutedMLP))
REFUSED: Mapping[str, tuple[Experiment, str]] = {
    "windows of two sizes": (changed(OSS, {"span": Window(64)}, kinds=(1,)), r"windows have one size, not 64 and 128"),
    "a ring of windows": (OSS.replace(cp=2, cp_kind="ring", ep=1), r"cp_kind=ring \(.*windows; allgather or ulysses"),
    "sinks on gathered keys": (
        OSS.replace(cp=2, cp_kind="allgather", ep=1),
        r"cp_kind=allgather \(.*sinks.*ulysses would",
    ),
    "sinks in FlashAttention": (OSS.replace(attention="flash"), r"attention=flash \(.*auto, cudnn or math would work"),
    "sinks in one kind": (changed(OSS, {"sinks": False}), r"model.layers \(its sinks are in all layers of attention"),
    "biases in one kind": (changed(OSS, {"bias": False}), r"model.layers \(it has biases of all projections"),
    "divided experts with biases": (
        layout("gpt_oss_20b_8_layers", tp=2, etp=2, global_batch_size=8),
        r"etp=2 \(it does not divide experts with biases; 1 would work",
    ),
    "a steeper gate": (
        changed(OSS, {}, {"expert": dataclasses.replace(OSS_MLP.expert, slope=2.0)}, kinds=(0, 1)),
        r"the slope 1.702, not 2",
    ),
    "modules of windows": (layout("gpt_oss_20b_8_layers", modules=1, **FIELDS), r"model.mtp_modules=1"),
    "modules of hybrids": (layout("nemotron_3_nano_14_layers", modules=1, **FIELDS), r"model.mtp_modules=1"),
    "a ring alone for latents": (
        layout("deepseek_v2_lite", cp=2, cp_kind="ulysses", global_batch_size=8),
        r"cp_kind=ulysses \(Transformer Engine has only the ring",
    ),
    "chunks": (layout("llama4_scout_4_layers", **FIELDS), r"no writer for chunked 8192 attention"),
    "heads that differ": (layout("gemma_4_26b_a4b_6_layers", **FIELDS), r"no writer for a norm of values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_lacks_is_refused_by_name(name: str) -> None:
    e, why = REFUSED[name]
    with pytest.raises(UnsupportedByEngine, match=why):
        engine_config(e, "megatron")


def test_a_pattern_is_short_and_whole() -> None:
    assert pattern([True, False] * 12) == "([1]*1+[0]*1)*12"
    assert pattern([False] * 3 + [True] * 4) == "([0]*3+[1]*4)"
    assert pattern([True] * 5) == "([1]*1)*5"
