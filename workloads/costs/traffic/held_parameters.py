"""The parameters that the engine makes of a model's weights: weights with one input are one parameter. No torch here.

Closed forms of what is sent by matrix read this table; the engine has its parameters from its modules, and a test
requires that both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from workloads.spec import kind_weights, weights
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight

_FUSED = (
    ("attention.q_down", "attention.kv_down"),
    ("attention.q", "attention.k", "attention.v", "attention.gate"),
    ("attention.q_bias", "attention.k_bias", "attention.v_bias"),
    ("attention.q_whole_norm", "attention.k_whole_norm"),
    ("ffn.gate", "ffn.up"),
    ("shared.gate", "shared.up"),
    ("experts.gate", "experts.up"),
)
"""Weights of one layer that are one parameter, by the ends of their names. Recurrent mixers fuse others."""


def parameters_of_layer(model: ModelSpec, layer: int) -> Iterator[tuple[Weight, ...]]:
    """The parameters of one layer; ``layer`` is its index in the model."""
    prefix = f"layers.{layer}."
    held = {weight.name.removeprefix(prefix): weight for weight in kind_weights.block(model, layer)}
    for name, weight in held.items():
        names = next((names for names in _FUSED if name in names), None)
        if names is None:
            yield (weight,)
        elif name == next(one for one in names if one in held):
            yield tuple(held[one] for one in names if one in held)


def parameters_of_stage(
    model: ModelSpec, layers: range, *, is_first: bool, is_last: bool, padding: int = 0
) -> list[tuple[Weight, ...]]:
    """The parameters of a pipeline stage. ``padding``: rows of embedding and head that stand for no token."""
    embeds = is_first or (is_last and model.mtp_modules > 0)
    found: list[tuple[Weight, ...]] = [(weights.embedding(model, padding),)] if embeds else []
    for layer in layers:
        found += parameters_of_layer(model, layer)
    if is_last:
        found.append((weights.final_norm(model),))
        if not (embeds and model.tie_embeddings):
            found.append((weights.head(model, padding),))
    return found
