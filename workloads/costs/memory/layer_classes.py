"""Layers of a pipeline rank or chunk by class: how many it holds of each, and what one of them saves and needs.

A class is a group of layers with equal sizes, today those with and those without routed experts. Memory code loops over
classes, in the order of the model, and knows no names of them; a new class of layers is added here only.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter, itemgetter
from typing import NamedTuple

from workloads.costs.memory.activations import deferred_bytes, first_half_bytes, layer_bytes
from workloads.costs.memory.kind_sizes import kind_bytes
from workloads.costs.shape.params import (
    COMPUTE_BYTES,
    dense_layer,
    layer_counts,
    local_params,
    moe_layer,
    num_dense_layers,
)
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.model_layers import layers_of


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
    block_before: int
    """Elements of the blocks of other classes before the first of them."""
    experts_before: int
    deferred_before: int
    saved_before: int

    @property
    def saved(self) -> int:
        """Bytes that all of them save for one micro-batch."""
        return self.recomputed * self.size.saved + (self.layers - self.recomputed) * self.size.kept


def layer_sizes(e: Experiment) -> tuple[LayerSizes, ...]:
    """Sizes of every class of layers of the model, in the order in which the model has them."""
    splits = e.pp_schedule in SPLIT_BACKWARD or e.virtual_stages > 1  # the others defer nothing
    key = _OF_SIZES(e), splits
    if key not in _KEPT:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        _KEPT[key] = _sizes(e, splits=splits) if e.model.layers is None else _sizes_of_kinds(e, splits=splits)
    return _KEPT[key]


def _sizes(e: Experiment, *, splits: bool) -> tuple[LayerSizes, ...]:
    """`layer_sizes` of a model without a list of layers."""
    model, c = e.model, COMPUTE_BYTES[e.precision]
    kinds = [routed for routed, there in ((False, num_dense_layers(model) > 0), (True, model.moe is not None)) if there]
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
    """The layers of a rank or chunk by class, in the order of their first ones. ``sizes``: `layer_sizes`."""
    classes = []
    for kind, size in enumerate(sizes):
        if not held.of_kind[kind]:
            continue
        place = block = experts = deferred = saved = 0
        for at, (count, recomputed) in enumerate(held.before_kind[kind]):
            other = sizes[at]
            place += count
            block += count * other.block
            experts += count * other.experts
            deferred += count * other.deferred
            saved += recomputed * other.saved + (count - recomputed) * other.kept
        counts = held.of_kind[kind], held.recomputed_of_kind[kind], held.first_of_kind_recomputed[kind]
        classes.append((place, LayerClass(size, *counts, block, experts, deferred, saved)))
    return tuple(one for _, one in sorted(classes, key=itemgetter(0)))


_OF_SIZES = attrgetter(
    *("model", "tp", "cp", "ep", "etp", "micro_batch_size", "seq_len", "recompute", "sequence_parallel", "precision"),
    *("attention", "routing", "routing_imbalance", "capacity_factor", "recompute_every", "compile", "cp_kind"),
)
"""Fields on which the sizes of layers depend."""
_KEPT: dict[Hashable, tuple[LayerSizes, ...]] = {}
_MOST_KEPT = 20_000


def _sizes_of_kinds(e: Experiment, *, splits: bool) -> tuple[LayerSizes, ...]:
    """`layer_sizes` of a model with a list of layers. Kinds may alternate, so the largest working bytes and the largest
    block count for all."""
    layers, c = layers_of(e.model), COMPUTE_BYTES[e.precision]
    elements = [local_params(e, layer_counts(e.model, kind)) for kind in layers.kinds]
    saved, kept = ([kind_bytes(e, kind, c, recomputed=on) for kind in layers.kinds] for on in (True, False))
    block = max(rest for rest, _ in elements)
    return tuple(
        LayerSizes(
            name=kind.label,
            saved=own.saved,
            kept=own_kept.saved,
            working=max(one.working for one in saved),
            working_kept=max(one.working for one in kept),
            deferred=own.deferred if splits else 0,
            first_half=own.first_half if splits else 0,
            block=rest if experts else block,
            down=kind.mlp.width // e.tp * e.model.hidden_size if isinstance(kind.mlp, DenseMLP) else 0,
            experts=experts,
            reducing=own.reducing,
            reducing_kept=own_kept.reducing,
        )
        for kind, (rest, experts), own, own_kept in zip(layers.kinds, elements, saved, kept, strict=True)
    )


def layer_classes(e: Experiment, held: StageParams) -> tuple[LayerClass, ...]:
    """One entry for each class of layers that a pipeline rank or chunk holds, in the order of the model."""
    return classes_of(layer_sizes(e), held)
