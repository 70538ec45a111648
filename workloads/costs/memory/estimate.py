"""Device memory of one training step in closed form: the peak of every pipeline stage, by category.

Symbols: P parameters of one rank (its stages, divided by tp); S ranks that share master weights (`data_degrees`); g
bytes per element of the master and gradient dtype; c bytes per element of the compute dtype; m micro-batches. A unit is
what FSDP gathers and reduces at one time: a block, the routed experts in it, the embedding, the head with the final
norm; or, if both ends meet in one tied weight, that weight with the stage itself. Experts are sharded over ranks of
their own (`expert_degrees`). With uneven routing, the rank with most tokens is counted. Model states follow ZeRO
(Rajbhandari et al., arXiv:1910.02054, section 5). The engine keeps

    parameters  g P / S master shards, and the copy to compute with: c P for ZeRO 0, 1, 2; for ZeRO 3 two blocks in
                backward, and the embedding or head while it runs. Blocks and experts whose matrices have one fp8 scale
                each take one byte an element
    optimizer   2 g P / S, the two moments of AdamW
    gradients   g P / S at the end of a step. ZeRO 0 and 1 with m > 1 accumulate g P, unsharded, until then. The
                optimizer frees them, so a step's first backward starts without gradients
    activations saved bytes of every micro-batch in flight, working bytes of the running block or the head, and
                FSDP's flat buffers

and peaks at one of the moments of `workloads.costs.memory.layer_moments` and `workloads.costs.memory.end_moments`.
Compiled blocks are assumed to save the same tensors as eager blocks.

Not included (see `ClusterSpec.reserved_bytes`): device context, NCCL's buffers, allocator fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from workloads.costs.memory.chunk_moments import covers, moments_of_chunks
from workloads.costs.memory.end_moments import end_moment, head_moments, tied_moment
from workloads.costs.memory.layer_moments import block_moments, expert_moments, first_block_moments
from workloads.costs.memory.moments import MicroBatchBackward, Moment, Shared, Units
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.params import MASTER_BYTES, local_params
from workloads.costs.shape.partition import StageParams, experiment_stages, ranks_alike
from workloads.costs.shape.schedule import SPLIT_BACKWARD, held_by_chunk, held_by_rank
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank of one pipeline stage at its peak."""

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
    """Stage with the highest peak; the first one if several are equal."""

    @property
    def peak_bytes(self) -> int:
        return self.stages[self.peak_stage].peak_bytes


def estimate_memory(experiment: Experiment) -> MemoryEstimate:
    """Returns the peak allocated bytes of each stage. The experiment must break no rule of
    `workloads.rules.layout_rules`."""
    e = as_held(experiment)
    shared = Shared.of(e)
    result = [_stage_memory(e, shared, rank, held) for rank, held in enumerate(experiment_stages(e))]
    peaks = [memory.peak_bytes for memory in result]
    return MemoryEstimate(stages=tuple(result), peak_stage=peaks.index(max(peaks)))


def peak_stage(experiment: Experiment) -> StageMemory:
    """Returns the stage with the highest peak, as `estimate_memory`, but evaluates only one of several equal ranks."""
    e = as_held(experiment)
    shared, held = Shared.of(e), experiment_stages(e)
    ranks = _fullest(ranks_alike(e), e.pp_schedule, e.num_microbatches, e.virtual_stages)
    return max((_stage_memory(e, shared, rank, held[rank]) for rank in ranks), key=lambda one: one.peak_bytes)


@lru_cache(maxsize=4096)
def _fullest(alike: tuple[int, ...], schedule: str, m: int, v: int) -> tuple[int, ...]:
    """Ranks of which one has the highest peak. ``alike``: equal numbers for ranks that hold equal parts of the model.

    Ranks with equal layers and equal moments need equal memory. Without split backwards a moment is a number of
    micro-batches in flight, and every term of `_stage_memory` is non-decreasing in it, provided that the same rounds
    are followed by a forward (`MicroBatchBackward.forward_follows`). So only the rank with most micro-batches in flight
    is evaluated. Earlier ranks never have fewer in flight than later ones.
    """
    if v > 1:
        return _uncovered(alike, schedule, m, v)
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


def _uncovered(alike: tuple[int, ...], schedule: str, m: int, v: int) -> tuple[int, ...]:
    """Ranks with several chunks, without those that hold at most as much as another equal rank, chunk by chunk
    and turn by turn."""
    kept: list[int] = []
    of_rank = [held_by_chunk(schedule, rank, len(alike), m, v) for rank in range(len(alike))]
    for rank, kind in enumerate(alike):
        if not any(alike[other] == kind and covers(of_rank[other], of_rank[rank]) for other in kept):
            kept.append(rank)
    return tuple(kept)


def moments_held(experiment: Experiment, rank: int) -> tuple[tuple[float, float], ...]:
    """Moments at which a pipeline rank holds most: (micro-batches in flight, micro-batches between the two passes of a
    split backward). Both are in micro-batches of the whole rank; each chunk counts as an equal part of it.

    For 1F1B the first number is min(pp - rank, m), for GPipe m (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
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
    """Bytes of master weights on one rank: ``g P / S``. Experts are sharded over ranks with the same experts."""
    e = experiment
    of_experts = expert_degrees(e)[1] if experts else 1
    return MASTER_BYTES[e.precision] * (params // data_degrees(e)[1] + experts // of_experts)


def saved_bytes(experiment: Experiment, held: StageParams) -> int:
    """Bytes that the layers of a pipeline rank hold from forward to backward for one micro-batch."""
    return Shared.of(experiment).saved(held)


def _stage_memory(e: Experiment, x: Shared, stage: int, held: StageParams) -> StageMemory:
    layers, experts = local_params(e, held.layers)
    ends = (held.embedding + held.head) // e.tp + held.final_norm
    params = layers + experts + ends
    shard = parameter_shard_bytes(e, layers + ends, experts)
    is_tied = held.has_head and held.embedding > 0 and held.head == 0
    units = Units(
        head=x.vocabulary if held.head else 0,
        first=x.vocabulary if held.embedding else x.block,
        first_copy=x.c * x.vocabulary if held.embedding else x.b * x.block,
        tied=x.vocabulary if is_tied else 0,
        experts=x.experts if held.moe_layers else 0,
        all_experts=experts,
    )
    whole = x.b * layers + x.b_experts * experts + x.c * ends
    accumulated = x.g * params if x.unsharded else shard
    if e.virtual_stages > 1:
        return _highest(stage, x, shard, moments_of_chunks(e, x, stage))
    outputs = e.virtual_stages - held.has_head  # a chunk keeps the output that it sends on; the last one sends nothing
    saved = x.saved(held) + outputs * x.stream
    between_passes = held.dense_layers * x.dense_deferred + held.moe_layers * x.moe_deferred
    own_deferred = between_passes if e.pp_schedule in SPLIT_BACKWARD else 0
    # With a split backward: the moment before the input-gradient pass, which defers ``own_deferred``.
    in_flight, deferred = max(moments_held(e, stage))
    moments = []
    for turn in _rounds(x, in_flight, int(deferred * between_passes), accumulated, own_deferred):
        moments += [
            *(head_moments(e, x, units, turn, whole, saved) if held.has_head else ()),
            *block_moments(e, x, units, turn, whole, saved, held),
            *expert_moments(e, x, units, turn, held, whole, saved),
            *first_block_moments(e, x, units, turn, held, params, whole, saved),
            *((tied_moment(x, units, turn, params, whole, shard, zero3=e.zero_stage == 3),) if is_tied else ()),
            end_moment(e, x, units, turn, held, params, whole, shard, saved),
        ]
    return _highest(stage, x, shard, moments)


def _rounds(
    x: Shared, in_flight: float, deferred: int, accumulated: int, own_deferred: int
) -> list[MicroBatchBackward]:
    """Backwards to evaluate: the first (no gradients yet), the second (as many in flight, gradients exist) and the last
    (no other micro-batch in flight except those whose weight-gradient pass is pending)."""
    m = x.num_microbatches
    rounds = [
        MicroBatchBackward(
            in_flight, deferred, 0, last=m == 1, forward_follows=m > in_flight, own_deferred=own_deferred
        )
    ]
    if m > 2:
        more = m - 1 > in_flight
        rounds.append(
            MicroBatchBackward(
                min(in_flight, m - 1),
                deferred,
                accumulated,
                last=False,
                forward_follows=more,
                own_deferred=own_deferred,
            )
        )
    if m > 1:
        deferred = deferred if own_deferred and not x.unsharded else 0
        rounds.append(
            MicroBatchBackward(1, deferred, accumulated, last=True, forward_follows=False, own_deferred=own_deferred)
        )
    return rounds


def _highest(stage: int, x: Shared, shard: int, moments: Sequence[Moment]) -> StageMemory:
    """Stage memory at the first of the highest moments."""
    copies, gradients, activations = max(moments, key=sum)
    return StageMemory(
        stage=stage,
        parameters_bytes=shard + copies,
        gradients_bytes=gradients,
        optimizer_bytes=2 * shard,
        activations_bytes=activations + x.inputs,
    )
