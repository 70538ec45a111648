"""Weights of the layers of a model with a list of layers, for the kinds that the engine runs. No torch here.

The same as `workloads.spec.weights` for models that numbers describe, from which names, placements and initial values
are taken. Biases and sinks are drawn as matrices are, so that no gradient is special at the start. N and K are the
numbers of query and key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from workloads.spec import weights
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.model_spec import ModelSpec
from workloads.spec.recurrent_weights import recurrent
from workloads.spec.weights import (
    COLUMNS,
    EXPERT_ROWS,
    INIT_STD,
    ROWS,
    WHOLE,
    WHOLE_BY_HEADS,
    Weight,
    norm,
    residual_std,
)


def kind_of(model: ModelSpec, layer: int) -> Layer | None:
    """The kind of a layer, by its index in the model; None for a model that numbers describe."""
    return None if model.layers is None else model.layers.kinds[model.layers.order[layer]]


def attention(model: ModelSpec, mixer: Attention, prefix: str) -> dict[str, Weight]:
    """Weights of one attention layer by their short names, in the order in which the engine creates them: q, k, v and
    the gate have one input and are one parameter, and so are the biases of q, k and v. Values that are made of the
    projection of keys have no weights."""
    h, size = model.hidden_size, mixer.head_dim
    columns = {"q": mixer.heads * size, "k": mixer.kv_heads * size, "v": mixer.kv_heads * mixer.value_dim}
    if mixer.shared_kv:
        del columns["v"]
    outputs = mixer.heads * mixer.value_dim
    kv_heads = {"q": 0, "k": mixer.kv_heads, "v": mixer.kv_heads}
    held = {name: _split(f"{prefix}.{name}", (count, h), kv_heads[name]) for name, count in columns.items()}
    if mixer.gate != "none":
        held["gate"] = _split(f"{prefix}.gate", (outputs if mixer.gate == "element" else mixer.heads, h))
    if mixer.bias:
        held |= {
            f"{name}_bias": _split(f"{prefix}.{name}_bias", (count,), kv_heads[name]) for name, count in columns.items()
        }
    held["o"] = Weight(f"{prefix}.o", (h, outputs), residual_std(model), COLUMNS)
    if mixer.output_bias:
        held["o_bias"] = Weight(f"{prefix}.o_bias", (h,), INIT_STD, WHOLE)
    if mixer.norm == "head":
        held |= {name: norm(f"{prefix}.{name}", size, WHOLE_BY_HEADS) for name in ("q_norm", "k_norm")}
    if mixer.norm == "all_heads":
        held |= {
            f"{name}_whole_norm": Weight(f"{prefix}.{name}_whole_norm", (columns[name],), None, ROWS, 0, kv_heads[name])
            for name in "qk"
        }
    if mixer.sinks:
        held["sinks"] = _split(f"{prefix}.sinks", (mixer.heads,))
    return held


def feed_forward(model: ModelSpec, mlp: DenseMLP, prefix: str) -> dict[str, Weight]:
    """Weights of a dense MLP by their short names; without a gate there are two."""
    held = weights.feed_forward(model, prefix, mlp.width)
    return held if mlp.gated else {name: held[name] for name in ("up", "down")}


def norms_of_outputs(model: ModelSpec, kind: Layer, prefix: str) -> dict[str, Weight]:
    """Norms of the outputs of both parts, of layers with four norms or more or without norms of inputs; else empty."""
    names = ("attention_out_norm", "ffn_out_norm") if kind.norms > 2 or kind.outputs_normed else ()
    return {name: norm(f"{prefix}.{name}", model.hidden_size) for name in names}


def norms_beside(model: ModelSpec, kind: Layer, prefix: str) -> dict[str, Weight]:
    """Norms of the experts' input, of their output, and of that of the dense MLP beside them, of layers with seven
    norms; else empty."""
    names = ("experts_norm", "experts_out_norm", "shared_out_norm") if kind.normed_beside else ()
    return {name: norm(f"{prefix}.{name}", model.hidden_size) for name in names}


def block(model: ModelSpec, layer: int) -> Iterator[Weight]:
    """Every weight of one layer of any model that the engine runs."""
    prefix, kind = f"layers.{layer}", kind_of(model, layer)
    if kind is None:
        yield from weights.block(model, prefix, routed=weights.routed(model, layer))
        return
    for name, part in (("attention_norm", kind.mixer), ("ffn_norm", kind.mlp)):
        if part is not None and not kind.outputs_normed:
            yield norm(f"{prefix}.{name}", model.hidden_size)
    yield from norms_of_outputs(model, kind, prefix).values()
    yield from norms_beside(model, kind, prefix).values()
    if kind.ahead:
        yield from ahead(model, prefix).values()
    if isinstance(kind.mixer, Attention):
        yield from attention(model, kind.mixer, f"{prefix}.attention").values()
    elif isinstance(kind.mixer, Recurrent):
        yield from recurrent(model, kind.mixer, f"{prefix}.attention").values()
    elif kind.mixer is not None:
        yield from weights.attention(model, f"{prefix}.attention").values()
    if isinstance(kind.mlp, DenseMLP):
        yield from feed_forward(model, kind.mlp, f"{prefix}.ffn").values()
    elif kind.mlp is not None:
        yield from experts(model, kind.mlp, f"{prefix}.experts").values()
        yield from shared_experts(model, kind.mlp, prefix).values()


def ahead(model: ModelSpec, prefix: str) -> dict[str, Weight]:
    """Weights that a module of multi-token prediction has besides its layer's (arXiv:2412.19437, equations 21 and 23):
    norms of the hidden state and of the later token's embedding, the projection of both to one hidden state, and the
    norm before the shared head."""
    h, prefix = model.hidden_size, f"{prefix}.ahead"
    return {
        "hidden_norm": norm(f"{prefix}.hidden_norm", h),
        "embedding_norm": norm(f"{prefix}.embedding_norm", h),
        "projection": Weight(f"{prefix}.projection", (h, 2 * h), INIT_STD, WHOLE),
        "norm": norm(f"{prefix}.norm", h),
    }


def experts(model: ModelSpec, mlp: RoutedMLP, prefix: str) -> dict[str, Weight]:
    """Weights of the router and of the routed experts, stacked on dim 0, by their short names; biases of experts are
    stacks of columns. The second bias is divided by its outputs where an expert is divided: each rank then adds its
    part of the bias once to the sum of the partial outputs. Scales begin at 1, as norms do. Projections to the latent
    of experts and back are used by each rank on its own tokens."""
    held, width = weights.experts(model, prefix, mlp.latent), mlp.latent or model.hidden_size
    if not mlp.expert.gated:
        del held["gate"]
    if mlp.router_bias:
        held["router_bias"] = Weight(f"{prefix}.router_bias", (mlp.experts,), INIT_STD, WHOLE)
    if mlp.router_scales:
        held["router_norm"] = norm(f"{prefix}.router_norm", model.hidden_size)
        held["router_scales"] = norm(f"{prefix}.router_scales", mlp.experts)
    if mlp.latent:
        shape = (mlp.latent, model.hidden_size)
        held["latent_down"] = Weight(f"{prefix}.latent_down", shape, INIT_STD, WHOLE)
        held["latent_up"] = Weight(f"{prefix}.latent_up", shape[::-1], residual_std(model), WHOLE)
    if mlp.expert.bias:
        sizes = {"gate": mlp.expert.width, "up": mlp.expert.width, "down": width}
        held |= {
            f"{name}_bias": Weight(f"{prefix}.{name}_bias", (mlp.experts, size, 1), INIT_STD, EXPERT_ROWS)
            for name, size in sizes.items()
            if name in held
        }
    return held


def shared_experts(model: ModelSpec, mlp: RoutedMLP, prefix: str) -> dict[str, Weight]:
    """Weights of what every token visits beside the experts, and of its gate; empty if there is nothing."""
    held = {} if mlp.shared is None else feed_forward(model, mlp.shared, f"{prefix}.shared")
    if mlp.shared_gate:
        held["scale"] = Weight(f"{prefix}.shared.scale", (1, model.hidden_size), INIT_STD, WHOLE)
    return held


class Rotation(NamedTuple):
    """Rotary positions of a layer. Pair i of R columns turns by ``theta ** (-2 i / R)`` a token."""

    theta: float
    columns: int
    """R, an even number of the first columns of a head."""
    turning: int
    """Pairs that turn, the first ones; the others stay as they are."""

    @classmethod
    def of(cls, theta: float, columns: int) -> Rotation:
        """One whose pairs all turn."""
        return cls(theta, columns, columns // 2)


def rotations(model: ModelSpec) -> tuple[Rotation, ...]:
    """Every table of rotary positions that the model needs, each once, in the order of its first layer."""
    if model.layers is None:
        return (Rotation.of(model.rope_theta, model.rope_dim),)
    found = [rotation(kind) for kind in model.layers.kinds]
    return tuple(dict.fromkeys(one for one in found if one is not None)) or (Rotation.of(model.rope_theta, 2),)


def rotation(kind: Layer) -> Rotation | None:
    """Those of a layer; None without positions. Latent attention rotates a part of its own."""
    mixer = kind.mixer
    if not isinstance(mixer, Attention | LatentAttention) or mixer.rope is None:
        return None
    if isinstance(mixer, LatentAttention):
        return Rotation.of(mixer.rope.theta, mixer.rope_dim)
    size, share = mixer.head_dim, mixer.rope.rotated
    if mixer.rope.proportional:
        return Rotation(mixer.rope.theta, size, int(size * share) // 2)
    return Rotation.of(mixer.rope.theta, int(size * share) // 2 * 2)


def _split(name: str, shape: tuple[int, ...], kv_heads: int = 0) -> Weight:
    """A weight whose rows tensor parallelism divides."""
    return Weight(name, shape, INIT_STD, ROWS, kv_heads=kv_heads)
