"""Memory moments at the ends of the model: the head, a tied weight, and the last unit of a backward.

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
    reduce_bytes,
    reduces,
)
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import INTERLEAVED
from workloads.spec.experiment import Experiment


def head_moments(
    e: Experiment, x: Shared, units: Units, turn: MicroBatchBackward, whole: int, saved: int
) -> tuple[Moment, ...]:
    """Moments of the head: its forward (under GPipe its backward), and the reduction of its gradient afterwards.

    The forward holds one chunk of logits and both gradients. With S > 1 a unit is gathered into a flat buffer of c
    bytes per element that lives until the next unit is gathered. The head is the last unit of a forward; with a tied
    weight the last unit is a block.
    """
    c, g = x.c, x.g
    zero3 = e.zero_stage == 3
    held = held_bytes(x, turn, saved, has_head=True)
    copies = c * (units.head + units.tied) if zero3 else whole
    gathers = x.shards > 1 and (zero3 or not turn.prior)
    gathering = (max(x.b * x.block, x.b_experts * units.experts) if units.tied else c * units.head) if gathers else 0
    forward = (copies, turn.prior, held + x.head.working + pending_reduce_buffer(x, units, turn) + gathering)
    if not units.head or not reduces(x, turn):
        return (forward,)
    if turn.own_deferred and turn.prior and not x.unsharded and e.pp_schedule in INTERLEAVED:
        # The previous micro-batch has had its input-gradient pass, in which the head was reduced last. With one chunk
        # no weight-gradient pass has run yet.
        gradients = turn.prior if e.virtual_stages > 1 else g * units.head // x.shards
        early = (copies, gradients, held + x.head.working + g * units.head + gathering)
        forward = max(forward, early, key=sum)
    resharded = c * units.head if zero3 or (turn.last and not turn.own_deferred) else 0
    copies += -resharded + (x.b * x.block if zero3 else 0)  # FSDP has gathered the last block ahead
    shard = g * units.head // x.shards
    if x.unsharded and turn.prior:
        # The accumulated gradient is in ``prior`` until the new shard exists.
        reducing = reduce_bytes(x, units.head, turn) - (g * units.head - shard if x.shards > 1 else 0)
        return forward, (copies, turn.prior, held + x.stream + reducing)
    gradients = turn.prior + (0 if turn.prior else shard)
    return forward, (copies, gradients, held + x.stream + reduce_bytes(x, units.head, turn))


def tied_moment(
    x: Shared, units: Units, turn: MicroBatchBackward, params: int, whole: int, shard: int, *, zero3: bool
) -> Moment:
    """Moment of the backward of a tied embedding: both of its gradients exist, and autograd adds one to the other in
    place (on FakeTensors it creates a third).

    The flat copy through which the first block was reduced exists too. The tied unit is reduced afterwards.
    """
    tied_bytes, gradients = x.g * units.tied, turn.prior or shard - x.g * units.tied // x.shards
    if x.unsharded:
        gradients = (
            tied_bytes + shard - tied_bytes // x.shards if turn.last else turn.prior or x.g * params - tied_bytes
        )
    copies = x.c * units.tied if zero3 or turn.last else whole
    return copies, gradients, x.stream + 2 * x.c * units.tied + (x.g * x.block if reduces(x, turn) else 0)


def end_moment(
    e: Experiment,
    x: Shared,
    units: Units,
    turn: MicroBatchBackward,
    held: StageParams,
    params: int,
    whole: int,
    shard: int,
    saved: int,
) -> Moment:
    """Moment at the end of a backward: the last unit's gradient exists or is reduced, and so are all others.

    A stage other than the last still holds the gradient that it received. With ZeRO 3 FSDP has gathered the last unit
    of the previous forward: the head, or else a block. Two more moments may be higher then: the embedding's backward
    before its gradient is reduced, and the beginning of the next forward, when the reduced flat copy still exists with
    two gathered copies of its first unit, or one of the first block.

    At the end of the input-gradient pass of a split backward, the tensors for the weight-gradient pass still exist. The
    only weight gradient is the embedding's, which FSDP reduces then (`GradientSync._tell_ends` in the engine).
    """
    c, zero3 = x.c, e.zero_stage == 3
    received = 0 if held.has_head else x.stream
    # FSDP reduces a tied unit after the backward, when its gradient is referenced nowhere else.
    reducing = reduce_bytes(x, units.first, turn) - (0 if x.unsharded or x.shards == 1 else c * units.tied)
    if turn.last and not turn.own_deferred:
        ahead = c * units.head if zero3 and x.num_microbatches > 1 else 0
        candidates = [(ahead, shard, turn.deferred + received + reducing)]
        candidates += _embedding(x, units, turn, held, ahead, shard, turn.deferred + received) if zero3 else ()
        return max(candidates, key=sum)
    others = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + received + x.stream
    others += turn.deferred
    if x.unsharded and turn.first_half:
        end = units.first if held.embedding else 0
        return (
            whole,
            turn.prior or x.g * end,
            others + turn.own_deferred + (0 if c == x.g and not turn.prior else c * end),
        )
    if x.unsharded:
        # A gradient in the master dtype is its own accumulation buffer at first.
        last_gradient = 0 if c == x.g and not turn.prior else c * units.first
        return whole, x.g * params + last_gradient, others + turn.own_deferred
    if turn.own_deferred:
        end = units.first if held.embedding else 0
        buffers = reduce_bytes(x, end, turn) if end else pending_reduce_buffer(x, units, turn)
        # FSDP has gathered the last block ahead, because it came before in the order of all forwards.
        copies = x.b * x.block * bool(turn.prior) if zero3 else whole
        return copies, turn.prior or x.g * end // x.shards, others + turn.own_deferred + buffers
    if not zero3:
        return whole, shard, others + reducing
    ahead = c * units.head or x.b * x.block
    candidates = [(ahead, shard, others + reducing), *_embedding(x, units, turn, held, ahead, shard, others)]
    if turn.forward_follows:
        next_forward = max(units.first_copy, 2 * x.b * x.block) + ahead + x.g * units.first
        candidates.append((units.first_copy, shard, others + next_forward))
    return max(candidates, key=sum)


def _embedding(
    x: Shared, units: Units, turn: MicroBatchBackward, held: StageParams, ahead: int, shard: int, others: int
) -> tuple[Moment, ...]:
    """Moment of the backward of an untied embedding with ZeRO 3, while the first block's flat reduce-scatter buffer
    exists. ``ahead``: bytes that FSDP has gathered ahead."""
    if not held.embedding or units.tied:
        return ()
    gradients = turn.prior or shard - x.g * units.first // x.shards
    return ((units.first_copy + ahead, gradients, others + x.c * units.first + x.g * x.block),)
