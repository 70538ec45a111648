"""Steps of a backward in the routed experts of a pipeline rank: their gathering and the reductions of their gradients.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.events import Live, Step
from workloads.costs.memory.gathered_weights import two_units
from workloads.costs.memory.layer_classes import LayerSizes, Place
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn


def experts_gathered(x: Shared, part: Part, turn: Turn, last_layer: Live) -> list[Step]:
    """The copy of the last layer's experts from the buffer that ZeRO 3 has gathered them to, before their backward. One
    shard is gathered by a cast of one weight at a time; the reduction of its gradients needs more, unless products add
    them to sums."""
    last = part.places[0]
    size = last.size
    arriving = size.arriving if last.recomputed else size.arriving_kept
    if not x.zero3 or not size.experts or not arriving or turn.second_half:
        return []
    if x.expert_shards == 1 and not x.experts_add:
        return []
    beside = size.experts_up if x.expert_shards == 1 else size.experts
    weights = x.b * part.last_block + x.b_experts * (size.experts + beside) + x.c * part.tied
    return [("last layer's experts, gathering", last_layer | {"weights": weights, "working": arriving})]


def experts_made_again(x: Shared, part: Part, turn: Turn, place: Place, layer: Live) -> list[Step]:
    """The end of the second forward of a layer's experts, whose weights ZeRO 3 has gathered to a buffer that lives
    until then. The unit before is gathered ahead later. ``layer``: its backward."""
    again = place.size.again
    if not x.zero3 or not place.recomputed or not again or turn.second_half or x.expert_shards == 1:
        return []
    weights = x.b * place.size.block + 2 * x.b_experts * place.size.experts + x.c * part.tied
    return [(f"{place.name}'s experts, second forward", layer | {"weights": weights, "working": again})]


def experts_reduced(x: Shared, part: Part, turn: Turn, place: Place, layer: Live) -> list[Step]:
    """The reduction of the expert gradients of a layer, which comes before the rest of the layer. ``layer``: its
    backward.

    The saved tensors of the layer's experts are free; the rest of the layer is not. With ZeRO 3 the rest of this layer
    and of the previous one are gathered.
    """
    size = place.size
    weights = layer["weights"] - (x.b_experts * size.experts if turn.last else 0)
    if x.zero3:
        weights = min(part.whole, two_units(x, part, turn, place))
    freed = size.reducing if place.recomputed else size.reducing_kept
    before: Live = {"working": 0, "saved": layer["saved"] + freed, "weights": weights}
    steps: list[Step] = []
    if place.done == 0:
        # The head is reduced after all blocks in a weight-gradient pass without a reduction before.
        is_reduced = turn.reduces and not (x.unsharded and turn.second_half)
        before["gradients"] = turn.prior or (x.g * part.head // x.shards if is_reduced else x.r * part.head)
        before["gradients"] += turn.finished(x, part.head, 0) if is_reduced else 0
        accumulated = x.unsharded and turn.prior > 0
        if turn.second_half and turn.reduces and x.expert_shards > 1 and not accumulated:
            # The gradients are cast, weight by weight, and the last one is freed only then. The flat copy of the
            # previously reduced unit, the head if there is one, still exists.
            casts = x.c * size.experts + x.r * size.experts_up, x.r * size.experts + x.c * size.experts_down
            changes: Live = {
                "weights": weights if x.zero3 else part.whole,
                "reducing": x.c * size.experts if x.c == x.r else max(casts),
                "flat": 0 if x.unsharded else x.r * part.head or turn.pending(x, part),
            }
            steps.append((f"{place.name}'s experts, casts", before | changes))
    name = f"{place.name}'s experts, reduction"
    return [*steps, *((name, before | one) for one in _reduced_experts(x, turn, size))]


def _reduced_experts(x: Shared, turn: Turn, of_layer: LayerSizes) -> list[Live]:
    """Tensors of the reduction of one layer's expert gradients. Without a reduction the gradients are added to those of
    other micro-batches.

    FSDP holds a unit's last gradient. All gradients exist while the flat copy is created, before the new shard. In a
    split backward they have r bytes per element. A shard of another format than the master weights' exists beside its
    cast.
    """
    size = of_layer.experts
    flat = 0 if x.adds and turn.reduces else x.r * size
    shard = x.g_experts * size // x.expert_shards
    if x.experts_add and not x.unsharded:  # what the unit before it has left of its reduction stays
        made = x.made_of_sums(size, x.expert_shards) if turn.last else 0
        sums: Live = {"reducing": 0, "new_shard": made, "of_experts": x.w_experts * size}
        return [sums | {"flat": 0} if x.only_sums and not x.experts_alone else sums]
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
    if x.experts_alone and not flat:  # sums without a message leave what the unit before has left
        del after["flat"]
    if x.expert_shards == 1 or (x.unsharded and turn.prior):
        return [after]  # accumulated gradients are freed before the new shard exists
    each = x.r if turn.second_half or turn.own_deferred else x.c
    first: Live = {"reducing": each * size - reduced, "new_shard": 0, "flat": flat, "of_experts": reduced}
    cast = 0 if x.adds else x.cast_experts * size // x.expert_shards
    return [first, after | {"reducing": each * of_layer.experts_down, "new_shard": new + cast}]


def beside_experts(x: Shared, turn: Turn, place: Place, layer: Live) -> Live:
    """The gradients of a layer's experts as they stay in the rest of its backward. ``layer``: the backward of its
    MLP."""
    experts = place.size.experts
    stays = x.shard(0, experts) if turn.reduces else x.r * experts
    changes: Live = {
        "gradients": layer["gradients"] + (turn.finished(x, 0, experts) if turn.prior else 0),
        "of_experts": 0 if turn.prior else stays,
        "reducing": 0,
        "new_shard": 0,
    }
    by_message = x.only_sums and not x.experts_alone
    if turn.reduces and (x.unsharded or not x.experts_add or by_message):  # else what the unit before has left stays
        if not (x.adds and x.experts_alone):
            changes["flat"] = 0 if x.adds and x.expert_shards == 1 else x.r * experts
        changes["new_shard"] = x.cast_experts * experts // x.expert_shards if x.stays else 0
    return changes
