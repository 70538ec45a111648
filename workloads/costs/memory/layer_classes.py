"""Layers of a pipeline rank or chunk by class: how many it holds of each, and what one of them saves and needs.

A class is a group of layers with equal sizes: those of one kind. Memory code loops over classes, in the order of the
model, and knows no names of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import NamedTuple

from workloads.costs.memory.kind_sizes import kind_bytes
from workloads.costs.shape.params import COMPUTE_BYTES, layer_counts, local_params
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.model_layers import layers_of


class LayerSizes(NamedTuple):
    """Sizes of one layer of a class on one rank, for one micro-batch, in bytes unless stated otherwise."""

    name: str
    saved: int
    """Bytes held from forward to backward if the layer is recomputed (all layers are, without ``recompute_every``), on
    the device."""
    kept: int
    """Bytes held from forward to backward if the layer is not recomputed."""
    working: int
    """Bytes needed in addition to ``saved`` while its backward runs. A layer counts as at least as large as kinds
    before it, and with ``block`` one without experts as any: kinds take turns, and FSDP gathers ahead."""
    working_kept: int
    forward: int
    """Bytes needed in addition to ``saved`` at the end of its forward."""
    forward_kept: int
    arriving: int
    """Bytes needed in addition to what is saved when the backward of its experts begins; 0 if that is not known."""
    arriving_kept: int
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
    experts_up: int
    """Elements of the experts' first products, part of ``experts``."""
    experts_down: int
    """Elements of the experts' second products, part of ``experts``; their gradient comes last in FSDP's order, which
    has biases, parameters of modules inside, first."""
    reducing: int
    """Bytes needed in addition to ``saved`` while the experts' gradients are reduced."""
    reducing_kept: int
    offloaded: int
    """Bytes held on the host from forward to backward, in addition to ``saved``. A stage whose layers are not all
    recomputed alike has none."""
    offloaded_input: int
    """Bytes of the layer's input, part of ``offloaded``."""


class LayerClass(NamedTuple):
    """Layers of one class that a rank or chunk holds."""

    size: LayerSizes
    kind: int
    """Index of its kind in the model, and of ``size`` in `layer_sizes`."""
    layers: int
    recomputed: int
    """How many of them the recompute policy covers."""
    first_recomputed: bool
    """Whether the first of them is recomputed; backward reaches it last."""
    place: int
    """How many layers of other classes come before the first of them."""
    block_before: int
    """Elements of the blocks of these."""
    experts_before: int
    deferred_before: int
    saved_before: int

    @property
    def saved(self) -> int:
        """Bytes that all of them save for one micro-batch."""
        return self.recomputed * self.size.saved + (self.layers - self.recomputed) * self.size.kept


def layer_sizes(
    e: Experiment, w: int | None = None, w_experts: int | None = None, *, experts_add: bool = False
) -> tuple[LayerSizes, ...]:
    """Sizes of every class of layers of the model, in the order in which the model has them. ``w``,
    ``w_experts`` and ``experts_add`` as of `workloads.costs.memory.kind_sizes.kind_bytes`."""
    splits = e.pp_schedule in SPLIT_BACKWARD or e.virtual_stages > 1  # the others defer nothing
    key = _OF_SIZES(e), splits, w, w_experts, experts_add
    if key not in _KEPT:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        _KEPT[key] = _sizes_of_kinds(e, w, w_experts, splits=splits, experts_add=experts_add)
    return _KEPT[key]


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
        classes.append(LayerClass(size, kind, *counts, place, block, experts, deferred, saved))
    return tuple(sorted(classes, key=attrgetter("place")))


_OF_SIZES = attrgetter(
    *("model", "tp", "cp", "ep", "etp", "micro_batch_size", "seq_len", "recompute", "sequence_parallel", "precision"),
    *(
        "attention",
        "recurrence",
        "routing",
        "routing_imbalance",
        "capacity_factor",
        "cp_kind",
        "compile",
        "recompute_every",
        "activation_offload",
    ),
)
"""Fields on which the sizes of layers depend."""
_KEPT: dict[Hashable, tuple[LayerSizes, ...]] = {}
_MOST_KEPT = 20_000


def _sizes_of_kinds(
    e: Experiment, w: int | None, w_experts: int | None, *, splits: bool, experts_add: bool
) -> tuple[LayerSizes, ...]:
    layers, c = layers_of(e.model), COMPUTE_BYTES[e.precision]
    elements = [local_params(e, layer_counts(e.model, kind)) for kind in layers.kinds]
    of_kinds = [*zip(layers.kinds, elements, strict=True)]
    working = working_kept = 0
    largest = max(rest for kind, (rest, _) in of_kinds if not kind.ahead)
    with_modules = max(rest for rest, _ in elements)
    sizes: list[LayerSizes] = []
    for kind, (rest, experts) in of_kinds:
        saved = kept = kind_bytes(e, kind, c, recomputed=True, w=w, w_experts=w_experts, experts_add=experts_add)
        if e.recompute != "none":
            kept = kind_bytes(e, kind, c, recomputed=False, w=w, w_experts=w_experts, experts_add=experts_add)
        of_weights = (c if w is None else w) * rest
        working = max(working, saved.working, of_weights + saved.ending)
        working_kept = max(working_kept, kept.working, of_weights + kept.ending)
        exchanging = saved.exchanging if splits else 0
        held = [one for one in kind.weights(e.model.hidden_size) if one.held == "experts"]
        of_experts = {one.name: one.parameters // (e.ep * e.etp) for one in held}
        name = kind.label if e.model.layers is not None else "layer with experts" if experts else "layer"
        sizes.append(
            LayerSizes(
                name=name,
                saved=saved.saved - saved.offloaded,
                kept=kept.saved - kept.offloaded,
                working=max(working, exchanging),
                working_kept=max(working_kept, exchanging),
                forward=saved.forward,
                forward_kept=kept.forward,
                arriving=saved.arriving,
                arriving_kept=kept.arriving,
                deferred=saved.deferred if splits else 0,
                first_half=saved.first_half if splits and exchanging <= saved.working else 0,
                block=rest if experts else with_modules if kind.ahead else largest,
                down=kind.mlp.width // e.tp * e.model.hidden_size if isinstance(kind.mlp, DenseMLP) else 0,
                experts=experts,
                experts_up=of_experts.get("expert up", 0),
                experts_down=of_experts.get("expert down", 0),
                reducing=saved.reducing,
                reducing_kept=kept.reducing,
                offloaded=saved.offloaded,
                offloaded_input=saved.offloaded_input,
            )
        )
    return tuple(sizes)


def layer_classes(e: Experiment, held: StageParams) -> tuple[LayerClass, ...]:
    """One entry for each class of layers that a pipeline rank or chunk holds, in the order of the model."""
    return classes_of(layer_sizes(e), held)
