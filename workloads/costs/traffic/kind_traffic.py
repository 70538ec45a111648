"""Messages of a model's layers, as terms of `workloads.costs.traffic.sent`. No torch here.

Each layer sends along tp what `workloads.costs.time.layer_times` times: the inputs of its column-parallel products are
gathered in the forward and again in the backward, and their gradients scattered; outputs of row-parallel products are
scattered, and their gradients gathered. What is computed for a rank's own tokens and used by all heads is gathered
once. Full recomputation repeats a forward, without a product at its end (`Layer.ends_in_product`); selective
recomputation repeats nothing, except in compiled blocks (`Experiment.compiles`) the gathers of the forward; recomputing
``mla_up`` gathers the latents once more. A norm over all heads sums squares of columns in the forward, and products in
the backward. Along cp: `context_parallel`. FSDP's units are the blocks, and the routed
experts inside them. Matrices with one scale each, such as those of experts in every kind of fp8, are gathered in fp8;
routers are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from workloads.costs.shape.params import whole_model
from workloads.costs.traffic.collectives import Collective
from workloads.costs.traffic.context_parallel import context_messages_of
from workloads.costs.traffic.fsdp import Unit
from workloads.costs.traffic.sender import Sender, Stage
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.weight import ROW_PARALLEL, Weight
from workloads.spec.recomputation import operations_of


def blocks_along_tp(s: Sender) -> None:
    """Count what the layers send along tp, without the ends of the model and without routed experts."""
    e, bytes_each = s.experiment, s.compute * s.tokens
    hidden, m = e.model.hidden_size, e.num_microbatches
    for kind, layers, word in s.kinds():
        calls, full = layers * m, word == "full"
        inputs, shared, sums = list[int](), 0, 0
        if kind.mixer is not None:
            along = kind.mixer.tensor_parallel(hidden)
            inputs, shared, sums = [*along.gathered], along.shared, 1
            summed = s.accumulated * s.tokens * along.normed
            s.along("tp", "all_reduce", summed, (3 if full else 2) * calls if summed else 0)
        latents = [width for width in inputs if width != hidden] if "mla_up" in operations_of(word) else []
        if isinstance(kind.mlp, DenseMLP) or (kind.mlp is not None and kind.mlp.shared is not None):
            inputs, sums = [*inputs, hidden], sums + 1
        sent_again = (sums - kind.ends_in_product) * calls if full else 0
        if not e.sequence_parallel:
            for width in [*inputs, *([shared] if shared else [])]:
                s.along("tp", "all_reduce", bytes_each * width, calls)
            s.along("tp", "all_reduce", bytes_each * hidden, sums * calls + sent_again)
            continue
        compiled = word == "selective" and e.compiles(routed=kind.routed, recomputed=True)
        gathers = calls if full or compiled else 0
        for width in inputs:
            s.along("tp", "all_gather", bytes_each * width, 2 * calls + gathers)
            s.along("tp", "reduce_scatter", bytes_each * width, calls)
        for width in latents:
            s.along("tp", "all_gather", bytes_each * width, calls)
        if shared:
            s.along("tp", "all_gather", bytes_each * shared, calls + gathers)
            s.along("tp", "reduce_scatter", bytes_each * shared, calls)
        s.along("tp", "all_gather", bytes_each * hidden, sums * calls)
        s.along("tp", "reduce_scatter", bytes_each * hidden, sums * calls + sent_again)


def replicated_shapes(s: Sender) -> list[tuple[int, ...]]:
    """Shapes of the layers' parameters whose gradients are summed over the tp ranks: with sequence parallelism all that
    each rank holds whole, else those of heads."""
    e = s.experiment
    shapes: list[tuple[int, ...]] = []
    for kind, layers, _ in s.kinds():
        whole = [one for one in weights_of(s, kind) if one.held == "whole"]
        whole = whole if e.sequence_parallel else [one for one in whole if one.name in _OF_HEADS]
        shapes += shapes_on_rank(s, whole) * layers
    return shapes


def weights_of(s: Sender, kind: Layer) -> list[Weight]:
    """The weights of one layer, with those of hyper-connections."""
    model = s.experiment.model
    streams = whole_model(model).streams
    return [*kind.weights(model.hidden_size), *(streams.weights(model.hidden_size) if streams is not None else ())]


_FUSED = (
    ("q latent", "kv latent"),
    ("q", "k", "v", "gate", "qkv", "decay and rate", "rate"),
    ("decay down", "gate down"),
)
"""Weights with the same input that are one parameter."""

_OF_HEADS = ("qk norm", "norm of heads")
"""Norms that each rank holds whole and uses for its own heads."""

_WIDE = ("router", "shared gate")
"""Matrices that stay in 16 bits where others are gathered in fp8."""


def shapes_on_rank(s: Sender, weights: Iterable[Weight]) -> list[tuple[int, ...]]:
    """Shapes of what one rank holds of a layer's weights as parameters, outputs first."""
    e, shapes = s.experiment, list[tuple[int, ...]]()
    fused: dict[tuple[tuple[str, ...], int], int] = {}
    for one in weights:
        outputs, inputs, copies = one.outputs, one.inputs, one.copies
        if one.held == "split" and one.name in ROW_PARALLEL:
            inputs //= e.tp
        elif one.held == "split":
            outputs //= e.tp
        elif one.held == "experts":
            outputs, inputs = (outputs, inputs // e.etp) if one.name == "expert down" else (outputs // e.etp, inputs)
            outputs, copies = outputs * copies // e.ep, 1
        if one.use == "vector":
            shapes += [(outputs,)] * copies
            continue
        names = next((names for names in _FUSED if one.name in names), (one.name,))
        if (names, inputs) in fused:
            place = fused[names, inputs]
            shapes[place] = shapes[place][0] + outputs, inputs
            continue
        fused[names, inputs] = len(shapes)
        shapes.append((outputs * copies, inputs))
    return shapes


def layer_units(s: Sender, stage: Stage) -> Iterator[Unit]:
    """FSDP's units of a stage's layers in forward order."""
    zero3, precision = s.experiment.zero_stage == 3, s.experiment.precision
    for kind in s.kinds_of(stage):
        weights = weights_of(s, kind)
        experts = tuple(shapes_on_rank(s, (one for one in weights if one.held == "experts")))
        if experts:
            biases = tuple(shape for shape in experts if len(shape) == 1)  # in 16 bits
            products = tuple(shape for shape in experts if len(shape) > 1)
            in_fp8 = precision.startswith("fp8")
            held = (biases, products) if in_fp8 else (products + biases, ())
            yield Unit(held[0], zero3, held[1], of_experts=True)
        rest = [one for one in weights if one.held != "experts"]
        cast = [one for one in rest if precision == "fp8_tensorwise" and one.use == "matrix" and one.name not in _WIDE]
        wide = [one for one in rest if one not in cast]
        yield Unit(
            *(tuple(shapes_on_rank(s, wide)), zero3, tuple(shapes_on_rank(s, cast))), around_previous=bool(experts)
        )


def blocks_along_cp(s: Sender) -> None:
    e = s.experiment
    for kind, layers, word in s.kinds():
        for backward, count in ((False, layers), (True, layers), (False, layers * (word == "full"))):
            for sent in context_messages_of(e, kind, s.compute, s.accumulated, backward=backward):
                op: Collective = "all_to_all" if sent.op == "send" else sent.op
                # The other kinds exclude this rank's own part of the buffer.
                size = sent.bytes_each if sent.op == "send" else sent.bytes_each * e.cp // (e.cp - 1)
                s.along("cp", op, size, sent.calls * count * e.num_microbatches)
