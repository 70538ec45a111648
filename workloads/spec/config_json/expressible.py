"""What of a published model today's `ModelSpec` cannot express, by name, and the `ModelSpec` of one that it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, BlockSparseAttention, CompressedAttention, LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel, Mixer
from workloads.spec.layer_kinds.spans import Full
from workloads.spec.model_spec import ModelSpec, model_from_dict

Sparse = CompressedAttention | BlockSparseAttention
BIAS_STEP = 0.001
"""Change of a bias of the choice of experts after a step, which no file says: that of DeepSeek-V3."""


def not_expressible(model: LayeredModel) -> list[str]:
    """What today's `ModelSpec` cannot express, each once; empty if it can express the model exactly."""
    return list(dict.fromkeys(_missing(model)))


def _missing(model: LayeredModel) -> Iterator[str]:
    for layer, _ in model.distinct():
        yield from _missing_in(layer)
    if len({layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention | LatentAttention)}) > 1:
        yield "attention that differs by layer"
    dense = [isinstance(layer.mlp, DenseMLP) for layer in model.layers]
    if dense != sorted(dense, reverse=True):
        yield "dense layers after routed ones"
    if model.streams is not None:
        yield f"hyper-connections of {model.streams.streams} streams"
    if model.logit_cap:
        yield "a cap of the logits"
    yield from (what for what in model.left_out if what.startswith("residuals"))


def _missing_in(layer: Layer) -> Iterator[str]:
    if layer.mixer is None:
        yield "layers of an MLP alone"
    else:
        yield from _missing_in_mixer(layer.mixer)
    if layer.mlp is None:
        yield "layers of a mixer alone"
    elif isinstance(layer.mlp, RoutedMLP):
        yield from _missing_in_experts(layer.mlp)
    else:
        yield from _missing_in_mlp(layer.mlp)
    if layer.norms > 2:
        yield f"sandwich norms ({layer.norms} a layer)"


def _missing_in_mixer(mixer: Mixer) -> Iterator[str]:
    if isinstance(mixer, LatentAttention):
        named = {
            "latent attention without positions": mixer.rope is None,
            "sparse latent attention with an indexer": mixer.indexer is not None,
            "an output gate of latent attention": mixer.output_gate,
            "biases of latent attention": mixer.bias,
            "values of latent attention longer than its queries": mixer.value_dim > mixer.nope_dim + mixer.rope_dim,
        }
    elif isinstance(mixer, Attention):
        rotated = mixer.rope.rotated if mixer.rope is not None else 1.0
        named = {
            f"{mixer.span.label} attention": not isinstance(mixer.span, Full),
            "attention without positions": mixer.rope is None,
            f"rotary positions of a part of each head ({rotated:g})": rotated != 1.0,
            "biases of queries, keys and values": mixer.bias,
            "a bias of the attention's output": mixer.output_bias,
            "a norm of queries and keys over all heads": mixer.norm == "all_heads",
            "a norm of queries and keys without a weight": mixer.norm == "without_weight",
            f"an output gate of attention (one number for each {mixer.gate})": mixer.gate != "none",
            "attention sinks": mixer.sinks,
            "shared keys and values": mixer.shared_kv,
            "a cap of attention scores": mixer.soft_cap,
            f"scaled values ({mixer.value_scale:g})": mixer.value_scale != 1.0,
            "values of another size than keys": mixer.value_dim != mixer.head_dim,
        }
    else:
        named = {mixer.label + (" attention" if isinstance(mixer, Sparse) else ""): True}
    yield from (name for name, missing in named.items() if missing)


def _missing_in_mlp(mlp: DenseMLP) -> Iterator[str]:
    if mlp.activation != "silu" or not mlp.gated:
        yield f"{mlp.label} MLPs"
    if mlp.bias:
        yield "biases of MLPs"


def _missing_in_experts(mlp: RoutedMLP) -> Iterator[str]:
    yield from _missing_in_mlp(mlp.expert)
    shared = mlp.shared.width if mlp.shared is not None else 0
    named = {
        "a dense MLP beside the experts": shared > 0 and not mlp.shared_experts,
        "shared experts of another width": shared != mlp.shared_experts * mlp.expert.width and mlp.shared_experts > 0,
        "a gate of the shared expert": mlp.shared_gate,
        f"latent experts (at width {mlp.latent})": mlp.latent > 0,
        "a bias of the router": mlp.router_bias,
        "scales of the router": mlp.router_scales,
        "experts looked up by the token": mlp.hashed,
        f"router scores by {mlp.score}": mlp.score == "sqrtsoftplus",
        "router weights on the inputs of experts": mlp.weights_inputs,
    }
    yield from (name for name, missing in named.items() if missing)


def model_spec(model: LayeredModel, name: str | None = None) -> ModelSpec:
    """The same model as a `ModelSpec`, called ``name``. Raises `InvalidExperiment`, in one line that names all kinds,
    if today's `ModelSpec` cannot express it."""
    if missing := not_expressible(model):
        raise InvalidExperiment(f"model {model.name} cannot be planned or run yet; missing are: {'; '.join(missing)}")
    return model_from_dict(spec_fields(model, name or model.name))


def spec_fields(model: LayeredModel, name: str) -> dict[str, Any]:
    """The fields of a file in ``conf/model`` for a model that `ModelSpec` can express."""
    mixer = model.layers[0].mixer
    assert isinstance(mixer, Attention | LatentAttention) and mixer.rope is not None
    dense = [layer.mlp for layer in model.layers if isinstance(layer.mlp, DenseMLP)]
    routed = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedMLP)), None)
    fields: dict[str, Any] = {
        "name": name,
        "num_layers": len(model.layers),
        "hidden_size": model.hidden_size,
        "num_heads": mixer.heads,
        "num_kv_heads": mixer.heads if isinstance(mixer, LatentAttention) else mixer.kv_heads,
        "head_dim": mixer.nope_dim + mixer.rope_dim if isinstance(mixer, LatentAttention) else mixer.head_dim,
        **({"ffn_hidden_size": dense[0].width} if dense else {}),
        "vocab_size": model.vocab_size,
        "tie_embeddings": model.tie_embeddings,
        **({"qk_norm": True} if isinstance(mixer, Attention) and mixer.norm == "head" else {}),
        "rope_theta": mixer.rope.theta,
        "norm_eps": model.norm_eps,
    }
    if routed is not None:
        fields["moe"] = _experts(routed, len(dense))
    if isinstance(mixer, LatentAttention):
        fields["mla"] = {
            "q_lora_rank": mixer.q_rank,
            "kv_lora_rank": mixer.kv_rank,
            "qk_nope_head_dim": mixer.nope_dim,
            "qk_rope_head_dim": mixer.rope_dim,
            "v_head_dim": mixer.value_dim,
        }
    return fields


def _experts(mlp: RoutedMLP, dense_layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_experts": mlp.experts,
        "experts_per_token": mlp.chosen,
        "expert_hidden_size": mlp.expert.width,
        "num_shared_experts": mlp.shared_experts,
        "num_dense_layers": dense_layers,
        "gate": "sigmoid" if mlp.score == "sigmoid" else "softmax",
        "normalize_weights": mlp.normalize or mlp.score == "softmax_of_chosen",
        "weight_scale": mlp.scale,
    }
    if mlp.correction:
        fields |= {"balance": "bias", "balance_coefficient": BIAS_STEP}
    elif mlp.balance_loss:
        fields |= {"balance": "aux_loss", "balance_coefficient": mlp.balance_loss}
    return fields
