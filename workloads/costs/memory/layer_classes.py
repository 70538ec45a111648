"""Layers of a pipeline rank or chunk by class: how many it holds of each, and what one of them saves and needs.

A class is a group of layers with equal sizes, today those with and those without routed experts. Memory code loops over
classes, in the order of the model, and knows no names of them; a new class of layers is added here only.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import deferred_bytes, first_half_bytes, layer_bytes
from workloads.costs.shape.params import COMPUTE_BYTES, dense_layer, local_params, moe_layer, num_dense_layers
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment


class LayerSizes(NamedTuple):
    """Sizes of one layer of a class on one rank, for one micro-batch, in bytes unless stated otherwise."""

    name: str
    saved: int
    """Bytes held from forward to backward if the layer is recomputed (all layers are, without ``recompute_every``)."""
    kept: int
    """Bytes held from forward to backward if the layer is not recomputed."""
    working: int
    """Bytes needed in addition to ``saved`` while its backward runs. Layers with experts count as at least as large as
    layers without, and with ``block`` it is the other way around: they take turns, and FSDP gathers ahead."""
    working_kept: int
    deferred: int
    """Bytes held between the two passes of a split backward."""
    first_half: int
    """Extra working bytes in the input-gradient pass, in addition to ``working``."""
    block: int
    """Elements of the block, without routed experts, which are units of their own."""
    down: int
    """Elements of the weight whose gradient comes last in FSDP's order, part of ``block``."""
    experts: int
    """Elements of the routed experts; 0 if the layer has none."""
    reducing: int
    """Bytes needed in addition to ``saved`` while the experts' gradients are reduced."""
    reducing_kept: int


class LayerClass(NamedTuple):
    """Layers of one class that a rank or chunk holds."""

    size: LayerSizes
    layers: int
    recomputed: int
    """How many of them the recompute policy covers."""
    first_recomputed: bool
    """Whether the first of them is recomputed; backward reaches it last."""

    @property
    def saved(self) -> int:
        """Bytes that all of them save for one micro-batch."""
        return self.recomputed * self.size.saved + (self.layers - self.recomputed) * self.size.kept


def layer_sizes(e: Experiment) -> tuple[LayerSizes, ...]:
    """Sizes of every class of layers of the model, in the order in which the model has them."""
    model, c = e.model, COMPUTE_BYTES[e.precision]
    kinds = [routed for routed, there in ((False, num_dense_layers(model) > 0), (True, model.moe is not None)) if there]
    splits = e.pp_schedule in SPLIT_BACKWARD or e.virtual_stages > 1  # the others defer nothing
    layers = [local_params(e, moe_layer(model) if routed else dense_layer(model)) for routed in kinds]
    block = max(rest for rest, _ in layers)
    result: list[LayerSizes] = []
    working = working_kept = 0
    for routed, (rest, experts) in zip(kinds, layers, strict=True):
        saved = layer_bytes(e, routed=routed, c=c)
        kept = saved if e.recompute == "none" else layer_bytes(e, routed=routed, c=c, recomputed=False)
        working, working_kept = max(working, saved.working), max(working_kept, kept.working)
        result.append(
            LayerSizes(
                name="layer with experts" if routed else "layer",
                saved=saved.saved,
                kept=kept.saved,
                working=working,
                working_kept=working_kept,
                deferred=deferred_bytes(e, routed=routed, c=c) if splits else 0,
                first_half=first_half_bytes(e, c) if splits and not routed else 0,
                block=rest if routed else block,
                down=model.ffn_hidden_size // e.tp * model.hidden_size,
                experts=experts,
                reducing=saved.reducing_experts,
                reducing_kept=kept.reducing_experts,
            )
        )
    return tuple(result)


def classes_of(sizes: tuple[LayerSizes, ...], held: StageParams) -> tuple[LayerClass, ...]:
    """The layers of a rank or chunk by class, in order. ``sizes``: `layer_sizes`."""
    counts = (
        (held.dense_layers, held.dense_recomputed, held.first_recomputed),
        (held.moe_layers, held.moe_recomputed, held.first_moe_recomputed),
    )
    return tuple(
        LayerClass(size, *of_class)
        for size, of_class in zip(sizes, counts if sizes[0].experts == 0 else counts[1:], strict=False)
        if of_class[0]
    )


def layer_classes(e: Experiment, held: StageParams) -> tuple[LayerClass, ...]:
    """One entry for each class of layers that a pipeline rank or chunk holds, in the order of the model."""
    return classes_of(layer_sizes(e), held)
