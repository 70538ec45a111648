"""Layers of a pipeline rank or chunk by class: how many it holds of each, and what one of them saves and needs.

A class is a group of layers with equal sizes: those of one kind. Memory code loops over classes, and over the places of
layers where a rank may peak, and knows no names of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import NamedTuple

from workloads.costs.memory.kind_layer import KindLayer
from workloads.costs.memory.kind_sizes import kind_bytes
from workloads.costs.memory.weight_products import Product, products_of
from workloads.costs.shape import fp8
from workloads.costs.shape.params import COMPUTE_BYTES, layer_counts, local_params
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
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
    """Bytes needed in addition to ``saved`` while the backward of its MLP runs; 0 if it has none."""
    working_kept: int
    rest: int
    """Bytes needed in addition to ``saved`` at the end of the backward of its MLP, without gradients of its routed
    experts; below 0 where the MLP saved more; 0 if it has none."""
    rest_kept: int
    mixing: int
    """Bytes needed in addition to ``saved`` while the rest of its backward runs, without gradients of experts."""
    mixing_kept: int
    forward: int
    """Bytes needed in addition to ``saved`` at the end of its forward."""
    forward_kept: int
    arriving: int
    """Bytes needed in addition to what is saved when the backward of its experts begins; 0 if that is not known."""
    arriving_kept: int
    again: int
    """Bytes needed in addition to ``saved`` when its experts, recomputed with all of it, have their outputs again; 0 if
    they stop before."""
    deferred: int
    """Bytes held between the two passes of a split backward."""
    holds_gradient: bool
    """Whether the gradient of its output is, as it arrives, part of ``deferred``: its last product is of own tokens,
    and neither is its output normed nor are gradients cast to fp8."""
    first_half: int
    """As ``working``, in the input-gradient pass, with routed experts until theirs is done."""
    first_half_kept: int
    rest_first: int
    """As ``rest``, in the input-gradient pass."""
    rest_first_kept: int
    mixing_first: int
    """As ``mixing``, in that pass."""
    mixing_first_kept: int
    block: int
    """Elements of the block, without routed experts, which are units of their own."""
    products: tuple[Product, ...]
    """Those of the block in a weight-gradient pass; none if no backward is split."""
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
    """The layers of a rank or chunk by class. ``sizes``: `layer_sizes`."""
    return tuple(
        LayerClass(size, kind, held.of_kind[kind], held.recomputed_of_kind[kind])
        for kind, size in enumerate(sizes)
        if held.of_kind[kind]
    )


class Place(NamedTuple):
    """A layer in whose backward a rank or chunk may need most, and what the layers after it had."""

    role: str
    """As of `workloads.costs.shape.partition.LayerPlace`."""
    kind: int
    """Index of its kind in the model, and of ``size`` in `layer_sizes`."""
    size: LayerSizes
    recomputed: bool
    done: int
    """How many layers come after it."""
    rest: int
    """Elements of their blocks."""
    experts: int
    """Elements of their routed experts."""
    saved: int
    """Bytes that they saved on the device."""
    deferred: int
    """Bytes that they hold between the two passes of a split backward."""
    earlier: LayerSizes | None
    """The layer before it."""
    later: LayerSizes | None
    """The layer after it."""

    @property
    def name(self) -> str:
        return self.role if "layer" in self.role else f"{self.role} {self.size.name}"

    @property
    def own(self) -> int:
        """Bytes that it saved on the device."""
        return self.size.saved if self.recomputed else self.size.kept


def places_of(sizes: tuple[LayerSizes, ...], held: StageParams) -> tuple[Place, ...]:
    """The layers of a stage in whose backward it may need most, from the last one to the first. ``sizes``:
    `layer_sizes`."""
    found = []
    for role, kind, recomputed, after, (earlier, later) in held.places:
        done = rest = experts = saved = deferred = 0
        for at, (count, again) in enumerate(after):
            if count:
                other = sizes[at]
                done += count
                rest += count * other.block
                experts += count * other.experts
                saved += again * other.saved + (count - again) * other.kept
                deferred += count * other.deferred
        beside = sizes[earlier] if earlier >= 0 else None, sizes[later] if later >= 0 else None
        found.append(Place(role, kind, sizes[kind], recomputed, done, rest, experts, saved, deferred, *beside))
    return tuple(found)


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
    sizes: list[LayerSizes] = []
    for kind in layers.kinds:
        rest, experts = local_params(e, layer_counts(e.model, kind))
        saved = kept = kind_bytes(e, kind, c, recomputed=True, w=w, w_experts=w_experts, experts_add=experts_add)
        if e.recompute != "none":
            kept = kind_bytes(e, kind, c, recomputed=False, w=w, w_experts=w_experts, experts_add=experts_add)
        of_weights = (c if w is None else w) * rest
        mixing, mixing_kept = (max(one.mixing, of_weights + one.ending) for one in (saved, kept))
        held = [one for one in kind.weights(e.model.hidden_size) if one.held == "experts"]
        of_experts = {one.name: one.parameters // (e.ep * e.etp) for one in held}
        name = kind.label if e.model.layers is not None else "layer with experts" if experts else "layer"
        sizes.append(
            LayerSizes(
                name=name,
                saved=saved.saved - saved.offloaded,
                kept=kept.saved - kept.offloaded,
                working=saved.working,
                working_kept=kept.working,
                rest=saved.rest,
                rest_kept=kept.rest,
                mixing=mixing,
                mixing_kept=mixing_kept,
                forward=saved.forward,
                forward_kept=kept.forward,
                arriving=saved.arriving,
                arriving_kept=kept.arriving,
                again=saved.again,
                deferred=saved.deferred if splits else 0,
                holds_gradient=e.tp == 1 and not fp8.keeps_low(e) and _ends_with_product(kind),
                first_half=saved.first_half if splits else 0,
                first_half_kept=kept.first_half if splits else 0,
                rest_first=saved.rest_first if splits else 0,
                rest_first_kept=kept.rest_first if splits else 0,
                mixing_first=saved.mixing_first if splits else 0,
                mixing_first_kept=kept.mixing_first if splits else 0,
                block=rest,
                products=products_of(KindLayer.of(e, kind, c, c, recomputed=True), rest) if splits else (),
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


def _ends_with_product(kind: Layer) -> bool:
    """Whether the gradient of a layer's output is that of a product's output, other than of routed experts."""
    routed = isinstance(kind.mlp, RoutedMLP) and kind.mlp.shared is None
    parts = (kind.mixer is not None) + (kind.mlp is not None)
    return not routed and kind.norms <= parts and not kind.outputs_normed


def layer_classes(e: Experiment, held: StageParams) -> tuple[LayerClass, ...]:
    """One entry for each class of layers that a pipeline rank or chunk holds, in the order of the model."""
    return classes_of(layer_sizes(e), held)
