"""Steps of a backward in the layers of a pipeline rank: block backwards and gradient reductions.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.events import Live, Step
from workloads.costs.memory.expert_events import beside_experts, experts_gathered, experts_made_again, experts_reduced
from workloads.costs.memory.gathered_weights import gathered, two_units
from workloads.costs.memory.layer_classes import Place
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn

_AFTER_REDUCTION: Live = dict.fromkeys(("of_experts", "stream", "reducing", "new_shard"), 0)
_AFTER_HEAD: Live = dict.fromkeys(("loss", "gathering", "end_gradient"), 0)


def layer_steps(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """Steps of the layers in `Part.places`, from the last one to the first; none in a stage without layers."""
    steps: list[Step] = []
    for place in part.places:
        if place.role.startswith("second") and not place.size.offloaded:
            continue
        layer = _layer(x, part, turn, place)
        if place.done == 0:
            steps += experts_gathered(x, part, turn, layer)
        steps += experts_made_again(x, part, turn, place, layer)
        steps.append((f"{place.name}, backward", layer))
        if turn.first_half:
            steps += _mixer_first(x, part, turn, place, layer)
            continue
        if place.size.experts:
            steps += experts_reduced(x, part, turn, place, layer)
        if not turn.second_half:
            steps += _mixer(x, part, turn, place, layer)
        if turn.reduces and (not place.size.experts or (place.earlier is None and place.later is not None)):
            steps += _reduction(x, part, turn, place, layer)
    return steps


def _layer(x: Shared, part: Part, turn: Turn, place: Place) -> Live:
    """The backward of a layer's MLP, or of all of it in one pass of a split backward: its gradients and recomputed
    tensors exist, and the gradients of the head and of all layers after it, whose saved tensors are free. The gradient
    that a stage has received is the last layer's of its stream.

    It is the highest of layers alike where each saves more than its gradient takes if it is the last one, else if it is
    the first one.
    """
    whole, size = not turn.first_half, x.sizes[place.kind]  # in a first backward with the sums that it makes
    working = size.working if place.recomputed else size.working_kept
    if turn.first_half:
        working = size.first_half if place.recomputed else size.first_half_kept
    gradients, flat = _prior(x, part, turn), _flat(x, part, turn)
    if whole and turn.prior:
        gradients += turn.finished(x, place.rest, place.experts)
    elif whole:
        gradients += x.shard(place.rest, place.experts) if turn.reduces else x.r * (place.rest + place.experts)
    if whole and turn.reduces and place.later is not None:
        flat = x.after(place.later.block)
    return {
        **_AFTER_REDUCTION,
        **_AFTER_HEAD,
        "saved": part.saved - place.saved - (part.last_stays if place.done else 0),
        "fetched": part.fetched(place.done),
        "left": 0 if whole else place.deferred,
        "weights": gathered(x, part, turn, place),
        "gradients": gradients,
        "received": part.received(x, first_half=turn.first_half) if place.done and not turn.second_half else 0,
        "of_tied": x.w * part.tied,
        "working": working,
        "flat": flat,
    }


def _mixer(x: Shared, part: Part, turn: Turn, place: Place, layer: Live) -> list[Step]:
    """The rest of a layer's backward, beside the gradients of its experts, where it may be higher. ``layer``: the
    backward of its MLP, after which the gradient that a stage has received is not that of the stream any more."""
    size = x.sizes[place.kind]
    mixing = size.mixing if place.recomputed else size.mixing_kept
    received = part.received(x, first_half=False) if layer["working"] else layer["received"]
    changes: Live = _needs(layer, mixing) | {"received": received}
    if place.size.experts:
        beside = beside_experts(x, turn, place, layer)
        of_mlp = _needs(layer, size.rest if place.recomputed else size.rest_kept) | {"received": layer["received"]}
        return [
            (f"{place.name}, end of the MLP's backward", of_mlp | beside),
            (f"{place.name}, mixer's backward", changes | beside),
        ]
    if mixing + changes["received"] <= layer["working"] + layer["received"]:
        return []
    return [(f"{place.name}, mixer's backward", changes)]


def _mixer_first(x: Shared, part: Part, turn: Turn, place: Place, layer: Live) -> list[Step]:
    """As `_mixer`, in an input-gradient pass. A layer without an MLP passes the received gradient on. ZeRO 3 has freed
    the weights of the layer's experts."""
    size, steps = x.sizes[place.kind], []
    weights = min(part.whole, two_units(x, part, turn, place)) if x.zero3 else layer["weights"]
    if size.experts:
        rest = size.rest_first if place.recomputed else size.rest_first_kept
        steps.append((f"{place.name}, end of the MLP's backward", layer | {"working": rest, "weights": weights}))
    mixing = size.mixing_first if place.recomputed else size.mixing_first_kept
    received = layer["received"] if size.working == 0 else part.received(x, first_half=True)
    if size.experts or mixing + received > layer["working"] + layer["received"]:
        changes = _needs(layer, mixing) | {"received": received, "weights": weights}
        steps.append((f"{place.name}, mixer's backward", changes))
    return steps


def _needs(layer: Live, working: int) -> Live:
    """A moment of a layer's backward that needs so many bytes in addition to what the layer saved; below 0 where more
    of it is free than is needed. ``layer``: the backward of its MLP."""
    return {"working": max(0, working), "saved": layer["saved"] + min(0, working)}


def _prior(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes of gradients in the last layer's backward. In the last backward the head's sum of gradients has been
    reduced by then."""
    finished = 0 if turn.first_half or x.splits else turn.finished(x, part.head, 0)
    return turn.prior + turn.first_gradient(x, part) + finished


def _flat(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes of the flat copy of the unit that was reduced before the last layer."""
    of_head = part.head > 0 and turn.reduces and not turn.second_half
    return x.after(part.head) if of_head else turn.pending(x, part)


def _reduction(x: Shared, part: Part, turn: Turn, place: Place, layer: Live) -> list[Step]:
    """The reduction of a layer's gradient, beside the gradients of its experts and of all layers after it. ``layer``:
    its backward. It exceeds all other steps in the first layer where layers save less than their gradients take.

    The layer's saved tensors are free. With several shards FSDP frees the layer's gradients once the flat copy exists,
    except the last one, of the down weight, and only then creates the new shard. In a weight-gradient pass they have r
    bytes per element by then.
    """
    size, resharded = place.size, x.zero3 or turn.last
    freed = place.own + (0 if place.done else part.last_stays) + (0 if place.earlier is not None else part.input_stays)
    of_experts = turn.finished(x, 0, size.experts) if turn.prior else x.shard(0, size.experts)
    changes: Live = {
        **_AFTER_REDUCTION,
        "working": 0,
        "saved": layer["saved"] - freed,
        "fetched": sum(part.offloaded[place.done + 1 : place.done + 2]),
        "weights": layer["weights"] - (x.b * size.block + x.b_experts * size.experts if resharded else 0),
        "gradients": layer["gradients"] + of_experts,
        "received": 0 if turn.second_half else part.received(x, first_half=False),
        "stream": 0 if turn.second_half else x.stream,
    }
    return [(f"{place.name}, reduction", one) for one in _reduced_block(x, turn, place, changes)]


def _reduced_block(x: Shared, turn: Turn, place: Place, changes: Live) -> list[Live]:
    """``changes`` with the tensors of the reduction of a layer's block."""
    block, down = place.size.block, place.size.down
    changes["flat"] = 0 if x.adds else x.r * block
    if x.only_sums:
        changes["reducing"] = x.r * block
        changes["new_shard"] = x.made_of_sums(block, x.shards)
        return [changes]
    if x.shards == 1:
        changes["reducing"] = x.made_of_sums(block, 1) if x.adds else turn.scaled(x) * block
        changes["gradients"] += 0 if turn.prior or x.adds else x.g * block
        return [changes]
    if x.unsharded and not turn.prior and not x.adds:  # the only micro-batch's gradients are cast, weight by weight
        casts: Live = {"reducing": x.r * block + (x.c * down if x.c != x.r else 0)}
        casts["flat"] = x.r * place.later.block if place.later is not None else 0
        casts["weights"] = changes["weights"] + x.b * block
        reduced: Live = {"reducing": x.r * block, "flat": x.r * block, "weights": changes["weights"]}
        return [changes | casts, reduced]
    if x.unsharded:
        changes["new_shard"] = x.made_of_sums(block, x.shards) if x.adds else 0
        return [changes]
    each = x.r if turn.second_half else x.c
    changes["reducing"] = each * block
    new_shard = 0 if x.adds else (x.g + x.cast) * block // x.shards
    return [changes, {"reducing": each * down, "new_shard": new_shard}]
