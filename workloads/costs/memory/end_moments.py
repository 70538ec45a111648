"""The moments of a step at the ends of the model: the head, a tied weight, and the last unit of a backward.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.moments import Moment, Round, Shared, Units, held_bytes, reduce_bytes, reduces, waiting
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import INTERLEAVED
from workloads.spec.experiment import Experiment


def head_moments(e: Experiment, x: Shared, units: Units, turn: Round, whole: int, saved: int) -> tuple[Moment, ...]:
    """The head's forward (under GPipe its backward), and the reduction of its gradient right after its backward.

    Forward: one chunk of logits and both gradients. With S > 1 a unit is gathered into a flat buffer in c bytes that
    lives until the next unit is gathered. The head is the last unit of a forward; with a tied weight a block is.
    """
    c, g = x.c, x.g
    zero3 = e.zero_stage == 3
    held = held_bytes(x, turn, saved, has_head=True)
    copies = c * (units.head + units.tied) if zero3 else whole
    gathers = x.shards > 1 and (zero3 or not turn.prior)
    gathering = (max(x.b * x.block, x.b_experts * units.experts) if units.tied else c * units.head) if gathers else 0
    forward = (copies, turn.prior, held + x.head.working + waiting(x, units, turn) + gathering)
    if not units.head or not reduces(x, turn):
        return (forward,)
    if turn.own and turn.prior and not x.whole and e.pp_schedule in INTERLEAVED:
        # The one before has had its first half, in which the head was reduced last. With one chunk no second half has
        # run yet.
        gradients = turn.prior if e.virtual_stages > 1 else g * units.head // x.shards
        early = (copies, gradients, held + x.head.working + g * units.head + gathering)
        forward = max(forward, early, key=sum)
    resharded = c * units.head if zero3 or (turn.last and not turn.own) else 0
    copies += -resharded + (x.b * x.block if zero3 else 0)  # the last block is gathered ahead
    shard = g * units.head // x.shards
    if x.whole and turn.prior:
        # What was accumulated is in ``prior`` until the new shard is there.
        reducing = reduce_bytes(x, units.head, turn) - (g * units.head - shard if x.shards > 1 else 0)
        return forward, (copies, turn.prior, held + x.stream + reducing)
    gradients = turn.prior + (0 if turn.prior else shard)
    return forward, (copies, gradients, held + x.stream + reduce_bytes(x, units.head, turn))


def tied_moment(x: Shared, units: Units, turn: Round, params: int, whole: int, shard: int, *, zero3: bool) -> Moment:
    """The backward of an embedding that is also the output projection: both of its gradients are there, of which
    autograd adds one to the other in place (on FakeTensors it makes a third).

    Beside them is the flat copy through which the first block was reduced. Their own unit is reduced after them.
    """
    own, gradients = x.g * units.tied, turn.prior or shard - x.g * units.tied // x.shards
    if x.whole:
        gradients = own + shard - own // x.shards if turn.last else turn.prior or x.g * params - own
    copies = x.c * units.tied if zero3 or turn.last else whole
    return copies, gradients, x.stream + 2 * x.c * units.tied + (x.g * x.block if reduces(x, turn) else 0)


def end_moment(
    e: Experiment,
    x: Shared,
    units: Units,
    turn: Round,
    held: StageParams,
    params: int,
    whole: int,
    shard: int,
    saved: int,
) -> Moment:
    """The end of the backward: the last unit's gradient is there, or reduced; all others are.

    A stage that is not the last still holds the gradient that it received. With ZeRO 3 FSDP has gathered the last unit
    of the forward before: the head, else a block. Two more moments may be higher then: the embedding's own backward,
    before its gradient is reduced, and the beginning of the next forward, when the flat copy that was reduced is still
    there, and two gathered ones beside its first unit, or one beside the first block.
    At the end of the first half of a split backward what its products need for the second one is still there, and of
    its own gradients only the embedding's is, which FSDP reduces then (`GradientSync._tell_ends` in the engine).
    """
    c, zero3 = x.c, e.zero_stage == 3
    received = 0 if held.has_head else x.stream
    # FSDP reduces the unit of a tied weight after the backward, when no other place holds its gradient any more.
    reducing = reduce_bytes(x, units.first, turn) - (0 if x.whole or x.shards == 1 else c * units.tied)
    if turn.last and not turn.own:
        ahead = c * units.head if zero3 and x.rounds > 1 else 0
        found = [(ahead, shard, turn.deferred + received + reducing)]
        found += _embedding(x, units, turn, held, ahead, shard, turn.deferred + received) if zero3 else ()
        return max(found, key=sum)
    others = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + received + x.stream
    others += turn.deferred
    if x.whole and turn.first_half:
        end = units.first if held.embedding else 0
        return whole, turn.prior or x.g * end, others + turn.own + (0 if c == x.g and not turn.prior else c * end)
    if x.whole:
        # An unmixed gradient is its own accumulation buffer at first.
        own = 0 if c == x.g and not turn.prior else c * units.first
        return whole, x.g * params + own, others + turn.own
    if turn.own:
        end = units.first if held.embedding else 0
        buffers = reduce_bytes(x, end, turn) if end else waiting(x, units, turn)
        # FSDP has gathered the last block ahead, which ran before in the order of all forwards.
        copies = x.b * x.block * bool(turn.prior) if zero3 else whole
        return copies, turn.prior or x.g * end // x.shards, others + turn.own + buffers
    if not zero3:
        return whole, shard, others + reducing
    ahead = c * units.head or x.b * x.block
    found = [(ahead, shard, others + reducing), *_embedding(x, units, turn, held, ahead, shard, others)]
    if turn.forward_follows:
        beside = max(units.first_copy, 2 * x.b * x.block) + ahead + x.g * units.first
        found.append((units.first_copy, shard, others + beside))
    return max(found, key=sum)


def _embedding(
    x: Shared, units: Units, turn: Round, held: StageParams, ahead: int, shard: int, others: int
) -> tuple[Moment, ...]:
    """The backward of an embedding of its own with ZeRO 3, beside the flat copy through which the first block was
    reduced. ``ahead``: bytes of what FSDP has gathered ahead."""
    if not held.embedding or units.tied:
        return ()
    gradients = turn.prior or shard - x.g * units.first // x.shards
    return ((units.first_copy + ahead, gradients, others + x.c * units.first + x.g * x.block),)
