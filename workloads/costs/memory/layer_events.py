"""Steps of a backward in the layers of a pipeline rank: block backwards and gradient reductions.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.end_events import last_ahead
from workloads.costs.memory.events import Live, Step
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
    steps = [*_experts_gathered(x, part, turn, last_layer), ("last layer, backward", last_layer)]
    if part.experts and not turn.first_half:
        steps += _experts_of_last_layer(x, part, turn, last_layer)
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
            steps += _experts_of_first_layer(x, part, turn, number, 1)
        steps += _experts_of_first_layer(x, part, turn, number, 0)
    last = len(part.classes) - 1
    for number in range(last, -1, -1):
        if part.classes[number].size.offloaded and part.classes[number].layers > 1 and _place(part, number) > 2:
            # Offloaded tensors of two layers are there up to the second layer, whose backward has more gradients
            # beside them than the backwards before it.
            steps.append(_first_layer(x, part, turn, number, 1))
        if number == 0 or number < last or part.classes[number].layers > 1:  # else it is the last layer, above
            steps.append(_first_layer(x, part, turn, number))
    if turn.reduces and not turn.first_half and part.num_layers > 1:
        steps += _first_reduction(x, part, turn, steps[-1][1])
    return steps


def _gathered(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes gathered in the last layer's backward. With ZeRO 3 the unit before it is gathered ahead. In the last
    backward the head's weight is freed after its reduction, and that of an earlier micro-batch may be gathered again
    ahead of the only layer."""
    if x.zero3:
        return min(part.whole, _two_units(x, part, turn) + x.b_experts * part.experts)
    freed = turn.last and not turn.own_deferred and not turn.second_half
    ahead = last_ahead(x, part, turn) if part.num_layers == 1 and not part.has_embedding else 0
    return part.whole - (x.c * part.head - ahead if freed else 0)


def _two_units(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes gathered with ZeRO 3 in the last layer, without its experts: it and the unit before it, which is a block,
    or before the only layer what `_ahead` says. A tied weight stays gathered."""
    before = x.b * part.before_last
    if part.num_layers == 1:
        before = 0 if part.tied else _ahead(x, part, turn)
    return x.b * part.last_block + before + x.c * part.tied


def _ahead(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes that FSDP gathers ahead in the backward of the first layer with ZeRO 3: the embedding, or the tied weight,
    which stays gathered; else what `last_ahead` says."""
    return x.c * part.tied or (part.first_copy if part.has_embedding else last_ahead(x, part, turn))


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
        "weights": _gathered(x, part, turn),
        "gradients": _prior(x, part, turn),
        "of_tied": x.w * part.tied,
        "working": _working(x, part, turn, kept=part.kept_after > 0),
        "fetched": part.fetched(0),
        "flat": _flat(x, part, turn),
    }


def _experts_gathered(x: Shared, part: Part, turn: Turn, last_layer: Live) -> list[Step]:
    """The copy of the last layer's experts from the buffer that ZeRO 3 has gathered them to, before their backward. One
    shard is gathered by a cast of one weight at a time; the reduction of its gradients needs more, unless products add
    them to sums."""
    size = part.classes[-1].size
    arriving = size.arriving_kept if part.kept_after else size.arriving
    if not x.zero3 or not size.experts or not arriving or turn.second_half:
        return []
    if x.expert_shards == 1 and not x.experts_add:
        return []
    beside = size.experts_up if x.expert_shards == 1 else size.experts
    weights = x.b * part.last_block + x.b_experts * (size.experts + beside) + x.c * part.tied
    return [("last layer's experts, gathering", last_layer | {"weights": weights, "working": arriving})]


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
        "gradients": _gradients(x, turn, done, part.all_experts),
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
        changes["reducing"] = x.made_of_sums(block, 1) if x.adds else _scaled(x, turn) * block
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


def _scaled(x: Shared, turn: Turn) -> int:
    """Bytes per element of what one shard alone takes beside the flat copy: an accumulated gradient, which is counted
    with others, makes room for the scaled copy or for the gradient."""
    return max(x.r, x.g) if x.unsharded and turn.prior else x.scaled


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
    place = _place(part, number) - before
    working = size.working if recomputed else size.working_kept
    earlier = part.head > 0 or part.num_layers > 1  # a unit was reduced before
    return f"{'second' if before else 'first'} {size.name}, backward", {
        **_AFTER_REDUCTION,
        "saved": saved + part.output + part.input_stays + (0 if place else part.last_stays),
        "fetched": part.fetched(place),
        "left": turn.own_deferred - deferred if turn.first_half else 0,  # for the others' weight-gradient passes
        "weights": _gathered_first(x, part, turn, number, block, experts, before),
        "gradients": _gradients(x, turn, done, of_others),
        # An input-gradient pass has it among what is left.
        "received": x.stream if place and not part.has_head and not turn.first_half else 0,
        "working": working + (size.first_half if turn.first_half else 0),
        "flat": x.after(size.block) if turn.reduces and not turn.first_half and earlier else _flat(x, part, turn),
    }


def _place(part: Part, number: int) -> int:
    """How many layers come after the first layer of class ``number``."""
    return part.num_layers - 1 - part.classes[number].place


def _gathered_first(x: Shared, part: Part, turn: Turn, number: int, block: int, experts: int, before: int) -> int:
    """Bytes gathered in the backward of the first layer of a class, or of one ``before`` layers after it. ``block``,
    ``experts``: elements up to it. With ZeRO 3 FSDP gathers the next unit ahead."""
    size = part.classes[number].size
    if x.zero3:
        return x.b * size.block + x.b_experts * size.experts + _following(x, part, turn, number, before)
    left = x.b * block + x.b_experts * experts + (part.first_copy if part.has_embedding else 0)
    left += x.c * part.head if turn.second_half else 0
    if turn.last and not part.has_embedding and not number and not before:
        left += last_ahead(x, part, turn)
    return min(part.whole, left) if turn.last else part.whole


def _following(x: Shared, part: Part, turn: Turn, number: int, before: int) -> int:
    """Bytes of the unit that FSDP gathers ahead in such a layer's backward with ZeRO 3: the block of the layer before
    it, or what `_ahead` says."""
    if number == 0 and before == 0:
        return _ahead(x, part, turn)
    if before:
        return x.b * part.classes[number].size.block
    alike = part.classes[number].place == sum(one.layers for one in part.classes[:number])
    return x.b * (part.classes[number - 1].size.block if alike else x.block)


def _gradients(x: Shared, turn: Turn, rest: int, experts: int) -> int:
    """Bytes of gradients when units of ``rest`` elements and ``experts`` elements of experts have theirs."""
    shard, unsharded = x.shard(rest, experts), x.r * (rest + experts)
    gradients = turn.prior or (shard if turn.reduces else unsharded)
    return gradients + (shard - x.summed(rest, experts) if turn.last and (turn.prior or x.unsharded) else 0)


def _experts_of_last_layer(x: Shared, part: Part, turn: Turn, last_layer: Live) -> list[Step]:
    """The reduction of the expert gradients of the last layer with experts, which comes before the rest of the layer.

    The saved tensors of the layer's experts are free; the rest of the layer is not. With ZeRO 3 the rest of this layer
    and of the previous one are gathered.
    """
    size = part.experts
    weights = last_layer["weights"] - (x.b_experts * size if turn.last else 0)
    if x.zero3:
        weights = min(part.whole, _two_units(x, part, turn))
    # The head is reduced after all blocks in a weight-gradient pass without a reduction before.
    is_reduced = turn.reduces and not (x.unsharded and turn.second_half)
    gradients = turn.prior or (x.g * part.head // x.shards if is_reduced else x.r * part.head)
    if is_reduced:
        gradients += turn.finished(x, part.head, 0)
    of_layer = next(one.size for one in reversed(part.classes) if one.size.experts)
    freed = of_layer.reducing_kept if part.kept_after else of_layer.reducing
    steps: list[Step] = []
    accumulated = x.unsharded and turn.prior > 0
    if turn.second_half and turn.reduces and x.expert_shards > 1 and not accumulated:
        # The gradients are cast, those of the first products at once. The flat copy of the previously reduced unit,
        # the head if there is one, still exists.
        changes: Live = {
            "working": 0,
            "saved": part.saved + freed,
            "fetched": part.fetched(0),
            "weights": weights if x.zero3 else part.whole,
            "gradients": gradients,
            "reducing": x.c * size + (0 if x.c == x.r else x.r * of_layer.experts_up),
            "flat": 0 if x.unsharded else x.r * part.head or turn.pending(x, part),
        }
        steps.append(("last layer's experts, casts", changes))
    before = {"working": 0, "saved": part.saved + freed, "weights": weights, "gradients": gradients}
    before["fetched"] = part.fetched(0)
    return [*steps, *(("last layer's experts, reduction", before | one) for one in _reduced_experts(x, part, turn))]


def _experts_of_first_layer(x: Shared, part: Part, turn: Turn, number: int, before: int) -> list[Step]:
    """The same of the first layer with experts, of class ``number``: all layers after it and the head have their
    gradients. ``before``: 1 for the second one, which is recomputed where the first is not."""
    of_class = part.classes[number]
    size = of_class.size
    block = (before + 1) * size.block + of_class.block_before
    rest = part.head - block + sum(one.layers * one.size.block for one in part.classes)
    if x.zero3:
        tied = x.c * part.tied if number or before else 0
        weights = min(part.whole, x.b * size.block + _following(x, part, turn, number, before) + tied)
    else:
        weights = _gathered_first(x, part, turn, number, block, before * size.experts, before)
    again = before > 0 or of_class.first_recomputed
    saved = (size.saved + size.reducing if again else size.kept + size.reducing_kept) + before * size.kept
    place = _place(part, number) - before
    changes: Live = {
        "working": 0,
        "left": 0,
        "saved": saved + of_class.saved_before + part.output + part.input_stays + (0 if place else part.last_stays),
        "fetched": part.fetched(place),
        "weights": weights,
        "gradients": _gradients(x, turn, rest, part.all_experts - (before + 1) * part.experts),
        "received": x.stream if place and not part.has_head else 0,
    }
    name = f"{'second' if before else 'first'} layer's experts, reduction"
    return [(name, changes | one) for one in _reduced_experts(x, part, turn)]


def _reduced_experts(x: Shared, part: Part, turn: Turn) -> list[Live]:
    """Tensors of the reduction of one layer's expert gradients. Without a reduction the gradients are added to those of
    other micro-batches.

    FSDP holds a unit's last gradient. All gradients exist while the flat copy is created, before the new shard. In a
    split backward they have r bytes per element. A shard of another format than the master weights' exists beside its
    cast.
    """
    of_layer = next(one.size for one in reversed(part.classes) if one.size.experts)
    size, flat = part.experts, 0 if x.adds and turn.reduces else x.r * part.experts
    shard = x.g_experts * size // x.expert_shards
    if x.experts_add and not x.unsharded:  # what the unit before it has left of its reduction stays
        made = x.made_of_sums(size, 1) if turn.last else 0
        return [{"reducing": 0, "new_shard": made, "of_experts": x.w_experts * size}]
    if not turn.reduces:
        # The first gradients are cast weight by weight. Those in the master dtype are accumulated as is.
        cast = 0 if turn.prior or x.experts_add or x.c == x.r else x.r * of_layer.experts_up
        return [{"reducing": 0, "new_shard": 0, "flat": 0, "of_experts": x.w_experts * size + cast}]
    reduced = 0 if turn.prior else shard
    new = shard if turn.prior and not x.unsharded else 0  # exists together with the shard that it is added to
    new += x.made_of_sums(size, x.expert_shards) if x.adds else 0
    after: Live = {
        "reducing": _scaled(x, turn) * size if x.expert_shards == 1 and flat else 0,
        "new_shard": new,
        "flat": flat,
        "of_experts": reduced,
    }
    if x.expert_shards == 1 or (x.unsharded and turn.prior):
        return [after]  # accumulated gradients are freed before the new shard exists
    each = x.r if turn.second_half or turn.own_deferred else x.c
    first: Live = {"reducing": each * size - reduced, "new_shard": 0, "flat": flat, "of_experts": reduced}
    cast = 0 if x.adds else x.cast_experts * size // x.expert_shards
    return [first, after | {"reducing": each * of_layer.experts_down, "new_shard": new + cast}]
