"""Device memory of one training step in closed form: every pipeline stage, by category, at its highest moment.

P parameters of one rank (its stages, divided by tp), S the ranks that share master weights (`data_degrees`), g bytes of
the master and gradient dtype, c of the compute dtype, m micro-batches. A unit is what FSDP gathers and reduces at one
time: a block, the embedding, the head with the final norm; or, where both ends meet in one tied weight, that weight
with the stage itself. The engine keeps

    parameters  g P / S master shards, and the copy to compute with: c P for ZeRO 0, 1, 2; for ZeRO 3 two blocks in
                backward, and the embedding or head while it runs
    optimizer   2 g P / S, the two moments of AdamW
    gradients   g P / S at the end of a step. ZeRO 0 and 1 with m > 1 accumulate g P, unsharded, until then. Freed by
                the optimizer, so a step's first backward starts without
    activations saved bytes of every micro-batch in flight, what the running block or the head needs for itself, and
                FSDP's flat buffers

and peaks at one of four moments, each a function below. Compiled blocks are taken to save what eager ones save.

Not in here (`ClusterSpec.reserved_bytes` has it): device context, NCCL's buffers, allocator fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from workloads.costs.activations import HeadBytes, deferred_bytes, head_bytes, layer_bytes, rank_tokens
from workloads.costs.params import dense_layer, local_params, moe_layer
from workloads.costs.partition import StageParams, experiment_stages, ranks_alike
from workloads.costs.schedule import SPLIT_BACKWARD, held_by_rank
from workloads.experiment import Experiment, Precision
from workloads.mesh import data_degrees

MASTER_BYTES: dict[Precision, int] = {"bf16": 4, "fp32": 4, "fp64": 8, "fp8_tensorwise": 4, "fp8_rowwise": 4}
"""Bytes of master weights, reduced gradients and each optimizer moment."""
COMPUTE_BYTES: dict[Precision, int] = {"bf16": 2, "fp32": 4, "fp64": 8, "fp8_tensorwise": 2, "fp8_rowwise": 2}
"""Bytes of gathered weights and activations; fp8 keeps bf16 tensors between its matmuls."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One rank of one pipeline stage at its highest moment, in bytes."""

    stage: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Predicted peak of every pipeline stage."""

    stages: tuple[StageMemory, ...]
    """One entry for each pipeline stage, in order."""
    peak_stage: int
    """The stage with the highest peak; the first of several."""

    @property
    def peak_bytes(self) -> int:
        return self.stages[self.peak_stage].peak_bytes


def estimate_memory(experiment: Experiment) -> MemoryEstimate:
    """Peak allocated bytes of each stage. Expects an experiment that breaks no rule of `workloads.rules`."""
    e = experiment
    shared = _Shared.of(e)
    result = [_stage_memory(e, shared, rank, held) for rank, held in enumerate(experiment_stages(e))]
    peaks = [memory.peak_bytes for memory in result]
    return MemoryEstimate(stages=tuple(result), peak_stage=peaks.index(max(peaks)))


def peak_stage(experiment: Experiment) -> StageMemory:
    """The stage with the highest peak, the first of several, as `estimate_memory` has it; alike ranks count once."""
    e = experiment
    shared, held = _Shared.of(e), experiment_stages(e)
    ranks = _fullest(ranks_alike(e), e.pp_schedule, e.num_microbatches, e.virtual_stages)
    return max((_stage_memory(e, shared, rank, held[rank]) for rank in ranks), key=lambda one: one.peak_bytes)


@lru_cache(maxsize=4096)
def _fullest(alike: tuple[int, ...], schedule: str, m: int, v: int) -> tuple[int, ...]:
    """Ranks of which one has the highest peak. ``alike``: equal numbers for ranks that hold equal parts of the model.

    Of such ranks those with equal moments need the same. Without split backwards a moment is a number of micro-batches
    in flight, of which every term of `_stage_memory` is a sum that never falls, as long as the same rounds have a
    forward after them (`_Round.forward_follows`); and no rank has more of them in flight than one before it.
    """
    fullest: dict[tuple[object, ...], tuple[float, int]] = {}
    for rank, kind in enumerate(alike):
        moments, most = _moments(schedule, rank, len(alike), m, v), 0.0
        key: tuple[object, ...] = (kind, moments)
        if schedule not in SPLIT_BACKWARD:
            most = max(in_flight for in_flight, _ in moments)
            key = (kind, m > most, m - 1 > most)
        if key not in fullest or most > fullest[key][0]:
            fullest[key] = most, rank
    return tuple(sorted(rank for _, rank in fullest.values()))


def moments_held(experiment: Experiment, rank: int) -> tuple[tuple[float, float], ...]:
    """The moments at which a pipeline rank holds most: (micro-batches in flight, micro-batches between the halves of a
    split backward), both counted in whole ranks, of whose chunks each is an equal part."""
    e = experiment
    return _moments(e.pp_schedule, rank, e.pp, e.num_microbatches, e.virtual_stages)


@lru_cache(maxsize=65536)
def _moments(schedule: str, rank: int, pp: int, m: int, v: int) -> tuple[tuple[float, float], ...]:
    if schedule == "gpipe":
        return ((m, 0.0),)
    if schedule in ("1f1b", "none"):
        return ((float(min(pp - rank, m)), 0.0),)
    moments = held_by_rank(schedule, rank, pp, m, v)
    return tuple((sum(one.activations) / v, sum(one.for_weights) / v) for one in moments)


def parameter_shard_bytes(experiment: Experiment, params: int, experts: int) -> int:
    """Master weights of one rank: ``g P / S``; experts are sharded over the ranks that hold the same ones."""
    e = experiment
    shards = data_degrees(e)[1]
    return MASTER_BYTES[e.precision] * (params // shards + experts // max(1, shards // e.ep))


def accumulates_unsharded(experiment: Experiment) -> bool:
    """ZeRO 0 and 1 reduce gradients with the last micro-batch only; until then they are whole on every rank."""
    return experiment.zero_stage <= 1 and experiment.num_microbatches > 1


class _Shared(NamedTuple):
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
    def of(cls, e: Experiment) -> _Shared:
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens, stream_tokens = rank_tokens(e)
        dense = layer_bytes(e, routed=False, c=c)
        block, moe_saved, working = sum(local_params(e, dense_layer(model))), 0, dense.working
        if model.moe is not None:
            routed = layer_bytes(e, routed=True, c=c)
            moe_saved, working = routed.saved, max(working, routed.working)
            block = max(block, sum(local_params(e, moe_layer(model))))
        return cls(
            c=c,
            g=MASTER_BYTES[e.precision],
            dense_saved=dense.saved,
            moe_saved=moe_saved,
            dense_deferred=deferred_bytes(e, routed=False, c=c),
            moe_deferred=deferred_bytes(e, routed=True, c=c) if model.moe is not None else 0,
            working=working,
            block=block,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=c * stream_tokens * model.hidden_size,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * model.head_dim,
            whole=accumulates_unsharded(e),
            rounds=e.num_microbatches,
            shards=data_degrees(e)[1],
        )


class _Units(NamedTuple):
    """One stage's FSDP units, in elements."""

    head: int
    """The output projection; 0 where the stage has none of its own."""
    first: int
    """The unit whose gradient comes last: the embedding, the tied weight or a block."""
    tied: int
    """The embedding that is also the output projection; 0 where the stage has no such weight."""


class _Round(NamedTuple):
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


_Moment = tuple[int, int, int]
"""Bytes of (gathered parameters, gradients, activations)."""


def _stage_memory(e: Experiment, x: _Shared, stage: int, held: StageParams) -> StageMemory:
    layers, experts = local_params(e, held.layers)
    ends = (held.embedding + held.head) // e.tp + held.final_norm
    params = layers + experts + ends
    shard = parameter_shard_bytes(e, layers + ends, experts)
    is_tied = held.has_head and held.embedding > 0 and held.head == 0
    units = _Units(
        head=x.vocabulary if held.head else 0,
        first=x.vocabulary if held.embedding else x.block,
        tied=x.vocabulary if is_tied else 0,
    )
    outputs = e.virtual_stages - held.has_head  # a stage keeps what it passes on; the last one passes nothing on
    saved = held.dense_layers * x.dense_saved + held.moe_layers * x.moe_saved + outputs * x.stream
    waiting = held.dense_layers * x.dense_deferred + held.moe_layers * x.moe_deferred
    in_flight, deferred = max(moments_held(e, stage), key=lambda one: one[0] * saved + one[1] * waiting)
    best: _Moment = (0, 0, 0)
    accumulated = x.g * params if x.whole else shard
    for turn in _rounds(x, in_flight, int(deferred * waiting), accumulated):
        moments = [
            *(_head_moments(e, x, units, turn, params, saved) if held.has_head else ()),
            _block_moment(e, x, units, turn, params, saved, held.has_head),
            _first_block_moment(e, x, units, turn, held, params, saved),
            _end_moment(e, x, units, turn, held, params, shard, saved),
        ]
        for moment in moments:
            if sum(moment) > sum(best):
                best = moment
    copies, gradients, activations = best
    return StageMemory(
        stage=stage,
        parameters_bytes=shard + copies,
        gradients_bytes=gradients,
        optimizer_bytes=2 * shard,
        activations_bytes=activations + x.inputs,
    )


def _rounds(x: _Shared, in_flight: float, deferred: int, accumulated: int) -> list[_Round]:
    """The first backward (no gradients yet), the second (as many in flight, gradients there) and the last (alone)."""
    m = x.rounds
    rounds = [_Round(in_flight, deferred, 0, last=m == 1, forward_follows=m > in_flight)]
    if m > 2:
        more = m - 1 > in_flight
        rounds.append(_Round(min(in_flight, m - 1), deferred, accumulated, last=False, forward_follows=more))
    if m > 1:
        rounds.append(_Round(1, 0, accumulated, last=True, forward_follows=False))
    return rounds


def _reduces(x: _Shared, turn: _Round) -> bool:
    return turn.last or not x.whole


def _reduce_bytes(x: _Shared, unit: int, turn: _Round) -> int:
    """Buffers while FSDP reduces a unit, besides gradients that stay.

    A flat copy in g bytes an element, and with one shard a scaled copy of it. With several shards the unit's own
    gradient of c bytes an element lives until the end, as does the new shard where there is an earlier one to add to.
    """
    if x.shards == 1 or x.whole:
        return 2 * x.g * unit
    return (x.g + x.c) * unit + (x.g * unit // x.shards if turn.prior else 0)


def _waiting(x: _Shared, units: _Units, turn: _Round) -> int:
    """The flat copy through which the previous micro-batch's last unit was reduced: it lives until the next is."""
    return x.g * units.first if turn.prior and not x.whole else 0


def _held(x: _Shared, turn: _Round, saved: int, has_head: bool) -> int:
    """Saved activations at the start of a backward, without what the head keeps for this micro-batch."""
    return turn.deferred + int(turn.in_flight * saved + (turn.in_flight - 1) * (x.head.saved if has_head else 0))


def _head_moments(
    e: Experiment, x: _Shared, units: _Units, turn: _Round, params: int, saved: int
) -> tuple[_Moment, ...]:
    """The head's forward (under GPipe its backward), and the reduction of its gradient right after its backward.

    Forward: one chunk of logits and both gradients. With S > 1 a unit is gathered into a flat buffer in c bytes that
    lives until the next unit is gathered. The head is the last unit of a forward; with a tied weight a block is.
    """
    c, g = x.c, x.g
    zero3 = e.zero_stage == 3
    held = _held(x, turn, saved, has_head=True)
    copies = c * (units.head + units.tied if zero3 else params)
    gathers = x.shards > 1 and (zero3 or not turn.prior)
    gathering = c * (x.block if units.tied else units.head) if gathers else 0
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


def _block_moment(
    e: Experiment, x: _Shared, units: _Units, turn: _Round, params: int, saved: int, has_head: bool
) -> _Moment:
    """The last block's backward: its gradients and what it computes again; the head's gradient is there."""
    zero3, reduces = e.zero_stage == 3, _reduces(x, turn)
    resharded = units.head if turn.last else 0
    copies = x.c * (min(params, 2 * x.block + units.tied) if zero3 else params - resharded)
    head = 0 if turn.prior else x.g * units.head // (x.shards if reduces else 1)
    flat = x.g * units.head if units.head and reduces else _waiting(x, units, turn)
    gradients = turn.prior + head + x.c * units.tied
    return copies, gradients, _held(x, turn, saved, has_head) + x.working + flat


def _first_block_moment(
    e: Experiment, x: _Shared, units: _Units, turn: _Round, held: StageParams, params: int, saved: int
) -> _Moment:
    """The first block's backward, the last of its stage: the gradients of all other blocks and of the head are there.

    It is higher than the last block's where a block's gradient takes more than the block had saved.
    """
    zero3, reduces = e.zero_stage == 3, _reduces(x, turn)
    done = max(0, params - x.block - (units.first if held.embedding else 0))
    gradients = turn.prior or x.g * done // (x.shards if reduces else 1)
    if x.whole and turn.last:
        gradients -= x.g * done - x.g * done // x.shards
    # With ZeRO 3 FSDP gathers the next unit, the embedding, while this one computes.
    remaining = x.block + (units.tied or units.first) if zero3 else params - done
    copies = x.c * (remaining if zero3 or turn.last else params)
    head = x.head.saved if held.has_head else 0
    own = min(bytes for bytes in (x.dense_saved, x.moe_saved) if bytes)
    others = int((turn.in_flight - 1) * (saved + head)) + turn.deferred + own
    others += x.stream if e.virtual_stages > held.has_head else 0  # the gradient that a stage before the last received
    flat = x.g * x.block if reduces else _waiting(x, units, turn)
    return copies, gradients + x.c * units.tied, others + x.working + flat


def _end_moment(
    e: Experiment, x: _Shared, units: _Units, turn: _Round, held: StageParams, params: int, shard: int, saved: int
) -> _Moment:
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
    everything = c * params
    if x.whole:
        # An unmixed gradient is its own accumulation buffer at first.
        own = 0 if c == x.g and not turn.prior else c * units.first * (2 if units.tied else 1)
        return everything, x.g * params + own, others
    reducing = _reduce_bytes(x, units.first, turn)
    if not zero3:
        return everything, shard, others + reducing
    starting = x.g * units.first + c * (units.first + x.block) if turn.forward_follows else 0
    return c * units.first, shard, others + max(reducing, starting)
