"""The moments of a backward at which a pipeline rank may hold most; `workloads.costs.memory` takes the highest.

Symbols are those of `workloads.costs.memory`.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.activations import (
    HeadBytes,
    LayerBytes,
    deferred_bytes,
    first_half_bytes,
    head_bytes,
    layer_bytes,
    rank_tokens,
)
from workloads.costs.fp8 import gathered_bytes
from workloads.costs.params import COMPUTE_BYTES, MASTER_BYTES, dense_layer, local_params, moe_layer, num_dense_layers
from workloads.costs.partition import StageParams
from workloads.costs.schedule import INTERLEAVED, SPLIT_BACKWARD
from workloads.experiment import Experiment
from workloads.mesh import data_degrees, expert_degrees


def accumulates_unsharded(experiment: Experiment) -> bool:
    """ZeRO 0 and 1 reduce gradients with the last micro-batch only, of a split backward in its second half; until then
    they are whole on every rank."""
    later = experiment.num_microbatches > 1 or experiment.pp_schedule in SPLIT_BACKWARD
    return experiment.zero_stage <= 1 and later


class Shared(NamedTuple):
    """What is the same on every stage. Bytes unless said otherwise; c, g and m as above."""

    c: int
    g: int
    dense_saved: int
    """Of one dense layer and one micro-batch."""
    moe_saved: int
    """Of one layer with experts; 0 where the model has none."""
    dense_deferred: int
    """Of one dense layer between the halves of a split backward."""
    moe_deferred: int
    dense_first_half: int
    """More than ``dense_working`` in the first half of a split backward."""
    working: int
    """Of the kind of layer that needs most."""
    dense_working: int
    """Of a dense layer; 0 where the model has none. The same of one that is not recomputed."""
    dense_working_kept: int
    dense_kept: int
    """As ``dense_saved``, of a layer that is not recomputed (``recompute_every``)."""
    moe_kept: int
    working_kept: int
    b: int
    """Bytes of an element of a block as it is gathered: c, or 1 for fp8 weights with one scale."""
    b_experts: int
    """The same of routed experts."""
    block: int
    """Elements of the largest block on one rank, without routed experts, which are a unit of their own."""
    moe_block: int
    """The same of a layer with routed experts; 0 where the model has none."""
    experts: int
    """Elements of one layer's routed experts on one rank."""
    expert_shards: int
    """Ranks that share an expert's master weights."""
    beside_experts: int
    """Of a layer with experts, beside what it saved, when its experts' gradients are reduced."""
    beside_experts_kept: int
    vocabulary: int
    """Elements of the embedding (or head) on one rank."""
    head: HeadBytes
    stream: int
    """Residual stream of one micro-batch, also a stage's output: ``c T_s h``."""
    inputs: int
    """Token ids and targets of every micro-batch (int64), and the RoPE tables (fp32 sine and cosine)."""
    whole: bool
    """Gradients accumulate unsharded."""
    rounds: int
    """m, the micro-batches of a step."""
    shards: int
    """S, the ranks that share master weights and optimizer state."""

    @classmethod
    def of(cls, e: Experiment) -> Shared:
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens, stream_tokens = rank_tokens(e)
        has_dense, has_routed = num_dense_layers(model) > 0, model.moe is not None
        kinds = [routed for routed, there in ((False, has_dense), (True, has_routed)) if there]
        again = {routed: layer_bytes(e, routed=routed, c=c) for routed in kinds}
        kept = {routed: layer_bytes(e, routed=routed, c=c, recomputed=False) for routed in kinds}
        none = LayerBytes(0, 0)
        dense, moe = again.get(False, none), again.get(True, none)
        elements = [local_params(e, moe_layer(model) if routed else dense_layer(model)) for routed in kinds]
        return cls(
            c=c,
            g=MASTER_BYTES[e.precision],
            dense_saved=dense.saved,
            moe_saved=moe.saved,
            dense_deferred=deferred_bytes(e, routed=False, c=c) if has_dense else 0,
            moe_deferred=deferred_bytes(e, routed=True, c=c) if has_routed else 0,
            dense_first_half=first_half_bytes(e, c) if has_dense else 0,
            working=max(one.working for one in again.values()),
            dense_working=dense.working,
            dense_working_kept=kept.get(False, none).working,
            dense_kept=kept.get(False, none).saved,
            moe_kept=kept.get(True, none).saved,
            working_kept=max(one.working for one in kept.values()),
            b=gathered_bytes(e, c),
            b_experts=gathered_bytes(e, c, of_experts=True),
            block=max(rest for rest, _ in elements),
            moe_block=elements[-1][0] if has_routed else 0,
            experts=max(experts for _, experts in elements),
            expert_shards=expert_degrees(e)[1] if has_routed else 1,
            beside_experts=moe.beside_experts,
            beside_experts_kept=kept.get(True, none).beside_experts,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=c * stream_tokens * model.hidden_size,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * model.rope_dim,
            whole=accumulates_unsharded(e),
            rounds=e.num_microbatches,
            shards=data_degrees(e)[1],
        )

    def shard(self, rest: int, experts: int) -> int:
        """Bytes of reduced gradients: ``rest`` elements, and ``experts`` of routed experts."""
        return self.g * rest // self.shards + self.g * experts // self.expert_shards

    def saved(self, held: StageParams) -> int:
        """Of the layers of a stage and one micro-batch."""
        dense, moe = held.dense_recomputed, held.moe_recomputed
        recomputed = dense * self.dense_saved + moe * self.moe_saved
        return recomputed + (held.dense_layers - dense) * self.dense_kept + (held.moe_layers - moe) * self.moe_kept


class Units(NamedTuple):
    """One stage's FSDP units, in elements."""

    head: int
    """The output projection; 0 where the stage has none of its own."""
    first: int
    """The unit whose gradient comes last: the embedding, the tied weight or a block."""
    first_copy: int
    """Bytes of that unit as it is gathered."""
    tied: int
    """The embedding that is also the output projection; 0 where the stage has no such weight."""
    experts: int
    """The routed experts of one layer; 0 where the stage has none."""
    all_experts: int
    """Those of all its layers."""


class Round(NamedTuple):
    """The backward of one micro-batch."""

    in_flight: float
    """Micro-batches held when it starts."""
    deferred: int
    """Bytes of what other micro-batches hold for their weights' gradients."""
    prior: int
    """Bytes of gradients that earlier micro-batches left."""
    last: bool
    """Of the step: gradients are reduced here at the latest."""
    forward_follows: bool
    """Another micro-batch's forward comes after it."""
    own: int = 0
    """Bytes of what its own products keep for the second half; 0 for a whole backward."""
    first_half: bool = False
    """The second half is a round by itself: blocks have no gradients in this one."""


Moment = tuple[int, int, int]
"""Bytes of (gathered parameters, gradients, activations)."""


def _reduces(x: Shared, turn: Round) -> bool:
    return turn.last or not x.whole


def _reduce_bytes(x: Shared, unit: int, turn: Round) -> int:
    """Buffers while FSDP reduces a unit, besides gradients that stay.

    A flat copy in g bytes an element, and with one shard a scaled copy of it. With several shards the unit's own
    gradient of c bytes an element lives until the end, as does the new shard where there is an earlier one to add to.
    """
    if x.shards == 1 or x.whole:
        return 2 * x.g * unit
    return (x.g + x.c) * unit + (x.g * unit // x.shards if turn.prior else 0)


def _waiting(x: Shared, units: Units, turn: Round) -> int:
    """The flat copy through which the previous micro-batch's last unit was reduced: it lives until the next is."""
    return x.g * units.first if turn.prior and not x.whole else 0


def _held(x: Shared, turn: Round, saved: int, has_head: bool) -> int:
    """Saved activations at the start of a backward, without what the head keeps for this micro-batch."""
    return turn.deferred + int(turn.in_flight * saved + (turn.in_flight - 1) * (x.head.saved if has_head else 0))


def head_moments(e: Experiment, x: Shared, units: Units, turn: Round, whole: int, saved: int) -> tuple[Moment, ...]:
    """The head's forward (under GPipe its backward), and the reduction of its gradient right after its backward.

    Forward: one chunk of logits and both gradients. With S > 1 a unit is gathered into a flat buffer in c bytes that
    lives until the next unit is gathered. The head is the last unit of a forward; with a tied weight a block is.
    """
    c, g = x.c, x.g
    zero3 = e.zero_stage == 3
    held = _held(x, turn, saved, has_head=True)
    copies = c * (units.head + units.tied) if zero3 else whole
    gathers = x.shards > 1 and (zero3 or not turn.prior)
    gathering = (max(x.b * x.block, x.b_experts * units.experts) if units.tied else c * units.head) if gathers else 0
    forward = (copies, turn.prior, held + x.head.working + _waiting(x, units, turn) + gathering)
    if not units.head or not _reduces(x, turn):
        return (forward,)
    if turn.own and turn.prior and not x.whole and e.pp_schedule in INTERLEAVED:
        # The one before has had its first half, in which the head was reduced last. With one chunk no second half has
        # run yet.
        gradients = turn.prior if e.virtual_stages > 1 else g * units.head // x.shards
        early = (copies, gradients, held + x.head.working + g * units.head + gathering)
        forward = max(forward, early, key=sum)
    resharded = c * units.head if zero3 or (turn.last and not turn.own) else 0
    shard = g * units.head // x.shards
    if x.whole and turn.prior:
        # What was accumulated is in ``prior`` until the new shard is there.
        reducing = _reduce_bytes(x, units.head, turn) - (g * units.head - shard if x.shards > 1 else 0)
        return forward, (copies - resharded, turn.prior, held + x.stream + reducing)
    gradients = turn.prior + (0 if turn.prior else shard)
    return forward, (copies - resharded, gradients, held + x.stream + _reduce_bytes(x, units.head, turn))


def block_moments(
    e: Experiment, x: Shared, units: Units, turn: Round, whole: int, saved: int, held: StageParams
) -> tuple[Moment, ...]:
    """The last block's backward: its gradients and what it computes again; the head's gradient is there.

    Also a later one's: that of the last block that is recomputed where those after it are not, else of the last but
    one. What the blocks after it saved is free by then, their gradients are there, and the last of them is being
    reduced; a stage that is not the last still holds the gradient that it received. With ZeRO 3 the unit that comes
    next is gathered already: a block or the embedding.
    """
    zero3, reduces = e.zero_stage == 3, _reduces(x, turn)
    resharded = units.head if turn.last and not turn.own else 0
    gathered = 2 * x.b * x.block + x.b_experts * units.experts + x.c * units.tied
    copies = min(whole, gathered) if zero3 else whole - x.c * resharded
    head = 0 if turn.prior else x.g * units.head // (x.shards if reduces else 1)
    flat = x.g * units.head if units.head and reduces else _waiting(x, units, turn)
    gradients = turn.prior + head + x.c * units.tied
    all_held = _held(x, turn, saved, held.has_head)
    kept = held.kept_after
    last = (copies, gradients, all_held + (x.working_kept if kept else x.working) + flat)
    done = kept if 0 < kept < held.num_layers else 1
    if done == held.num_layers:
        return (last,)
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
        gradients += shard if reduces else of_done
    elif x.whole and turn.last:
        gradients -= of_done - shard
    if zero3 and held.embedding and done == held.num_layers - 1:
        copies = x.b * x.block + x.c * units.first
    elif not zero3 and turn.last:
        copies -= x.b * rest + x.b_experts * moe * units.experts
    received = 0 if held.has_head else x.stream
    left = moe * x.moe_deferred + (done - moe) * x.dense_deferred if turn.first_half else 0
    activations = all_held - freed + left + working + received + (unsharded if reduces else flat)
    return last, (copies, gradients, activations)


def first_block_moment(
    e: Experiment, x: Shared, units: Units, turn: Round, held: StageParams, params: int, whole: int, saved: int
) -> Moment:
    """The first block's backward, the last of its stage: the gradients of all other blocks and of the head are there.

    It is higher than the last block's where a block's gradient takes more than the block had saved.
    """
    zero3, reduces = e.zero_stage == 3, _reduces(x, turn)
    experts = 0 if held.dense_layers else units.experts
    of_others = units.all_experts - experts
    done = max(0, params - units.all_experts - x.block - (units.first if held.embedding else 0))
    shard = x.shard(done, of_others)
    if turn.first_half:
        done, of_others, shard = units.head, 0, x.shard(units.head, 0)
    gradients = turn.prior or (shard if reduces else x.g * (done + of_others))
    if x.whole and turn.last:
        gradients -= x.g * (done + of_others) - shard
    # With ZeRO 3 FSDP gathers the next unit, the embedding, while this one computes.
    if zero3:
        copies = x.b * x.block + x.b_experts * experts + (x.c * units.tied or units.first_copy)
    else:
        left = x.b * x.block + x.b_experts * experts + (units.first_copy if held.embedding else 0)
        copies = min(whole, left) if turn.last else whole
    head = x.head.saved if held.has_head else 0
    dense, moe = (x.dense_saved, x.moe_saved) if held.first_recomputed else (x.dense_kept, x.moe_kept)
    own = dense if held.dense_layers else moe
    others = int((turn.in_flight - 1) * (saved + head)) + turn.deferred + own
    others += 0 if held.has_head else x.stream  # the gradient that a stage before the last received
    if turn.first_half:  # what the others keep for their second halves
        others += turn.own - (x.dense_deferred if held.dense_layers else x.moe_deferred)
        others += x.dense_first_half if held.dense_layers else 0
    flat = x.g * x.block if reduces and not turn.first_half else _waiting(x, units, turn)
    if held.dense_layers:
        working = x.dense_working if held.first_recomputed else x.dense_working_kept
    else:
        working = x.working if held.first_recomputed else x.working_kept
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
    if _reduces(x, turn):
        own = 0 if turn.prior else shard
        new = shard if turn.prior and not x.whole else 0  # beside the one that it is added to
        # FSDP holds on to a unit's last gradient, the weight of the way down: a third of the experts.
        buffers = (2 * x.g * size if shards == 1 or x.whole else x.g * size + x.c * size // 3) + new
        if x.whole and turn.prior and shards > 1:
            buffers -= x.g * size - shard  # as of the head
    else:
        own = (0 if turn.prior else x.g * size) + (0 if x.c == x.g and not turn.prior else x.c * size)
    reduced = _reduces(x, turn)
    of_head = 0 if turn.prior else x.g * units.head // (x.shards if reduced else 1)
    tied, resharded = x.c * units.tied, (x.c * units.head + x.b_experts * size) * turn.last
    copies = min(whole, 2 * x.b * x.block + tied) if zero3 else whole - resharded
    beside = x.beside_experts_kept if held.kept_after else x.beside_experts
    last = copies, turn.prior + of_head + own + tied, _held(x, turn, saved, held.has_head) + beside + buffers

    others = held.moe_layers - 1
    rest = units.head + others * x.moe_block
    gradients = turn.prior or (x.shard(rest, others * size) if reduced else x.g * (rest + others * size))
    if x.whole and turn.last:
        gradients -= x.g * (rest + others * size) - x.shard(rest, others * size)
    if not zero3:
        left = x.b * (held.dense_layers * x.block + x.moe_block) + (units.first_copy if held.embedding else 0)
        copies = min(whole, left) if turn.last else whole
    elif held.embedding and not held.dense_layers:
        copies = x.b * x.block + (tied or units.first_copy)
    recomputed = held.first_recomputed if not held.dense_layers else held.moe_recomputed > 0
    layer = x.moe_saved + x.beside_experts if recomputed else x.moe_kept + x.beside_experts_kept
    layer += held.dense_recomputed * x.dense_saved + (held.dense_layers - held.dense_recomputed) * x.dense_kept
    layer += 0 if held.has_head else x.stream  # the gradient that a stage before the last received
    in_flight = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + turn.deferred
    return last, (copies, gradients + own + tied, in_flight + layer + buffers)


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

    A stage that is not the last still holds the gradient that it received. With ZeRO 3 the beginning of the next
    forward may be higher: the flat copy that was reduced is still there, and two gathered ones beside its first unit.
    At the end of the first half of a split backward what its products need for the second one is still there, and of
    its own gradients only the embedding's is, which FSDP reduces then (`GradientSync._tell_ends` in the engine).
    """
    c, zero3 = x.c, e.zero_stage == 3
    received = 0 if held.has_head else x.stream
    if turn.last and not turn.own:
        return 0, shard, turn.deferred + received + _reduce_bytes(x, units.first, turn)
    others = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + received + x.stream
    others += turn.deferred
    if x.whole and turn.first_half:
        end = units.first if held.embedding else 0
        return whole, turn.prior or x.g * end, others + turn.own + (0 if c == x.g and not turn.prior else c * end)
    if x.whole:
        # An unmixed gradient is its own accumulation buffer at first.
        own = 0 if c == x.g and not turn.prior else c * units.first * (2 if units.tied else 1)
        return whole, x.g * params + own, others + turn.own
    if turn.own:
        end = units.first if held.embedding else 0
        buffers = _reduce_bytes(x, end, turn) if end else _waiting(x, units, turn)
        # FSDP has gathered the last block ahead, which ran before in the order of all forwards.
        copies = x.b * x.block * bool(turn.prior) if zero3 else whole
        return copies, turn.prior or x.g * end // x.shards, others + turn.own + buffers
    reducing = _reduce_bytes(x, units.first, turn)
    if not zero3:
        return whole, shard, others + reducing
    starting = x.g * units.first + units.first_copy + x.b * x.block if turn.forward_follows else 0
    return units.first_copy, shard, others + max(reducing, starting)
