"""What Megatron-Core's GPT model lacks of layers that numbers do not describe. No torch here.

Its options hold for all layers, except which of them have windows, positions and experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from workloads.rules.engine_kinds import adapters_lack
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_spec import ModelSpec, layers_of

SLOPE = 1.702
"""Of the gates of its ``quick_gelu``, the only ones that it clamps."""
_RUN = (
    "sliding ",
    "chunked ",  # refused where a chunk is shorter than the sequence
    "attention without positions",
    "rotary positions of a part",
    "biases of queries, keys and values",
    "a bias of the attention's output",
    "a norm of queries and keys without a weight",
    "an output gate of attention (one number for each element)",
    "attention sinks",
    "attention that differs by layer",
    "gated (clamped_silu)",
    "ungated (relu2)",
    "biases of experts",
    "a bias of the router",
    "dense layers after routed ones",
    "shared experts of another width",
    "a dense MLP beside the experts",
    "a gate of the shared expert",
    "router weights on the inputs of experts",
)
"""Beginnings of the names, in `workloads.spec.config_json.expressible`, of what `workloads.adapters.megatron` runs."""
_REASONS: Mapping[str, str] = {
    "gated delta rule": "it needs the package flash-linear-attention there, and its adapter has no weights for it",
    "KDA": "it has none",
    "Mamba-2": "it needs the package mamba_ssm and another model class there",
    "latent experts": "its adapter has no weights for their projections",
    "modules of multi-token prediction": "its adapter has no weights for them",
}
"""By the beginning of a name, why it is not run."""


def kinds_lacking(model: ModelSpec, seq_len: float) -> list[str]:
    """What Megatron-Core's GPT model lacks, or has in every layer or none, by name; empty if it computes what the model
    does with sequences of this length."""
    if model.layers is None:
        return []
    lacking = [_with_reason(name) for name in adapters_lack(model) if not name.startswith(_RUN)]
    listed = layers_of(model)
    layers = [listed.kinds[at] for at in listed.order]
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    found = [*lacking, *_of_attention(mixers, seq_len), *_of_mlps(layers), *_of_biases(mixers, layers)]
    return list(dict.fromkeys(found))


def _with_reason(name: str) -> str:
    reason = next((why for start, why in _REASONS.items() if name.startswith(start)), None)
    return name if reason is None else f"{name} ({reason})"


def _of_attention(mixers: Sequence[Attention], seq_len: float) -> Iterator[str]:
    if any(isinstance(mixer.span, Chunk) and mixer.span.size < seq_len for mixer in mixers):
        yield "chunks of attention that are shorter than the sequence"
    if len({mixer.span.size for mixer in mixers if isinstance(mixer.span, Window)}) > 1:
        yield "windows of several sizes"
    if len({(mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in mixers}) > 1:
        yield "heads that differ by layer"
    ropes = {mixer.rope for mixer in mixers if mixer.rope is not None}
    if len({(rope.theta, rope.rotated) for rope in ropes}) > 1:
        yield "rotary positions that differ by layer"
    if any(rope.proportional for rope in ropes):
        yield "proportional rotary positions"
    for what, has in (
        ("norms of queries and keys with weights", {mixer.norm == "head" for mixer in mixers}),
        ("output gates", {mixer.gate for mixer in mixers}),
        ("sinks", {mixer.sinks for mixer in mixers}),
    ):
        if len(has) > 1:
            yield f"{what} in some layers alone"


def _of_mlps(layers: Sequence[Layer]) -> Iterator[str]:
    parts = [part for layer in layers for part in parts_of(layer)]
    if len({(part.gated, part.activation, part.limit, part.slope, part.offset) for part in parts}) > 1:
        yield "several activations"
    if any(part.activation == "clamped_silu" and (part.slope != SLOPE or not part.gated) for part in parts):
        yield f"clamped gates with another slope than {SLOPE}"
    if len({layer.mlp.width for layer in layers if isinstance(layer.mlp, DenseMLP)}) > 1:
        yield "dense layers of several widths"
    routed = {layer.mlp for layer in layers if isinstance(layer.mlp, RoutedMLP)}
    if len(routed) > 1:
        yield "experts that differ by layer"
    if any(mlp.weights_inputs and mlp.chosen > 1 for mlp in routed):
        yield "weights on the inputs of several experts a token"


def _of_biases(mixers: Sequence[Attention], layers: Sequence[Layer]) -> Iterator[str]:
    """It has biases of queries, keys and values alone, or of all projections, experts and the router."""
    queries = {mixer.bias for mixer in mixers}
    others = {mixer.output_bias for mixer in mixers}
    others |= {part.bias for layer in layers for part in parts_of(layer)}
    routed = [layer.mlp for layer in layers if isinstance(layer.mlp, RoutedMLP)]
    others |= {mlp.router_bias for mlp in routed}
    if len(queries) > 1 or (True in others and {*queries, *others} != {True}):
        yield "biases of some projections (all, or those of queries, keys and values alone)"
    elif True in others and any(mlp.shared is not None for mlp in routed):
        yield "biases of shared experts"


def parts_of(layer: Layer) -> list[DenseMLP]:
    """The dense MLP of a layer, or its expert and what is shared beside it."""
    if isinstance(layer.mlp, RoutedMLP):
        return [layer.mlp.expert, *([layer.mlp.shared] if layer.mlp.shared is not None else [])]
    return [] if layer.mlp is None else [layer.mlp]
