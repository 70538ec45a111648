"""What of a published model the flat fields of `ModelSpec` cannot express, by name, and its `ModelSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workloads.spec.layer_kinds.attention import Attention, BlockSparseAttention, CompressedAttention, LatentAttention
from workloads.spec.layer_kinds.layer_list import LayerList, to_plain
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel, Mixer
from workloads.spec.layer_kinds.spans import Full
from workloads.spec.layer_kinds.summary import experts, latents
from workloads.spec.model_spec import ModelSpec, model_from_dict

Sparse = CompressedAttention | BlockSparseAttention


def not_expressible(model: LayeredModel) -> list[str]:
    """What the flat fields of `ModelSpec` cannot express and no engine runs, each once; empty if they express the
    model exactly."""
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
    if model.scaled_embedding:
        yield "scaled embeddings"
    yield from model.same_cost
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
    if layer.ahead:
        yield "modules of multi-token prediction"
    if layer.outputs_normed:
        yield "norms of outputs in place of inputs"
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
            "a norm of values": mixer.value_norm,
            f"scores scaled by {mixer.score_scale:g}": mixer.score_scale != 0.0,
            "values of another size than keys": mixer.value_dim != mixer.head_dim,
        }
    else:
        named = {mixer.label + (" attention" if isinstance(mixer, Sparse) else ""): True}
    yield from (name for name, missing in named.items() if missing)


def _missing_in_mlp(mlp: DenseMLP, called: str = "MLPs") -> Iterator[str]:
    if mlp.activation != "silu" or not mlp.gated:
        yield f"{mlp.label} {called}"
    if mlp.bias:
        yield f"biases of {called}"


def _missing_in_experts(mlp: RoutedMLP) -> Iterator[str]:
    yield from _missing_in_mlp(mlp.expert, "experts")
    shared = mlp.shared.width if mlp.shared is not None else 0
    named = {
        "a dense MLP beside the experts": shared > 0 and not mlp.shared_experts,
        "shared experts of another width": shared != mlp.shared_experts * mlp.expert.width and mlp.shared_experts > 0,
        "a gate of the shared expert": mlp.shared_gate,
        f"latent experts (at width {mlp.latent})": mlp.latent > 0,
        "a norm of the latent of experts": mlp.latent_norm,
        "a bias of the router": mlp.router_bias,
        "scales of the router": mlp.router_scales,
        "experts looked up by the token": mlp.hashed,
        f"router scores by {mlp.score}": mlp.score == "sqrtsoftplus",
        "router weights on the inputs of experts": mlp.weights_inputs,
    }
    yield from (name for name, missing in named.items() if missing)


def model_spec(model: LayeredModel, name: str | None = None, *, ahead: bool = False) -> ModelSpec:
    """The same model as a `ModelSpec`, called ``name``. ``ahead``: as of `spec_fields`."""
    return model_from_dict(spec_fields(model, name or model.name, ahead=ahead))


def spec_fields(model: LayeredModel, name: str, *, ahead: bool = False) -> dict[str, Any]:
    """The fields of a file in ``conf/model``: numbers if they can express the model, else the list of its layers.
    ``ahead``: with the modules of multi-token prediction that the file names."""
    ends = {"vocab_size": model.vocab_size, "tie_embeddings": model.tie_embeddings, "norm_eps": model.norm_eps}
    modules = {"mtp_modules": model.predicted_ahead} if ahead and model.predicted_ahead else {}
    if not_expressible(model):
        layers = to_plain(LayerList.of(model))
        return {"name": name, "hidden_size": model.hidden_size, **ends, "layers": layers, **modules}
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
        **modules,
    }
    if routed is not None:
        fields["moe"] = experts(routed, len(dense))
    if isinstance(mixer, LatentAttention):
        fields["mla"] = latents(mixer)
    return fields
