"""Steps of a pipeline rank at the ends of the model: the head, a tied weight, and the last unit of a backward.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.events import Live, Step
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn


def head_forward(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """The head's forward (under GPipe its backward), which holds one chunk of logits and both gradients.

    With S > 1 a unit is gathered into a flat buffer of c bytes per element that lives until the next unit is gathered.
    The head is the last unit of a forward; with a tied weight the last unit is a block. Under GPipe the head stays
    gathered from the first forward on; its backward begins when the last layer's offloaded tensors come back and, with
    ZeRO 3, the last block is gathered ahead.
    """
    gathering = 0
    if x.shards > 1 and (x.zero3 or not turn.prior):
        gathering = part.last_buffer if part.tied else x.c * part.head
    if x.head_in_backward and (x.zero3 or x.num_microbatches > 1):
        gathering = x.b * part.last_block if x.zero3 and x.shards > 1 and part.num_layers else 0
    forward: Live = {"loss": x.head.working, "gathering": gathering}
    if x.head_in_backward:
        forward["fetched"] = sum(part.offloaded[:1])
    if x.adds:
        forward["gradients"] = turn.prior + x.w * (part.head + part.tied)  # with the sum that the product makes
    if x.zero3:
        forward["weights"] = x.c * (part.head + part.tied)
    steps: list[Step] = []
    if gathering and part.head and part.num_layers and not (x.head_in_backward and x.num_microbatches > 1):
        # The buffer of the last unit is freed when the head's has been copied from; the layers' output exists.
        steps.insert(0, ("head, gathering", {"loss": x.stream, "gathering": gathering + part.last_buffer}))
        if x.zero3:
            steps[0][1]["weights"] = x.c * part.head
    if x.zero3 and x.shards > 1 and part.num_layers and not x.head_in_backward:
        steps = [*_last_gathering(x, part, turn), *steps]
    elif part.fetched(0):
        steps = [*_last_forward(part), *steps]
    steps.append(("head, forward", forward))
    if x.zero3 and x.shards > 1 and part.head and part.num_layers and not x.head_in_backward:
        # Its backward begins: the last block is gathered ahead, from a copy of this rank's part of it.
        of_block = x.b * part.last_block
        ahead: Live = {"loss": x.head.saved, "gathering": of_block + of_block // x.shards}
        steps.append(("head, backward", ahead))
    return steps


def _last_forward(part: Part) -> list[Step]:
    """The end of the last layer's forward, when what the layer before it offloads is still on its way to the host, and
    its own too if it offloads any."""
    forward: Live = {"working": part.last_forward, "leaving": part.fetched(0)}
    return [("last layer, forward", forward), ("last layer", dict.fromkeys(forward, 0))]


def _last_gathering(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """The beginning of the last layer's forward with ZeRO 3, and of its experts': the buffers of two units, and weights
    copied from the second. Experts that one rank has alone are cast weight by weight instead. The head may have been
    gathered ahead by the backward of an earlier micro-batch, after one before that (`last_ahead`)."""
    last = part.places[0]
    ahead = x.c * part.head if turn.prior and turn.in_flight == 1 and x.num_microbatches > 2 else 0
    leaving = part.fetched(0)  # what the layer before it offloads
    block, experts = x.b * part.last_block, x.b_experts * last.size.experts
    if experts and x.expert_shards == 1:  # the buffer of the block is free
        buffers = x.b_experts * max(last.size.experts_up - last.size.experts_down, last.size.experts_down)
    elif experts:
        buffers = block + experts
    elif last.earlier is None:
        buffers = block + (part.first_copy if part.has_embedding else 0)
    elif last.earlier.experts:
        buffers = block + (x.b_experts * last.earlier.experts if x.expert_shards > 1 else 0)
    else:
        buffers = block + x.b * last.earlier.block
    gathering: Live = {
        "saved": part.saved - last.own - part.last_stays + x.stream,  # with the layer's input
        "weights": block + experts + x.c * part.tied,
        "gathering": buffers + ahead,
        "leaving": leaving,
    }
    forward: Live = {"saved": part.saved, "working": part.last_forward, "gathering": part.last_buffer + ahead}
    after: Live = {"working": 0, "leaving": 0}
    return [("last layer, gathering", gathering), ("last layer, forward", forward), ("last layer", after)]


def head_reduction(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """The reduction of the head's gradient after its backward. With ZeRO 3 FSDP has gathered the last block ahead."""
    if not part.head or not turn.reduces:
        return []
    flat, shard = x.flat * part.head, x.g * part.head // x.shards
    resharded = x.zero3 or (turn.last and not turn.own_deferred)
    changes: Live = {
        "loss": 0,
        "gathering": 0,
        "weights": x.b * part.last_block if x.zero3 else part.whole - (x.c * part.head if resharded else 0),
        "gradients": turn.prior or shard,
        "stream": x.after_head,
        "flat": 0 if x.adds else flat,
    }
    if x.unsharded and turn.prior:  # the accumulated gradient is freed when the new shard exists
        beside = shard + x.cast * part.head // x.shards if x.shards > 1 else max(x.r, x.g) * part.head
        changes["new_shard"] = beside if x.flat else x.made_of_sums(part.head, x.shards)
    else:
        changes |= _sums_read(x, part.head) if x.only_sums else _reduced(x, turn, part.head, part.head)
    return [("head, reduction", changes)]


def _reduced(x: Shared, turn: Turn, unit: int, down: int) -> Live:
    """Buffers while FSDP reduces a unit, besides gradients that stay.

    These are a flat copy of r bytes per element and, with one shard, a scaled copy of it. With several shards a
    variable of FSDP keeps the gradient of the unit's last weight, of ``down`` elements, until the end, in c bytes per
    element: for the head or the embedding that is all of it. The new shard also exists if there is an earlier one to
    add to.
    """
    flat = x.flat * unit
    if x.shards == 1 or x.unsharded:
        cast = x.cast * unit // x.shards if x.flat and x.shards > 1 else 0
        return {"flat": flat, "reducing": x.scaled * unit, "end_gradient": 0, "new_shard": cast}
    new_shard = ((x.g if turn.prior else 0) + x.cast) * unit // x.shards if x.flat else 0
    return {"flat": flat, "reducing": 0, "end_gradient": x.c * down, "new_shard": new_shard}


def tied_step(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """The backward of a tied embedding: both of its gradients exist, and autograd adds one to the other in place (on
    FakeTensors it creates a third).

    The flat copy through which the first block was reduced exists too. The tied unit is reduced afterwards.
    """
    if not part.tied:
        return []
    unsharded, shard = x.r * part.tied, x.g * part.tied // x.shards
    rest = part.params - part.all_experts - part.tied
    gradients = turn.prior + turn.finished(x, rest, part.all_experts) or x.shard(rest, part.all_experts)
    if x.unsharded:
        made = x.r * part.params - (0 if x.adds else unsharded)  # the head's product adds to the sum in its forward
        gradients = unsharded + part.shard - shard if turn.last else turn.prior or made
    changes: Live = {
        **_NOTHING_OF_LAYERS,
        "weights": x.c * part.tied if x.zero3 or turn.last else part.whole,
        "gradients": gradients,
        "stream": x.stream,
        "end_gradient": (1 if x.adds else 2) * x.c * part.tied,
        "flat": x.after(part.first_block) if turn.reduces else 0,
    }
    return [("tied weight, backward", changes)]


_NOTHING_OF_LAYERS: Live = dict.fromkeys(
    (
        "saved",
        "fetched",
        "documents",
        "working",
        "left",
        "of_experts",
        "of_tied",
        "of_last",
        "reducing",
        "new_shard",
        "received",
        "stream",
    ),
    0,
)


def last_ahead(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes of the last unit of an earlier forward, which FSDP gathers ahead in the backward of the first unit: the
    head, with every ZeRO stage in a last backward that is not split, or with ZeRO 3 a block, which is gathered already
    if it is the only one. A tied weight stays gathered."""
    if not turn.earlier or x.shards == 1 or part.tied or not (x.zero3 or (turn.last and not x.splits)):
        return 0
    if part.head or not x.zero3 or (part.num_layers == 1 and not part.has_embedding):
        return x.c * part.head
    return x.b * part.last_block


def last_unit(x: Shared, part: Part, turn: Turn) -> list[Step]:
    """The end of a backward: the last unit's gradient exists or is reduced, and so are all others.

    A stage other than the last still holds the gradient that it received and its output, one other than the first the
    gradient of its input. With ZeRO 3 FSDP has gathered the last unit of the previous forward: the head, or else a
    block. Two more steps may be higher then: the embedding's backward before its gradient is reduced, and the beginning
    of the next forward, when the reduced flat copy still exists with two gathered copies of its first unit, or one of
    the first block.

    At the end of the input-gradient pass of a split backward, the tensors for the weight-gradient pass still exist. The
    only weight gradient is the embedding's, which FSDP reduces then (`GradientSync._tell_ends` in the engine).
    """
    ends_step = turn.last and not turn.own_deferred
    end: Live = {
        **_NOTHING_OF_LAYERS,
        "saved": part.output,
        "received": part.received(x, first_half=turn.first_half),
        "left": 0 if ends_step else turn.own_deferred,
        "stream": 0 if part.has_embedding else x.stream,
    }
    first = part.first if part.has_embedding else 0
    if not ends_step and x.unsharded:
        # A gradient in the dtype of sums is its own accumulation buffer at first.
        cast = 0 if x.c == x.r and not turn.prior else x.c
        if turn.first_half:
            end |= {"gradients": turn.prior or x.r * first, "end_gradient": cast * first, "stream": x.stream}
        else:
            whole, down = part.first, part.first_down
            if turn.second_half and part.classes:  # the embedding has its gradient
                whole, down = part.first_block, part.classes[0].size.down
            beside = cast if (part.has_embedding and not turn.second_half) or not x.adds else 0
            # Before sums exist, gradients are cast one by one.
            of_last = beside * (whole if turn.prior else down)
            end |= {"gradients": x.r * part.params, "of_last": of_last, "end_gradient": 0}
        end |= {"weights": part.whole, "flat": 0}
        return [("last unit, accumulation", end)]
    if not ends_step and turn.own_deferred:
        # FSDP has gathered the last block ahead, if it came before in the order of all forwards.
        end["weights"] = (x.b * part.last_block if turn.earlier else 0) if x.zero3 else part.whole
        end["gradients"] = turn.prior or x.g * first // x.shards
        end |= _reduced(x, turn, first, first) if first else {"flat": turn.pending(x, part), "end_gradient": 0}
        return [("last unit, reduction", end)]
    ahead = last_ahead(x, part, turn)
    weights = ahead if turn.last or x.zero3 else part.whole
    # The last unit's sum of gradients is there until it is reduced.
    gradients = part.shard if turn.last else part.accumulated
    gradients -= 0 if x.unsharded else turn.finished(x, part.first, 0)
    reduced = _sums_read(x, part.first) if x.only_sums else _reduced(x, turn, part.first, part.first_down)
    reduction = end | reduced | {"weights": weights, "gradients": gradients}
    if x.only_sums:
        return [*_cast_to_sum(x, part, turn, reduction), ("last unit, reduction", reduction)]
    if part.tied and not x.unsharded and x.shards > 1:
        # FSDP reduces a tied unit after the backward, when its gradient is referenced nowhere else.
        reduction["end_gradient"] = 0
    steps: list[Step] = []
    if x.zero3 and part.has_embedding and not part.tied:
        # The first block's flat copy still exists.
        backward: Live = {
            "weights": part.first_copy + ahead,
            "gradients": gradients - (0 if turn.prior else x.g * part.first // x.shards),
            "stream": x.stream,
            "end_gradient": x.c * part.first,
            "flat": x.after(part.first_block),
        }
        # What is gathered ahead is cast first.
        gathering: Live = {"weights": part.first_copy + ahead + ahead // x.shards, "end_gradient": 0}
        steps += [("embedding, gathering", end | backward | gathering), ("embedding, backward", end | backward)]
    steps.append(("last unit, reduction", reduction))
    if x.zero3 and not turn.last and turn.forward_follows:
        start: Live = {"end_gradient": 0, "new_shard": 0, "reducing": 0}
        steps.append(("next micro-batch, first unit", start | next_forward(x, part, ahead)))
    return steps


def _sums_read(x: Shared, unit: int) -> Live:
    """Tensors of a unit's reduction that reads its sums, besides gradients that stay."""
    beside = x.stays * unit // x.shards if x.shards > 1 else 0
    return {"flat": x.r * unit if x.flat or x.cast else 0, "reducing": 0, "end_gradient": 0, "new_shard": beside}


def _cast_to_sum(x: Shared, part: Part, turn: Turn, reduction: Live) -> list[Step]:
    """The cast of the embedding's gradient, which no product makes, to its sum, before the ``reduction`` of the sum and
    beside what that of the first block has left."""
    if not part.has_embedding or part.tied:
        return []
    cast: Live = {
        "gradients": reduction["gradients"] - (0 if turn.prior else x.g * part.first // x.shards),
        "end_gradient": x.c * part.first,
        "reducing": 0 if x.c == x.r else x.r * part.first,
        "weights": reduction["weights"] + part.first_copy,
        "flat": x.after(part.first_block),
        "new_shard": 0,
    }
    return [("last unit, cast", reduction | cast)]


def next_forward(x: Shared, part: Part, ahead: int) -> Live:
    """The beginning of the next forward with ZeRO 3: two gathered copies of its first unit, or one of the first block.
    ``ahead``: bytes that are gathered already."""
    following = max(part.first_copy, 2 * x.b * part.first_block) + ahead
    return {"saved": 0, "received": 0, "stream": x.stream, "weights": part.first_copy, "gathering": following}
