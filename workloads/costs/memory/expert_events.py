"""Steps of a backward in the routed experts of a pipeline rank: their gathering and the reductions of their gradients.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.events import Live, Step
from workloads.costs.memory.gathered_weights import following, gathered_first, layers_after, two_units
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn


def experts_gathered(x: Shared, part: Part, turn: Turn, last_layer: Live) -> list[Step]:
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


def experts_of_last_layer(x: Shared, part: Part, turn: Turn, last_layer: Live) -> list[Step]:
    """The reduction of the expert gradients of the last layer with experts, which comes before the rest of the layer.

    The saved tensors of the layer's experts are free; the rest of the layer is not. With ZeRO 3 the rest of this layer
    and of the previous one are gathered.
    """
    size = part.experts
    weights = last_layer["weights"] - (x.b_experts * size if turn.last else 0)
    if x.zero3:
        weights = min(part.whole, two_units(x, part, turn))
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


def experts_of_first_layer(x: Shared, part: Part, turn: Turn, number: int, before: int) -> list[Step]:
    """The reduction of the expert gradients of the first layer with experts, of class ``number``: all layers after it
    and the head have their gradients. ``before``: 1 for the second one, which is recomputed where the first is not."""
    of_class = part.classes[number]
    size = of_class.size
    block = (before + 1) * size.block + of_class.block_before
    rest = part.head - block + sum(one.layers * one.size.block for one in part.classes)
    if x.zero3:
        tied = x.c * part.tied if number or before else 0
        weights = min(part.whole, x.b * size.block + following(x, part, turn, number, before) + tied)
    else:
        weights = gathered_first(x, part, turn, number, block, before * size.experts, before)
    again = before > 0 or of_class.first_recomputed
    saved = (size.saved + size.reducing if again else size.kept + size.reducing_kept) + before * size.kept
    place = layers_after(part, number) - before
    changes: Live = {
        "working": 0,
        "left": 0,
        "saved": saved + of_class.saved_before + part.output + part.input_stays + (0 if place else part.last_stays),
        "fetched": part.fetched(place),
        "weights": weights,
        "gradients": turn.gradients(x, rest, part.all_experts - (before + 1) * part.experts),
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
        "reducing": turn.scaled(x) * size if x.expert_shards == 1 and flat else 0,
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
