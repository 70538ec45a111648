"""Steps of a backward in the layers of a pipeline rank: block backwards and gradient reductions.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.events import Live, Step
from workloads.costs.memory.expert_events import experts_gathered, experts_of_first_layer, experts_of_last_layer
from workloads.costs.memory.gathered_weights import gathered_first, gathered_last, layers_after
from workloads.costs.memory.layer_classes import LayerSizes
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn

_AFTER_REDUCTION: Live = dict.fromkeys(("of_experts", "stream", "reducing", "new_shard"), 0)
_AFTER_HEAD: Live = dict.fromkeys(("loss", "gathering", "end_gradient"), 0)


def layer_steps(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """Steps from the last layer to the first; none in a stage without layers."""
    if not part.classes:
        return []
    last_layer = _last_layer(x, part, turn)
    steps = [*experts_gathered(x, part, turn, last_layer), ("last layer, backward", last_layer)]
    if part.experts and not turn.first_half:
        steps += experts_of_last_layer(x, part, turn, last_layer)
    elif turn.reduces and not turn.first_half:
        steps += _reduction(x, part, turn, last_layer)
    done = part.kept_after if 0 < part.kept_after < part.num_layers else 1
    if done < part.num_layers:
        steps.append(_next_layer(x, part, turn, done, last_layer))
        steps += _next_reduction(x, part, turn, done, steps[-1][1])
    if part.experts and not turn.first_half:
        number = next(number for number, one in enumerate(part.classes) if one.size.experts)
        of_class = part.classes[number]
        if 0 < of_class.recomputed < of_class.layers and not of_class.first_recomputed:
            steps += experts_of_first_layer(x, part, turn, number, 1)
        steps += experts_of_first_layer(x, part, turn, number, 0)
    last = len(part.classes) - 1
    for number in range(last, -1, -1):
        if part.classes[number].size.offloaded and part.classes[number].layers > 1 and layers_after(part, number) > 2:
            # Offloaded tensors of two layers are there up to the second layer, whose backward has more gradients
            # beside them than the backwards before it.
            steps.append(_first_layer(x, part, turn, number, 1))
        if number == 0 or number < last or part.classes[number].layers > 1:  # else it is the last layer, above
            steps.append(_first_layer(x, part, turn, number))
    if turn.reduces and not turn.first_half and part.num_layers > 1:
        steps += _first_reduction(x, part, turn, steps[-1][1])
    return steps


def _prior(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes of gradients in the last layer's backward. In the last backward the head's sum of gradients has been
    reduced by then."""
    finished = 0 if turn.first_half or x.splits else turn.finished(x, part.head, 0)
    return turn.prior + turn.first_gradient(x, part) + finished


def _flat(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes of the flat copy of the unit that was reduced before the last layer."""
    of_head = part.head > 0 and turn.reduces and not turn.second_half
    return x.after(part.head) if of_head else turn.pending(x, part)


def _last_layer(x: Shared, part: Part, turn: Turn) -> Live:
    """The last layer's backward: its gradients, recomputed tensors and the head's gradient exist."""
    return {
        **_AFTER_REDUCTION,
        **_AFTER_HEAD,
        "weights": gathered_last(x, part, turn),
        "gradients": _prior(x, part, turn),
        "of_tied": x.w * part.tied,
        "working": _working(x, part, turn, kept=part.kept_after > 0),
        "fetched": part.fetched(0),
        "flat": _flat(x, part, turn),
    }


def _working(x: Shared, part: Part, turn: Turn, *, kept: bool) -> int:
    """Working bytes of the class of layers here that needs most. ``kept``: of layers that are not recomputed."""
    sizes = [x.sizes[one.kind] for one in part.classes]
    extra = 1 if turn.first_half else 0
    return max((size.working_kept if kept else size.working) + extra * size.first_half for size in sizes)


def _reduction(x: Shared, part: Part, turn: Turn, last_layer: Live) -> list[Step]:
    """The reduction of the last layer's gradient.

    The layer's saved tensors are free. With several shards FSDP frees the layer's gradients once the flat copy exists,
    except the last one, of the down weight, and only then creates the new shard. In a split backward the gradients have
    r bytes per element by then.
    """
    size = part.classes[-1].size
    changes: Live = {
        "working": 0,
        "saved": part.saved
        - (size.kept if part.kept_after else size.saved)
        - part.last_stays
        - (part.input_stays if part.num_layers == 1 else 0),
        "fetched": sum(part.offloaded[1:2]),
        "weights": last_layer["weights"] - (x.b * part.last_block if x.zero3 or turn.last else 0),
        "received": 0 if part.has_head else x.stream,
        "stream": x.stream,
        "gradients": last_layer["gradients"],
    }
    return [("last layer, reduction", one) for one in _reduced_block(x, turn, size, part.last_block, changes, 0)]


def _first_reduction(x: Shared, part: Part, turn: Turn, first_layer: Live) -> list[Step]:
    """The reduction of the first layer's gradient, in a stage with others: all of them have theirs, and no layer has
    saved tensors any more. It exceeds all other steps where layers save less than their gradients take."""
    size = part.classes[0].size
    of_ends = part.first if part.has_embedding else 0
    done = max(0, part.params - part.all_experts - size.block - of_ends)
    changes: Live = {
        "working": 0,
        "saved": part.output,
        "fetched": 0,
        "weights": first_layer["weights"] - (x.b * size.block if x.zero3 or turn.last else 0),
        "gradients": turn.gradients(x, done, part.all_experts),
        "of_experts": 0,
        "stream": x.stream,
    }
    if not x.zero3:
        changes["weights"] -= x.b_experts * size.experts if turn.last else 0
    return [("first layer, reduction", one) for one in _reduced_block(x, turn, size, size.block, changes, size.block)]


def _reduced_block(x: Shared, turn: Turn, size: LayerSizes, block: int, changes: Live, before: int) -> list[Live]:
    """``changes`` with the tensors of the reduction of a layer's ``block`` elements. ``before``: elements of the unit
    that was reduced before it."""
    changes["flat"] = 0 if x.adds else x.r * block
    if x.shards == 1:
        changes["reducing"] = x.made_of_sums(block, 1) if x.adds else turn.scaled(x) * block
        changes["gradients"] += 0 if turn.prior or x.adds else x.g * block
        return [changes]
    if x.unsharded and not turn.prior and not x.adds:  # the only micro-batch's gradients are cast, weight by weight
        casts: Live = {"reducing": x.r * block + (x.c * size.down if x.c != x.r else 0), "flat": x.r * before}
        casts["weights"] = changes["weights"] + x.b * block
        reduced: Live = {"reducing": x.r * block, "flat": x.r * block, "weights": changes["weights"]}
        return [changes | casts, reduced]
    if x.unsharded:
        changes["new_shard"] = x.made_of_sums(block, x.shards) if x.adds else 0
        return [changes]
    each = x.r if x.splits else x.c
    changes["reducing"] = each * block
    new_shard = 0 if x.adds else (x.g + x.cast) * block // x.shards
    return [changes, {"reducing": each * size.down, "new_shard": new_shard}]


def _next_layer(x: Shared, part: Part, turn: Turn, done: int, last_layer: Live) -> Step:
    """The backward after ``done`` layers, which are the last one, or those after the last recomputed one.

    Their saved tensors are free, their gradients exist, and the last of them is being reduced; a stage other than the
    last still holds the gradient that it received. With ZeRO 3 the next unit is gathered already: a block or the
    embedding.
    """
    kept, layers = part.kept_after, part.last_layers(done)
    rest = experts = saved = deferred = 0
    for size, count in layers:
        rest += count * size.block
        experts += count * size.experts
        saved += count * (size.kept if kept else size.saved)
        deferred += count * size.deferred
    of_done, shard = x.r * (rest + experts), x.shard(rest, experts)
    weights, gradients = last_layer["weights"], last_layer["gradients"]
    if x.zero3 and part.has_embedding and done == part.num_layers - 1:
        weights = x.b * part.first_block + x.c * part.first
    elif not x.zero3 and turn.last:
        weights -= x.b * rest + x.b_experts * experts
    if not turn.first_half and not turn.prior:
        gradients += shard if turn.reduces else of_done
    elif not turn.first_half:
        gradients += turn.finished(x, rest, experts)
    flat = last_layer["flat"]
    if turn.reduces:
        flat = flat if turn.first_half else x.after(layers[-1][0].block)
    not_again = kept == 0 and x.between  # the last layer is recomputed, the one before it is not
    return "layer before" if done == 1 else "last recomputed layer", {
        **_AFTER_REDUCTION,
        "saved": part.saved - saved - part.last_stays,
        "fetched": part.fetched(done),
        "left": deferred if turn.first_half else 0,
        "weights": weights,
        "gradients": gradients,
        "received": 0 if part.has_head else x.stream,
        "working": _working(x, part, turn, kept=not_again or kept == part.num_layers),
        "flat": flat,
    }


def _next_reduction(x: Shared, part: Part, turn: Turn, done: int, next_layer: Live) -> list[Step]:
    """The reduction of the gradient of the layer of `_next_layer`, whose own flat copy exists then. Layers with experts
    have reduced those before, and the first layer has a step of its own."""
    size = part.last_layers(done + 1)[-1][0]
    if part.num_layers == done + 1 or size.experts or not turn.reduces or turn.first_half:
        return []
    saved = size.kept if part.kept_after > done else size.saved
    changes: Live = {
        "working": 0,
        "saved": next_layer["saved"] - saved,
        "fetched": part.fetched(done + 1),
        "weights": next_layer["weights"] - (x.b * size.block if x.zero3 or turn.last else 0),
        "gradients": next_layer["gradients"],
        "stream": x.stream,
    }
    return [("layer before, reduction", one) for one in _reduced_block(x, turn, size, size.block, changes, size.block)]


def _first_layer(x: Shared, part: Part, turn: Turn, number: int, before: int = 0) -> Step:
    """The backward of the first layer of class ``number``, or of one with ``before`` layers of its class before it, all
    alike: all layers after it and the head have their gradients.

    It exceeds the last layer's if a layer's gradient takes more than the layer had saved.
    """
    of_class, through = part.classes[number], before + 1
    size, recomputed = of_class.size, of_class.first_recomputed
    block = through * size.block + of_class.block_before
    experts = through * size.experts + of_class.experts_before
    deferred = through * size.deferred + of_class.deferred_before
    saved = through * (size.saved if recomputed else size.kept) + of_class.saved_before
    done, of_others = part.head, 0
    if not turn.first_half:
        of_others = part.all_experts - experts
        done = max(0, part.params - part.all_experts - block - (part.first if part.has_embedding else 0))
    place = layers_after(part, number) - before
    working = size.working if recomputed else size.working_kept
    earlier = part.head > 0 or part.num_layers > 1  # a unit was reduced before
    return f"{'second' if before else 'first'} {size.name}, backward", {
        **_AFTER_REDUCTION,
        "saved": saved + part.output + part.input_stays + (0 if place else part.last_stays),
        "fetched": part.fetched(place),
        "left": turn.own_deferred - deferred if turn.first_half else 0,  # for the others' weight-gradient passes
        "weights": gathered_first(x, part, turn, number, block, experts, before),
        "gradients": turn.gradients(x, done, of_others),
        # An input-gradient pass has it among what is left.
        "received": x.stream if place and not part.has_head and not turn.first_half else 0,
        "working": working + (size.first_half if turn.first_half else 0),
        "flat": x.after(size.block) if turn.reduces and not turn.first_half and earlier else _flat(x, part, turn),
    }
