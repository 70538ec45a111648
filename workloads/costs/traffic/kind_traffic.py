"""Messages of the layers of models with a list of layers, as terms of `workloads.costs.traffic.sent`. No torch here.

Each layer sends along tp what `workloads.costs.time.kind_times` times: the inputs of its column-parallel products are
gathered in the forward and again in the backward, and their gradients scattered; outputs of row-parallel products are
scattered, and their gradients gathered. What is computed for a rank's own tokens and used by all heads is gathered
once. Full recomputation repeats a forward up to the sum of a dense MLP. Along cp: `kind_messages`. FSDP's units are the
blocks, and the routed experts inside them.
"""

from __future__ import annotations

from collections.abc import Iterator

from workloads.costs.shape.params import whole_model
from workloads.costs.traffic.collectives import Collective
from workloads.costs.traffic.fsdp import Unit
from workloads.costs.traffic.kind_messages import context_messages_of
from workloads.costs.traffic.sender import Sender, Stage
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.weight import ROW_PARALLEL, Weight


def blocks_along_tp(s: Sender) -> None:
    """Count what the layers send along tp, without the ends of the model."""
    e, bytes_each = s.experiment, s.compute * s.tokens
    full, hidden, m = e.recompute == "full", e.model.hidden_size, e.num_microbatches
    for kind, layers, recomputed in s.kinds():
        calls, again = layers * m, recomputed * m if full else 0
        inputs, shared, sums, sums_again = [], 0, 0, 0
        if kind.mixer is not None:
            along = kind.mixer.tensor_parallel(hidden)
            inputs, shared, sums, sums_again = [*along.gathered], along.shared, 1, 1
        if isinstance(kind.mlp, DenseMLP) or (kind.mlp is not None and kind.mlp.shared is not None):
            inputs, sums = [*inputs, hidden], sums + 1
            sums_again += isinstance(kind.mlp, RoutedMLP)
        if not e.sequence_parallel:
            for width in [*inputs, *([shared] if shared else [])]:
                s.along("tp", "all_reduce", bytes_each * width, calls)
            s.along("tp", "all_reduce", bytes_each * hidden, sums * calls + sums_again * again)
            continue
        for width in inputs:
            s.along("tp", "all_gather", bytes_each * width, 2 * calls + again)
            s.along("tp", "reduce_scatter", bytes_each * width, calls)
        if shared:
            s.along("tp", "all_gather", bytes_each * shared, calls + again)
            s.along("tp", "reduce_scatter", bytes_each * shared, calls)
        s.along("tp", "all_gather", bytes_each * hidden, sums * calls)
        s.along("tp", "reduce_scatter", bytes_each * hidden, sums * calls + sums_again * again)


def replicated_shapes(s: Sender) -> list[tuple[int, ...]]:
    """Shapes of the layers' parameters whose gradients are summed over the tp ranks: with sequence parallelism all that
    each rank holds whole, else those of heads."""
    e = s.experiment
    shapes: list[tuple[int, ...]] = []
    for kind, layers, _ in s.kinds():
        whole = [one for one in weights_of(s, kind) if one.held == "whole"]
        whole = whole if e.sequence_parallel else [one for one in whole if one.name == "qk norm"]
        shapes += [shape_on_rank(s, one) for one in whole] * layers
    return shapes


def weights_of(s: Sender, kind: Layer) -> list[Weight]:
    """The weights of one layer, with those of hyper-connections."""
    model = s.experiment.model
    streams = whole_model(model).streams
    return [*kind.weights(model.hidden_size), *(streams.weights(model.hidden_size) if streams is not None else ())]


def shape_on_rank(s: Sender, weight: Weight) -> tuple[int, ...]:
    """Shape of what one rank holds of a weight, outputs first."""
    e = s.experiment
    outputs, inputs = weight.outputs, weight.inputs
    if weight.held == "split" and weight.name in ROW_PARALLEL:
        inputs //= e.tp
    elif weight.held == "split":
        outputs //= e.tp
    if weight.held == "experts":
        outputs, inputs = (outputs, inputs // e.etp) if weight.name == "expert down" else (outputs // e.etp, inputs)
        return (
            (outputs * weight.copies // e.ep, inputs) if weight.use == "matrix" else (outputs * weight.copies // e.ep,)
        )
    if weight.use == "vector":
        return (outputs * weight.copies,)
    return (outputs * weight.copies, inputs)


def layer_units(s: Sender, stage: Stage) -> Iterator[Unit]:
    """FSDP's units of a stage's layers in forward order."""
    zero3 = s.experiment.zero_stage == 3
    for kind in s.kinds_of(stage):
        weights = weights_of(s, kind)
        rest = tuple(shape_on_rank(s, one) for one in weights if one.held != "experts")
        experts = tuple(shape_on_rank(s, one) for one in weights if one.held == "experts")
        if experts:
            yield Unit(experts, zero3, of_experts=True)
        yield Unit(rest, zero3, around_previous=bool(experts))


def blocks_along_cp(s: Sender) -> None:
    e = s.experiment
    for kind, layers, recomputed in s.kinds():
        for backward, count in ((False, layers), (True, layers), (False, recomputed * (e.recompute == "full"))):
            for sent in context_messages_of(e, kind, s.compute, s.master, backward=backward):
                op: Collective = "all_to_all" if sent.op == "send" else sent.op
                # The other kinds exclude this rank's own part of the buffer.
                size = sent.bytes_each if sent.op == "send" else sent.bytes_each * e.cp // (e.cp - 1)
                s.along("cp", op, size, sent.calls * count * e.num_microbatches)
