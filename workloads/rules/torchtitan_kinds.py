"""The models of torchtitan with layers that numbers do not describe, gpt-oss and Llama 4: which of them a model is, and
what it has that torchtitan's class lacks. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from workloads.spec.engine_versions import ENGINES
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.spans import Chunk, Full, Window
from workloads.spec.model_spec import ModelSpec, layers_of

Family = Literal["gpt_oss", "llama4"]
FAMILIES: Mapping[Family, str] = {"gpt_oss": "gpt-oss", "llama4": "Llama 4"}
"""By family, what its models are called."""
SLOPE, OFFSET = 1.702, 1.0
"""Constants of clamped SwiGLU that gpt-oss's experts have in torchtitan's code."""


def kinds_family(model: ModelSpec) -> Family | None:
    """The family whose experts a model has, whatever else it has: clamped SwiGLU is gpt-oss's, weights on the inputs
    of experts are Llama 4's; None for every other model."""
    if model.layers is None:
        return None
    routed = [kind.mlp for kind in model.layers.kinds if isinstance(kind.mlp, RoutedMLP)]
    if any(mlp.expert.activation == "clamped_silu" for mlp in routed):
        return "gpt_oss"
    return "llama4" if any(mlp.weights_inputs for mlp in routed) else None


def kinds_lacking(model: ModelSpec, seq_len: float, version: str) -> list[str]:
    """What torchtitan's class of the family lacks, or has in every model and this one has not, by name; empty if it
    computes what the model does with sequences of this length. ``model``: one of a family."""
    listed = layers_of(model)
    layers = [listed.kinds[at] for at in listed.order]
    everywhere = _of_every_model(model, layers)
    if kinds_family(model) == "gpt_oss":
        own = _of_gpt_oss(layers, in_turn=version == ENGINES["torchtitan"])
    elif version != ENGINES["torchtitan"]:
        return [f"a class in this version; {ENGINES['torchtitan'].partition('+')[0]} has one"]
    else:
        own = _of_llama4(model, layers, seq_len)
    return list(dict.fromkeys([*everywhere, *own]))


def _of_every_model(model: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    if len(mixers) < len(layers) or any(layer.mlp is None for layer in layers):
        yield "layers without attention or without an MLP"
    if model.tie_embeddings:
        yield "tied embeddings"
    listed = layers_of(model)
    if listed.logit_cap or listed.scaled_embedding:
        yield "a cap of the logits or scaled embeddings"
    yield from listed.same_cost
    if listed.streams > 1:
        yield f"hyper-connections of {listed.streams} streams"
    if any(layer.norms != 2 or layer.outputs_normed for layer in layers):
        yield "other norms than one before each part"
    if any(layer.ahead for layer in layers):
        yield "modules of multi-token prediction"
    if len({(mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in mixers}) > 1:
        yield "heads that differ by layer"
    if len({mixer.rope.theta for mixer in mixers if mixer.rope is not None}) > 1:
        yield "rotary positions that differ by layer"
    for mixer in mixers:
        named = {
            "a norm of queries and keys": mixer.norm != "none",
            "an output gate of attention": mixer.gate != "none",
            "shared keys and values": mixer.shared_kv,
            "a cap of attention scores": mixer.soft_cap,
            "scaled or normed values": mixer.value_scale != 1.0 or mixer.value_norm,
            "another scale of scores": mixer.score_scale != 0.0,
            "values of another size than keys": mixer.value_dim != mixer.head_dim,
            "rotary positions of a part of each head": mixer.rope is not None and mixer.rope.rotated != 1.0,
        }
        yield from (name for name, has in named.items() if has)
    routed = [layer.mlp for layer in layers if isinstance(layer.mlp, RoutedMLP)]
    if len(set(routed)) > 1:
        yield "experts that differ by layer"
    if any(mlp.groups > 1 for mlp in routed):
        yield "experts that are chosen from groups"
    if any(mlp.latent or mlp.router_scales or mlp.hashed or mlp.shared_gate for mlp in routed):
        yield "latent experts, looked-up experts, scales of the router or a gate of the shared expert"


def _of_gpt_oss(layers: Sequence[Layer], *, in_turn: bool) -> Iterator[str]:
    spans = [layer.mixer.span for layer in layers if isinstance(layer.mixer, Attention)]
    windows = {span.size for span in spans if isinstance(span, Window)}
    if any(not isinstance(span, Full | Window) for span in spans):
        yield "chunks"
    if len(windows) > 1:
        yield "windows of several sizes"
    if in_turn and [isinstance(span, Window) for span in spans] != [at % 2 == 0 for at in range(len(spans))]:
        yield "windows in other layers than the first, third, fifth ..."
    for layer in layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, Attention):
            if not (mixer.sinks and mixer.bias and mixer.output_bias):
                yield "attention without sinks or without biases"
            if mixer.rope is None:
                yield "attention without positions"
        if isinstance(mlp, DenseMLP):
            yield "dense layers"
        elif isinstance(mlp, RoutedMLP):
            expert = mlp.expert
            if (expert.activation, expert.slope, expert.offset) != ("clamped_silu", SLOPE, OFFSET) or not expert.limit:
                yield f"another activation than a clamped SwiGLU with slope {SLOPE} and offset {OFFSET:g}"
            if not (expert.bias and expert.gated and mlp.router_bias):
                yield "experts or a router without biases"
            if mlp.shared is not None:
                yield "shared experts"
            if mlp.weights_inputs:
                yield "router weights on the inputs of experts"
            if mlp.score not in ("softmax_of_chosen", "softmax"):
                yield f"router scores by {mlp.score}"


def _of_llama4(model: ModelSpec, layers: Sequence[Layer], seq_len: float) -> Iterator[str]:
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    for mixer in mixers:
        if mixer.heads * mixer.head_dim != model.hidden_size:
            yield "heads that do not make up the hidden size"
        if mixer.bias or mixer.output_bias or mixer.sinks:
            yield "biases or sinks of attention"
        if isinstance(mixer.span, Chunk) and mixer.span.size < seq_len:
            yield f"chunks shorter than the sequence ({mixer.span.size})"
        if isinstance(mixer.span, Window):
            yield "windows"
    if positionless_step(layers) is None:
        yield "layers without positions other than the first of every few"
    for layer in layers:
        mlp = layer.mlp
        if isinstance(mlp, DenseMLP) and (mlp.activation, mlp.gated, mlp.bias) != ("silu", True, False):
            yield f"{mlp.label} MLPs"
        if isinstance(mlp, RoutedMLP):
            if (mlp.expert.activation, mlp.expert.gated, mlp.expert.bias) != ("silu", True, False):
                yield f"{mlp.expert.label} experts"
            if mlp.router_bias:
                yield "a bias of the router"
            if mlp.score not in ("softmax", "sigmoid"):
                yield f"router scores by {mlp.score}"
            if mlp.shared is not None and mlp.shared.width != mlp.shared_experts * mlp.expert.width:
                yield "shared experts of another width"
    if routed_step(layers) is None:
        yield "experts in other layers than every n-th"
    dense = {layer.mlp.width for layer in layers if isinstance(layer.mlp, DenseMLP)}
    routed = {layer.mlp.expert.width for layer in layers if isinstance(layer.mlp, RoutedMLP)}
    if dense and dense != routed:
        yield "dense layers of another width than the experts'"


def positionless_step(layers: Sequence[Layer]) -> int | None:
    """n if layers 0, n, 2 n ... have no positions and all others have; 0 if all have; None for anything else."""
    without = [isinstance(layer.mixer, Attention) and layer.mixer.rope is None for layer in layers]
    if not any(without):
        return 0
    return next((n for n in range(2, len(without) + 1) if without == [at % n == 0 for at in range(len(without))]), None)


def routed_step(layers: Sequence[Layer]) -> int | None:
    """n if layers n - 1, 2 n - 1 ... have experts and no others; None for anything else."""
    routed = [layer.routed for layer in layers]
    return next(
        (n for n in range(1, len(routed) + 1) if routed == [(at + 1) % n == 0 for at in range(len(routed))]), None
    )
