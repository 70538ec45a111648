"""The moments of a backward in the layers of a pipeline rank: their own backwards, and reductions of gradients.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.moments import Moment, Round, Shared, Units, held_bytes, reduces, waiting
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment


def block_moments(
    e: Experiment, x: Shared, units: Units, turn: Round, whole: int, saved: int, held: StageParams
) -> tuple[Moment, ...]:
    """The last block's backward: its gradients and what it computes again; the head's gradient is there.

    Also a later one's: that of the last block that is recomputed where those after it are not, else of the last but
    one. What the blocks after it saved is free by then, their gradients are there, and the last of them is being
    reduced; a stage that is not the last still holds the gradient that it received. With ZeRO 3 the unit that comes
    next is gathered already: a block or the embedding.
    """
    zero3, is_reduced = e.zero_stage == 3, reduces(x, turn)
    resharded = units.head if turn.last and not turn.own and not turn.second_half else 0
    gathered = 2 * x.b * x.block + x.b_experts * units.experts + x.c * units.tied
    copies = min(whole, gathered) if zero3 else whole - x.c * resharded
    head = 0 if turn.prior else x.g * units.head // (x.shards if is_reduced else 1)
    head_reduced = units.head > 0 and is_reduced and not turn.second_half
    flat = x.g * units.head if head_reduced else waiting(x, units, turn)
    gradients = turn.prior + head + x.c * units.tied
    if x.whole and turn.last and turn.prior and not turn.first_half and e.pp_schedule not in SPLIT_BACKWARD:
        gradients -= x.g * units.head - x.g * units.head // x.shards
    all_held = held_bytes(x, turn, saved, held.has_head)
    kept = held.kept_after
    last = (copies, gradients, all_held + (x.working_kept if kept else x.working) + flat)
    reduction = _reduction(e, x, turn, held, copies, gradients, all_held)
    done = kept if 0 < kept < held.num_layers else 1
    if done == held.num_layers:
        return (last, *reduction)
    moe = min(done, held.moe_layers)
    of_moe, of_dense = (x.moe_kept, x.dense_kept) if kept else (x.moe_saved, x.dense_saved)
    freed = moe * of_moe + (done - moe) * of_dense
    between = kept == 0 and e.recompute_every > 1  # the last block is recomputed, the one before it is not
    working = x.working_kept if between or kept == held.num_layers else x.working
    rest = moe * x.moe_block + (done - moe) * x.block
    unsharded = x.g * (x.block if done > moe else x.moe_block)
    of_done, shard = x.g * (rest + moe * units.experts), x.shard(rest, moe * units.experts)
    if turn.first_half:
        unsharded = 0
    elif not turn.prior:
        gradients += shard if is_reduced else of_done
    elif x.whole and turn.last:
        gradients -= of_done - shard
    if zero3 and held.embedding and done == held.num_layers - 1:
        copies = x.b * x.block + x.c * units.first
    elif not zero3 and turn.last:
        copies -= x.b * rest + x.b_experts * moe * units.experts
    received = 0 if held.has_head else x.stream
    left = moe * x.moe_deferred + (done - moe) * x.dense_deferred if turn.first_half else 0
    activations = all_held - freed + left + working + received + (unsharded if is_reduced else flat)
    return last, *reduction, (copies, gradients, activations)


def _reduction(
    e: Experiment, x: Shared, turn: Round, held: StageParams, copies: int, gradients: int, all_held: int
) -> tuple[Moment, ...]:
    """The reduction of the last block's gradient, after its backward. ``copies``, ``gradients``: at its backward.

    What the block had saved is free. With several shards FSDP frees the block's own gradients when its flat copy is
    there, but for the last one, of the weight of the way down, and only then makes the new shard. Of a split backward
    they have g bytes an element by then.
    """
    if not reduces(x, turn) or turn.first_half or held.moe_layers:
        return ()
    shard, flat = x.g * x.block // x.shards, x.g * x.block
    if x.shards == 1:
        gradients += 0 if turn.prior else shard
        buffers = 2 * flat
    elif x.whole:
        buffers = flat
    else:
        own = x.g if e.pp_schedule in SPLIT_BACKWARD else x.c
        buffers = flat + max(own * x.block, own * x.down + shard)
    if e.zero_stage == 3 or turn.last:
        copies -= x.b * x.block
    freed = x.dense_kept if held.kept_after else x.dense_saved
    received = 0 if held.has_head else x.stream
    return ((copies, gradients, all_held - freed + received + x.stream + buffers),)


def first_block_moments(
    e: Experiment, x: Shared, units: Units, turn: Round, held: StageParams, params: int, whole: int, saved: int
) -> tuple[Moment, ...]:
    """The first block's backward, the last of its stage: the gradients of all other blocks and of the head are there.
    Where dense layers come before those with experts, also that of the first one with experts; a single one is the last
    block of `block_moments`.

    They are higher than the last block's where a block's gradient takes more than the block had saved.
    """
    kinds = (False, True) if held.dense_layers and held.moe_layers > 1 else (not held.dense_layers,)
    return tuple(_first_block(e, x, units, turn, held, params, whole, saved, routed=routed) for routed in kinds)


def _first_block(
    e: Experiment,
    x: Shared,
    units: Units,
    turn: Round,
    held: StageParams,
    params: int,
    whole: int,
    saved: int,
    *,
    routed: bool,
) -> Moment:
    """`first_block_moments` of the first block with experts, or of the first dense one."""
    zero3, is_reduced = e.zero_stage == 3, reduces(x, turn)
    experts, before = (units.experts, held.dense_layers) if routed else (0, 0)
    own, recomputed_before = x.moe_block if routed else x.block, held.dense_recomputed if before else 0
    of_others = units.all_experts - experts
    done = max(0, params - units.all_experts - own - before * x.block - (units.first if held.embedding else 0))
    shard = x.shard(done, of_others)
    if turn.first_half:
        done, of_others, shard = units.head, 0, x.shard(units.head, 0)
    gradients = turn.prior or (shard if is_reduced else x.g * (done + of_others))
    if x.whole and turn.last:
        gradients -= x.g * (done + of_others) - shard
    # With ZeRO 3 FSDP gathers the next unit while this one computes: a block, or the embedding if there is one.
    if zero3:
        following = x.b * x.block if before else x.c * units.tied or units.first_copy
        copies = x.b * own + x.b_experts * experts + following
    else:
        left = x.b * (own + before * x.block) + x.b_experts * experts + (units.first_copy if held.embedding else 0)
        left += x.c * units.head if turn.second_half else 0
        copies = min(whole, left) if turn.last else whole
    head = x.head.saved if held.has_head else 0
    recomputed = held.first_moe_recomputed if routed else held.first_recomputed
    dense, moe = (x.dense_saved, x.moe_saved) if recomputed else (x.dense_kept, x.moe_kept)
    others = int((turn.in_flight - 1) * (saved + head)) + turn.deferred + (moe if routed else dense)
    others += recomputed_before * x.dense_saved + (before - recomputed_before) * x.dense_kept
    others += 0 if held.has_head else x.stream  # the gradient that a stage before the last received
    if turn.first_half:  # what the others keep for their second halves
        others += turn.own - (x.moe_deferred if routed else x.dense_deferred) - before * x.dense_deferred
        others += 0 if routed else x.dense_first_half
    flat = x.g * own if is_reduced and not turn.first_half else waiting(x, units, turn)
    if routed:
        working = x.working if recomputed else x.working_kept
    else:
        working = x.dense_working if recomputed else x.dense_working_kept
    return copies, gradients + x.c * units.tied, others + working + flat


def expert_moments(
    e: Experiment, x: Shared, units: Units, turn: Round, held: StageParams, whole: int, saved: int
) -> tuple[Moment, ...]:
    """The reduction of experts' gradients, in the last layer that has some, which comes first, and in the first one.

    What the layer's experts had saved is free, the rest of the layer is not. Of ZeRO 3 the rest of the layer and of the
    one before are gathered. Without a reduction the gradients are added to those of other micro-batches.
    """
    size, shards, zero3 = units.experts, x.expert_shards, e.zero_stage == 3
    if not size:
        return ()
    shard, buffers = x.g * size // shards, 0
    if reduces(x, turn):
        own = 0 if turn.prior else shard
        new = shard if turn.prior and not x.whole else 0  # beside the one that it is added to
        # FSDP holds on to a unit's last gradient, the weight of the way down: a third of the experts. All of them are
        # there while the flat copy is made, and the new shard is not. Of a split backward they have g bytes an element.
        each = x.g if turn.second_half or turn.own else x.c
        apart = x.g * size + max(each * size - own, each * size // 3 + new)
        accumulated = x.whole and turn.prior > 0
        buffers = 2 * x.g * size + new if shards == 1 or accumulated else apart
        if accumulated and shards > 1:
            buffers -= x.g * size  # what was accumulated is in ``prior``, and free before the new shard is there
    else:
        # The first ones are cast weight by weight: two thirds are one weight's. Unmixed ones are what is accumulated.
        own = x.c * size + (0 if turn.prior or x.c == x.g else x.g * size * 2 // 3)
    reduced = reduces(x, turn)
    unreduced = x.whole and turn.second_half  # the head, until after all blocks
    of_head = 0 if turn.prior else x.g * units.head // (x.shards if reduced and not unreduced else 1)
    of_ends = 0 if turn.second_half else x.c * units.head
    tied, resharded = x.c * units.tied, (of_ends + x.b_experts * size) * turn.last
    copies = min(whole, 2 * x.b * x.block + tied) if zero3 else whole - resharded
    beside = x.beside_experts_kept if held.kept_after else x.beside_experts
    held_then = held_bytes(x, turn, saved, held.has_head) + beside
    last = [(copies, turn.prior + of_head + own + tied, held_then + buffers)]
    if turn.second_half and reduced and shards > 1 and not (x.whole and turn.prior):
        # Before it, while the gradients are cast, two thirds of which are one weight's: what was reduced last, the head
        # if there is one, has its flat copy still.
        flat = 0 if x.whole else x.g * units.head or waiting(x, units, turn)
        casting = x.c * size + (0 if x.c == x.g else x.g * size * 2 // 3) + flat
        gathered = copies if zero3 else whole
        last.append((gathered, turn.prior + of_head + tied, held_then + casting))

    others = held.moe_layers - 1
    rest = units.head + others * x.moe_block
    gradients = turn.prior or (x.shard(rest, others * size) if reduced else x.g * (rest + others * size))
    if x.whole and turn.last:
        gradients -= x.g * (rest + others * size) - x.shard(rest, others * size)
    if not zero3:
        left = x.b * (held.dense_layers * x.block + x.moe_block) + (units.first_copy if held.embedding else 0)
        left += x.c * units.head if turn.second_half else 0
        copies = min(whole, left) if turn.last else whole
    elif held.embedding and not held.dense_layers:
        copies = x.b * x.block + (tied or units.first_copy)
    layer = x.moe_saved + x.beside_experts if held.first_moe_recomputed else x.moe_kept + x.beside_experts_kept
    layer += held.dense_recomputed * x.dense_saved + (held.dense_layers - held.dense_recomputed) * x.dense_kept
    layer += 0 if held.has_head else x.stream  # the gradient that a stage before the last received
    in_flight = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + turn.deferred
    return *last, (copies, gradients + own + tied, in_flight + layer + buffers)
