"""The moments of a backward at which a pipeline rank may hold most; `workloads.costs.memory` takes the highest.

Symbols are those of `workloads.costs.memory`.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.activations import HeadBytes, deferred_bytes, head_bytes, layer_bytes, rank_tokens
from workloads.costs.fp8 import gathered_bytes
from workloads.costs.params import COMPUTE_BYTES, MASTER_BYTES, dense_layer, local_params, moe_layer
from workloads.costs.partition import StageParams
from workloads.experiment import Experiment
from workloads.mesh import data_degrees


def accumulates_unsharded(experiment: Experiment) -> bool:
    """ZeRO 0 and 1 reduce gradients with the last micro-batch only; until then they are whole on every rank."""
    return experiment.zero_stage <= 1 and experiment.num_microbatches > 1


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
    working: int
    """Of the kind of layer that needs most."""
    dense_kept: int
    """As ``dense_saved``, of a layer that is not recomputed (``recompute_every``)."""
    moe_kept: int
    working_kept: int
    b: int
    """Bytes of an element of a block as it is gathered: c, or 1 for fp8 weights with one scale."""
    block: int
    """Elements of the largest block on one rank."""
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
        dense = layer_bytes(e, routed=False, c=c)
        block, moe_saved, working = sum(local_params(e, dense_layer(model))), 0, dense.working
        kept = layer_bytes(e, routed=False, c=c, recomputed=False) if e.recompute_every > 1 else dense
        moe_kept, working_kept = 0, kept.working
        if model.moe is not None:
            routed = layer_bytes(e, routed=True, c=c)
            moe_saved, working = routed.saved, max(working, routed.working)
            own = layer_bytes(e, routed=True, c=c, recomputed=False) if e.recompute_every > 1 else routed
            moe_kept, working_kept = own.saved, max(working_kept, own.working)
            block = max(block, sum(local_params(e, moe_layer(model))))
        return cls(
            c=c,
            g=MASTER_BYTES[e.precision],
            dense_saved=dense.saved,
            moe_saved=moe_saved,
            dense_deferred=deferred_bytes(e, routed=False, c=c),
            moe_deferred=deferred_bytes(e, routed=True, c=c) if model.moe is not None else 0,
            working=working,
            dense_kept=kept.saved,
            moe_kept=moe_kept,
            working_kept=working_kept,
            b=gathered_bytes(e, c),
            block=block,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=c * stream_tokens * model.hidden_size,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * model.rope_dim,
            whole=accumulates_unsharded(e),
            rounds=e.num_microbatches,
            shards=data_degrees(e)[1],
        )

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


Moment = tuple[int, int, int]
"""Bytes of (gathered parameters, gradients, activations)."""


def rounds_of(x: Shared, in_flight: float, deferred: int, accumulated: int) -> list[Round]:
    """The first backward (no gradients yet), the second (as many in flight, gradients there) and the last (alone)."""
    m = x.rounds
    rounds = [Round(in_flight, deferred, 0, last=m == 1, forward_follows=m > in_flight)]
    if m > 2:
        more = m - 1 > in_flight
        rounds.append(Round(min(in_flight, m - 1), deferred, accumulated, last=False, forward_follows=more))
    if m > 1:
        rounds.append(Round(1, 0, accumulated, last=True, forward_follows=False))
    return rounds


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
    gathering = (x.b * x.block if units.tied else c * units.head) if gathers else 0
    forward = (copies, turn.prior, held + x.head.working + _waiting(x, units, turn) + gathering)
    if not units.head or not _reduces(x, turn):
        return (forward,)
    resharded = c * units.head if zero3 or turn.last else 0
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

    Where the last blocks are not recomputed, also that of the last one that is: what those saved is free by then, and
    their gradients are there; a stage that is not the last still holds the gradient that it received. With ZeRO 3 the
    unit that comes next is gathered already: a block or the embedding.
    """
    zero3, reduces = e.zero_stage == 3, _reduces(x, turn)
    resharded = units.head if turn.last else 0
    copies = min(whole, 2 * x.b * x.block + x.c * units.tied) if zero3 else whole - x.c * resharded
    head = 0 if turn.prior else x.g * units.head // (x.shards if reduces else 1)
    flat = x.g * units.head if units.head and reduces else _waiting(x, units, turn)
    gradients = turn.prior + head + x.c * units.tied
    all_held = _held(x, turn, saved, held.has_head)
    done = held.kept_after
    last = (copies, gradients, all_held + (x.working_kept if done else x.working) + flat)
    if done in (0, held.num_layers):
        return (last,)
    moe = min(done, held.moe_layers)
    freed = moe * x.moe_kept + (done - moe) * x.dense_kept
    unsharded, shard = x.g * x.block, x.g * x.block // x.shards
    if not turn.prior:
        gradients += done * (shard if reduces else unsharded)
    elif x.whole and turn.last:
        gradients -= done * (unsharded - shard)
    if zero3 and held.embedding and done == held.num_layers - 1:
        copies = x.b * x.block + x.c * units.first
    elif not zero3 and turn.last:
        copies -= x.b * done * x.block
    received = x.stream if e.virtual_stages > held.has_head else 0
    activations = all_held - freed + x.working + received + (unsharded if reduces else flat)
    return last, (copies, gradients, activations)


def first_block_moment(
    e: Experiment, x: Shared, units: Units, turn: Round, held: StageParams, params: int, whole: int, saved: int
) -> Moment:
    """The first block's backward, the last of its stage: the gradients of all other blocks and of the head are there.

    It is higher than the last block's where a block's gradient takes more than the block had saved.
    """
    zero3, reduces = e.zero_stage == 3, _reduces(x, turn)
    done = max(0, params - x.block - (units.first if held.embedding else 0))
    gradients = turn.prior or x.g * done // (x.shards if reduces else 1)
    if x.whole and turn.last:
        gradients -= x.g * done - x.g * done // x.shards
    # With ZeRO 3 FSDP gathers the next unit, the embedding, while this one computes.
    if zero3:
        copies = x.b * x.block + (x.c * units.tied or units.first_copy)
    else:
        left = x.b * x.block + (units.first_copy if held.embedding else 0)
        copies = min(whole, left) if turn.last else whole
    head = x.head.saved if held.has_head else 0
    of_kinds = (x.dense_saved, x.moe_saved) if held.first_recomputed else (x.dense_kept, x.moe_kept)
    own = min(bytes for bytes in of_kinds if bytes)
    others = int((turn.in_flight - 1) * (saved + head)) + turn.deferred + own
    others += x.stream if e.virtual_stages > held.has_head else 0  # the gradient that a stage before the last received
    flat = x.g * x.block if reduces else _waiting(x, units, turn)
    working = x.working if held.first_recomputed else x.working_kept
    return copies, gradients + x.c * units.tied, others + working + flat


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
    """
    c, zero3 = x.c, e.zero_stage == 3
    received = x.stream if e.virtual_stages > held.has_head else 0
    if turn.last:
        return 0, shard, received + _reduce_bytes(x, units.first, turn)
    others = int((turn.in_flight - 1) * (saved + (x.head.saved if held.has_head else 0))) + received + x.stream
    others += turn.deferred
    if x.whole:
        # An unmixed gradient is its own accumulation buffer at first.
        own = 0 if c == x.g and not turn.prior else c * units.first * (2 if units.tied else 1)
        return whole, x.g * params + own, others
    reducing = _reduce_bytes(x, units.first, turn)
    if not zero3:
        return whole, shard, others + reducing
    starting = x.g * units.first + units.first_copy + x.b * x.block if turn.forward_follows else 0
    return units.first_copy, shard, others + max(reducing, starting)
