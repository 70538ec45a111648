"""Memory moments of a backward in the layers of a pipeline rank: block backwards and gradient reductions.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.moments import (
    MicroBatchBackward,
    Moment,
    Shared,
    Units,
    held_bytes,
    pending_reduce_buffer,
    reduces,
)
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment


def block_moments(
    e: Experiment, x: Shared, units: Units, turn: MicroBatchBackward, whole: int, saved: int, held: StageParams
) -> tuple[Moment, ...]:
    """Moments of the last block's backward: its gradients, recomputed tensors and the head's gradient exist.

    A second candidate is the backward of the last recomputed block if the blocks after it are not recomputed, otherwise
    that of the second-to-last block. The saved tensors of the blocks after it are free by then, their gradients exist,
    and the last of them is being reduced; a stage other than the last still holds the gradient that it received. With
    ZeRO 3 the next unit is gathered already: a block or the embedding.
    """
    zero3, is_reduced = e.zero_stage == 3, reduces(x, turn)
    resharded = units.head if turn.last and not turn.own_deferred and not turn.second_half else 0
    gathered = 2 * x.b * x.block + x.b_experts * units.experts + x.c * units.tied
    copies = min(whole, gathered) if zero3 else whole - x.c * resharded
    head = 0 if turn.prior else x.g * units.head // (x.shards if is_reduced else 1)
    head_reduced = units.head > 0 and is_reduced and not turn.second_half
    flat = x.g * units.head if head_reduced else pending_reduce_buffer(x, units, turn)
    gradients = turn.prior + head + x.c * units.tied
    if x.unsharded and turn.last and turn.prior and not turn.first_half and e.pp_schedule not in SPLIT_BACKWARD:
        gradients -= x.g * units.head - x.g * units.head // x.shards
    all_held = held_bytes(x, turn, saved, held.has_head)
    kept = held.kept_after
    last = (copies, gradients, all_held + (x.working_kept if kept else x.working) + flat)
    reduction = _reduction(e, x, units, turn, held, copies, gradients, all_held)
    done = kept if 0 < kept < held.num_layers else 1
    if done == held.num_layers:
        return (last, *reduction)
    layers = units.last_layers(done)
    freed = sum(count * (size.kept if kept else size.saved) for size, count in layers)
    between = kept == 0 and e.recompute_every > 1  # the last block is recomputed, the one before it is not
    working = x.working_kept if between or kept == held.num_layers else x.working
    rest, experts = (
        sum(count * size.block for size, count in layers),
        sum(count * size.experts for size, count in layers),
    )
    unsharded = x.g * layers[-1][0].block
    of_done, shard = x.g * (rest + experts), x.shard(rest, experts)
    if turn.first_half:
        unsharded = 0
    elif not turn.prior:
        gradients += shard if is_reduced else of_done
    elif x.unsharded and turn.last:
        gradients -= of_done - shard
    if zero3 and held.embedding and done == held.num_layers - 1:
        copies = x.b * x.block + x.c * units.first
    elif not zero3 and turn.last:
        copies -= x.b * rest + x.b_experts * experts
    received = 0 if held.has_head else x.stream
    left = sum(count * size.deferred for size, count in layers) if turn.first_half else 0
    activations = all_held - freed + left + working + received + (unsharded if is_reduced else flat)
    return last, *reduction, (copies, gradients, activations)


def _reduction(
    e: Experiment,
    x: Shared,
    units: Units,
    turn: MicroBatchBackward,
    held: StageParams,
    copies: int,
    gradients: int,
    all_held: int,
) -> tuple[Moment, ...]:
    """Moment of the reduction of the last block's gradient, after its backward. ``copies``, ``gradients``: bytes during
    its backward.

    The block's saved tensors are free. With several shards FSDP frees the block's gradients once the flat copy exists,
    except the last one, of the down weight, and only then creates the new shard. In a split backward the gradients have
    g bytes per element by then.
    """
    if not reduces(x, turn) or turn.first_half or units.experts:
        return ()
    size = units.classes[-1].size
    shard, flat = x.g * x.block // x.shards, x.g * x.block
    if x.shards == 1:
        gradients += 0 if turn.prior else shard
        buffers = 2 * flat
    elif x.unsharded:
        buffers = flat
    else:
        each = x.g if e.pp_schedule in SPLIT_BACKWARD else x.c
        buffers = flat + max(each * x.block, each * size.down + shard)
    if e.zero_stage == 3 or turn.last:
        copies -= x.b * x.block
    freed = size.kept if held.kept_after else size.saved
    received = 0 if held.has_head else x.stream
    return ((copies, gradients, all_held - freed + received + x.stream + buffers),)


def first_block_moments(
    e: Experiment,
    x: Shared,
    units: Units,
    turn: MicroBatchBackward,
    held: StageParams,
    params: int,
    whole: int,
    saved: int,
) -> tuple[Moment, ...]:
    """Moments of the first block's backward, the last of its stage: all other blocks and the head have their gradients.
    Also the moments of the first layer of each other class, unless it is the only layer of the last class, which is the
    last block of `block_moments`.

    They exceed the last block's moments if a block's gradient takes more than the block had saved.
    """
    last = len(units.classes) - 1
    return tuple(
        _first_block(e, x, units, turn, held, params, whole, saved, number)
        for number, one in enumerate(units.classes)
        if number == 0 or number < last or one.layers > 1
    )


def _first_block(
    e: Experiment,
    x: Shared,
    units: Units,
    turn: MicroBatchBackward,
    held: StageParams,
    params: int,
    whole: int,
    saved: int,
    number: int,
) -> Moment:
    """`first_block_moments` of the first block of class ``number``."""
    zero3, is_reduced = e.zero_stage == 3, reduces(x, turn)
    size, _, _, recomputed, before = units.classes[number]
    block = size.block + sum(one.layers * one.size.block for one in before)
    experts = size.experts + sum(one.layers * one.size.experts for one in before)
    of_others = units.all_experts - experts
    done = max(0, params - units.all_experts - block - (units.first if held.embedding else 0))
    shard = x.shard(done, of_others)
    if turn.first_half:
        done, of_others, shard = units.head, 0, x.shard(units.head, 0)
    gradients = turn.prior or (shard if is_reduced else x.g * (done + of_others))
    if x.unsharded and turn.last:
        gradients -= x.g * (done + of_others) - shard
    # With ZeRO 3 FSDP gathers the next unit while this one computes: a block, or the embedding if this stage has it.
    if zero3:
        following = x.b * x.block if before else x.c * units.tied or units.first_copy
        copies = x.b * size.block + x.b_experts * size.experts + following
    else:
        left = x.b * block + x.b_experts * experts + (units.first_copy if held.embedding else 0)
        left += x.c * units.head if turn.second_half else 0
        copies = min(whole, left) if turn.last else whole
    head = x.head.saved if held.has_head else 0
    others = int((turn.in_flight - 1) * (saved + head)) + turn.deferred + (size.saved if recomputed else size.kept)
    others += sum(one.saved for one in before)
    others += 0 if held.has_head else x.stream  # the gradient received by a stage other than the last
    if turn.first_half:  # what the other blocks hold for their weight-gradient passes
        others += turn.own_deferred - size.deferred - sum(one.layers * one.size.deferred for one in before)
        others += size.first_half
    flat = x.g * size.block if is_reduced and not turn.first_half else pending_reduce_buffer(x, units, turn)
    working = size.working if recomputed else size.working_kept
    return copies, gradients + x.c * units.tied, others + working + flat


def expert_moments(
    e: Experiment, x: Shared, units: Units, turn: MicroBatchBackward, held: StageParams, whole: int, saved: int
) -> tuple[Moment, ...]:
    """Moments of the reduction of expert gradients: in the last layer with experts (reduced first) and in the first.

    The saved tensors of the layer's experts are free; the rest of the layer is not. With ZeRO 3 the rest of this layer
    and of the previous one are gathered. Without a reduction the gradients are added to those of other micro-batches.
    """
    size, shards, zero3 = units.experts, x.expert_shards, e.zero_stage == 3
    if not size:
        return ()
    with_experts = [one for one in units.classes if one.size.experts]
    shard, buffers = x.g * size // shards, 0
    if reduces(x, turn):
        expert_gradients = 0 if turn.prior else shard
        new = shard if turn.prior and not x.unsharded else 0  # exists together with the shard that it is added to
        # FSDP holds a unit's last gradient, the down weight's: a third of the experts. All gradients exist while the
        # flat copy is created, before the new shard. In a split backward they have g bytes per element.
        each = x.g if turn.second_half or turn.own_deferred else x.c
        apart = x.g * size + max(each * size - expert_gradients, each * size // 3 + new)
        accumulated = x.unsharded and turn.prior > 0
        buffers = 2 * x.g * size + new if shards == 1 or accumulated else apart
        if accumulated and shards > 1:
            buffers -= x.g * size  # the accumulated gradients are in ``prior``, and freed before the new shard exists
    else:
        # The first gradients are cast weight by weight; one weight is two thirds. Those in the master dtype are
        # accumulated as is.
        expert_gradients = x.c * size + (0 if turn.prior or x.c == x.g else x.g * size * 2 // 3)
    reduced = reduces(x, turn)
    unreduced = x.unsharded and turn.second_half  # the head is reduced after all blocks
    of_head = 0 if turn.prior else x.g * units.head // (x.shards if reduced and not unreduced else 1)
    of_ends = 0 if turn.second_half else x.c * units.head
    tied, resharded = x.c * units.tied, (of_ends + x.b_experts * size) * turn.last
    copies = min(whole, 2 * x.b * x.block + tied) if zero3 else whole - resharded
    reducing = with_experts[-1].size.reducing_kept if held.kept_after else with_experts[-1].size.reducing
    held_then = held_bytes(x, turn, saved, held.has_head) + reducing
    last = [(copies, turn.prior + of_head + expert_gradients + tied, held_then + buffers)]
    if turn.second_half and reduced and shards > 1 and not (x.unsharded and turn.prior):
        # The moment before, while the gradients are cast, two thirds of which are one weight's. The flat copy of the
        # previously reduced unit, the head if there is one, still exists.
        flat = 0 if x.unsharded else x.g * units.head or pending_reduce_buffer(x, units, turn)
        casting = x.c * size + (0 if x.c == x.g else x.g * size * 2 // 3) + flat
        gathered = copies if zero3 else whole
        last.append((gathered, turn.prior + of_head + tied, held_then + casting))

    first, _, _, recomputed, before = with_experts[0]
    rest = units.head + sum(one.layers * one.size.block for one in units.classes) - first.block
    rest -= sum(one.layers * one.size.block for one in before)
    of_others = units.all_experts - size
    gradients = turn.prior or (x.shard(rest, of_others) if reduced else x.g * (rest + of_others))
    if x.unsharded and turn.last:
        gradients -= x.g * (rest + of_others) - x.shard(rest, of_others)
    if not zero3:
        left = x.b * (sum(one.layers * one.size.block for one in before) + first.block)
        left += units.first_copy if held.embedding else 0
        left += x.c * units.head if turn.second_half else 0
        copies = min(whole, left) if turn.last else whole
    elif held.embedding and not before:
        copies = x.b * x.block + (tied or units.first_copy)
    layer = first.saved + first.reducing if recomputed else first.kept + first.reducing_kept
    layer += sum(one.saved for one in before)
    layer += 0 if held.has_head else x.stream  # the gradient received by a stage other than the last
    in_flight = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + turn.deferred
    return *last, (copies, gradients + expert_gradients + tied, in_flight + layer + buffers)
