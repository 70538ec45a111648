"""Megatron-Core's options for layers that numbers do not describe: windows, positions, sinks, gates, biases,
activations and what its experts have beside their sizes.

`workloads.rules.megatron_kinds` refuses what these options do not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from workloads.rules.megatron_kinds import parts_of
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.model_spec import ModelSpec, layers_of

_BIAS = re.compile(r"\.bias\d*$")
"""End of the name of a bias, numbered where products of experts are grouped."""


def kind_options(model: ModelSpec) -> dict[str, Any]:
    """Options of its configuration beside the sizes; empty for a model that numbers describe."""
    if model.layers is None:
        return {}
    layers = _layers(model)
    mixers = _mixers(layers)
    dense = [layer.mlp.width for layer in layers if isinstance(layer.mlp, DenseMLP)]
    return {
        **({"ffn_hidden_size": dense[0]} if dense else {}),
        **_attention(mixers),
        **_activation(parts_of(layers[0])[0]),
        **_experts(next((layer.mlp for layer in layers if isinstance(layer.mlp, RoutedMLP)), None)),
    }


def position_options(model: ModelSpec) -> dict[str, Any]:
    """Arguments of its model that say which positions it has."""
    ropes = [mixer.rope for mixer in _mixers(_layers(model))]
    rope = next((rope for rope in ropes if rope is not None), None)
    if rope is None:
        return {"position_embedding_type": "none"}
    return {"position_embedding_type": "rope", "rotary_base": rope.theta, "rotary_percent": rope.rotated}


def stores_scores(model: ModelSpec) -> bool:
    """Whether attention of its own layers must write every score: torch's fused one has neither windows nor sinks."""
    return any(mixer.sinks or isinstance(mixer.span, Window) for mixer in _mixers(_layers(model)))


def set_norms(block: TransformerBlockSubmodules, model: ModelSpec, first: int) -> None:
    """Norms of queries and keys without weights, in the layers of a chunk that have them. ``first``: index of its first
    layer. They come before the rotation there, which changes no length."""
    layers = [layer.mixer for layer in _layers(model)]
    for at, spec in enumerate(block.layer_specs):
        mixer = layers[first + at]
        if isinstance(mixer, Attention) and mixer.norm == "without_weight":
            block.layer_specs[at] = own = deepcopy(spec)
            attention = own.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = L2Norm


def mark_parameters(model: torch.nn.Module) -> None:
    """Mark sinks and biases of experts as parameters of which each tensor-parallel rank has its own: otherwise the
    gradient norm counts those of one rank, and gradients of the experts' second biases are summed over tp."""
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset") or (".experts." in name and _BIAS.search(name)):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def _attention(mixers: Sequence[Attention]) -> dict[str, Any]:
    options: dict[str, Any] = {"attention_output_gate": mixers[0].gate == "element"}
    if mixers[0].sinks:
        options["softmax_type"] = "learnable"
    if mixers[0].output_bias:
        options["add_bias_linear"] = True
        # Its grouped experts refuse biases with it.
        options["bias_dropout_fusion"] = False
    options["add_qkv_bias"] = mixers[0].bias and not mixers[0].output_bias
    windows = [isinstance(mixer.span, Window) for mixer in mixers]
    sizes = [mixer.span.size for mixer in mixers if isinstance(mixer.span, Window)]
    if sizes:  # earlier tokens, and later ones
        options |= {"window_size": (sizes[0] - 1, 0), "window_attn_skip_freq": [int(has) for has in windows]}
    without = [mixer.rope is None for mixer in mixers]
    if any(without) and not all(without):
        options["no_rope_freq"] = [int(has_none) for has_none in without]
    return options


def _activation(part: DenseMLP) -> dict[str, Any]:
    """Its fused kernel clamps before it adds the bias, and has no squared ReLU: both are left to torch."""
    if part.activation == "relu2":
        return {"gated_linear_unit": False, "activation_func": squared_relu, "bias_activation_fusion": False}
    if part.activation != "clamped_silu":
        return {}
    return {
        "activation_func": quick_gelu,
        "glu_linear_offset": part.offset,
        "activation_func_clamp_value": part.limit,
        "bias_activation_fusion": False,
    }


def _experts(mlp: RoutedMLP | None) -> dict[str, Any]:
    if mlp is None:
        return {}
    return {
        "moe_shared_expert_intermediate_size": None if mlp.shared is None else mlp.shared.width,
        "moe_shared_expert_gate": mlp.shared_gate,
        "moe_apply_probs_on_input": mlp.weights_inputs,
    }


def _layers(model: ModelSpec) -> list[Layer]:
    listed = layers_of(model)
    return [listed.kinds[at] for at in listed.order]


def _mixers(layers: Sequence[Layer]) -> list[Attention]:
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    assert len(mixers) == len(layers)
    return mixers
