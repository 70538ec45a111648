"""Device memory of one training step in closed form: the peak of every pipeline stage, by category.

Symbols: P parameters of one rank (its stages, divided by tp); S ranks that share master weights (`data_degrees`); g
bytes per element of master weights and reduced gradients, r of gradients until they are reduced; c bytes per element
of the compute dtype; m micro-batches. A unit is what FSDP gathers and reduces at one time: a block, the routed
experts in it, the embedding, the head with the final norm; or, if both ends meet in one tied weight, that weight with
the stage itself. Experts are sharded over ranks of their own (`expert_degrees`). With uneven routing, the rank with
most tokens is counted. Model states follow ZeRO (Rajbhandari et al., arXiv:1910.02054, section 5). The engine keeps

    parameters  g P / S master shards, and the copy to compute with: c P for ZeRO 0, 1, 2; for ZeRO 3 two blocks in
                backward, and the embedding or head while it runs. Blocks and experts whose matrices have one fp8 scale
                each take one byte an element
    optimizer   the states of P / S parameters (`workloads.spec.updates.optimizer`)
    gradients   g P / S at the end of a step. ZeRO 0 and 1 with m > 1 accumulate r P, unsharded, until then. The
                optimizer frees them, so a step's first backward starts without gradients
    activations saved bytes of every micro-batch in flight, working bytes of the running block or the head,
                FSDP's flat buffers, what has come back from the host for the running layer and the next
                (`workloads.costs.memory.host_activations`), and the memory through which tensor-parallel ranks exchange
                tokens

and peaks at the end of one of the steps of `workloads.costs.memory.layer_events` (with experts' in `expert_events`) and
`workloads.costs.memory.end_events`, each of which allocates and frees named tensors.
Compiled blocks are assumed to save the same tensors as eager blocks.

Not included (see `ClusterSpec.reserved_bytes`): device context, NCCL's buffers, allocator fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from workloads.costs.memory.chunk_events import Chunk, covers, timelines_of_chunks
from workloads.costs.memory.end_events import head_forward, head_reduction, last_unit, tied_step
from workloads.costs.memory.events import Live, Timeline, by_category, highest, live_at
from workloads.costs.memory.layer_classes import layer_classes
from workloads.costs.memory.layer_events import layer_steps
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import (
    StageParams,
    experiment_chunks,
    experiment_stages,
    part_of_experiment,
    ranks_alike,
)
from workloads.costs.shape.peer_memory import SLOTS, slot_bytes
from workloads.costs.shape.schedule import SPLIT_BACKWARD, held_by_chunk, held_by_rank
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.updates.optimizer import master_bytes


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


_Peak = tuple[int, int, Timeline, int]
"""(bytes, pipeline rank, action, step)"""


def estimate_memory(experiment: Experiment) -> MemoryEstimate:
    """Returns the peak allocated bytes of each stage. The experiment must break no rule of
    `workloads.rules.layout_rules`."""
    e = as_held(experiment)
    peaks = _peaks(e, range(e.pp))
    return MemoryEstimate(tuple(map(_memory_at, peaks)), peak_stage=max(peaks, key=itemgetter(0))[1])


def peak_stage(experiment: Experiment, limit_bytes: float = math.inf) -> StageMemory:
    """Returns the stage with the highest peak, as `estimate_memory`, but evaluates only one of several equal ranks, and
    none after the first that is above ``limit_bytes``, which is then returned."""
    e = as_held(experiment)
    ranks = _fullest(ranks_alike(e), e.pp_schedule, e.num_microbatches, e.virtual_stages)
    return _memory_at(max(_peaks(e, ranks, limit_bytes), key=itemgetter(0)))


def rank_peak_bytes(experiment: Experiment, rank: int) -> int:
    """The peak of one pipeline rank, as in `estimate_memory`. Only the words of recomputation of the rank's own stages
    matter for it: what it holds of other stages' micro-batches is their output, which recomputation does not change."""
    return _peaks(as_held(experiment), [rank])[0][0]


def peak_timeline(experiment: Experiment) -> tuple[int, Timeline, int]:
    """(stage, action, step) of the highest peak of all stages, as `estimate_memory`."""
    e = as_held(experiment)
    _, stage, timeline, place = max(_peaks(e, range(e.pp)), key=itemgetter(0))
    return stage, timeline, place


@lru_cache(maxsize=4096)
def _fullest(alike: tuple[int, ...], schedule: str, m: int, v: int) -> tuple[int, ...]:
    """Ranks of which one has the highest peak. ``alike``: equal numbers for ranks that hold equal parts of the model.

    Ranks with equal layers and equal moments need equal memory. With one chunk and whole backwards a moment is a number
    of micro-batches in flight, and every term of `timelines_of` is non-decreasing in it, provided that the same rounds
    are followed by a forward (`MicroBatchBackward.forward_follows`). So only the rank with most micro-batches in flight
    is evaluated. Earlier ranks never have fewer in flight than later ones.
    """
    if v > 1 or schedule in SPLIT_BACKWARD:
        return _uncovered(alike, schedule, m, v)
    fullest: dict[tuple[object, ...], tuple[float, int]] = {}
    for rank, kind in enumerate(alike):
        most = max(in_flight for in_flight, _ in _moments(schedule, rank, len(alike), m, v))
        key = kind, m > most, m - 1 > most
        if key not in fullest or most > fullest[key][0]:
            fullest[key] = most, rank
    return tuple(sorted(rank for _, rank in fullest.values()))


def _uncovered(alike: tuple[int, ...], schedule: str, m: int, v: int) -> tuple[int, ...]:
    """Ranks with several chunks or backwards in two halves, without those that hold at most as much as another equal
    rank, chunk by chunk and turn by turn."""
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
    return master_bytes(e) * (params // data_degrees(e)[1] + experts // of_experts)


def saved_bytes(experiment: Experiment, rank: int) -> int:
    """Bytes that the layers of a pipeline rank hold from forward to backward for one micro-batch."""
    chunks = experiment_chunks(experiment)[rank]
    return sum(one.saved for held in chunks for one in layer_classes(part_of_experiment(experiment, held), held))


def _peaks(e: Experiment, ranks: Iterable[int], limit_bytes: float = math.inf) -> list[_Peak]:
    """The first of the highest steps of each of these ranks, up to the first rank that is above ``limit_bytes``."""
    held, peaks = experiment_stages(e), []
    shared: dict[str, Shared] = {}
    chunks: dict[StageParams, Chunk] = {}
    for rank in ranks:
        word = held[rank].recompute
        if word not in shared:
            shared[word] = Shared.of(part_of_experiment(e, held[rank]))
        timelines = timelines_of(e, shared[word], rank, held[rank], chunks)
        number, place, total = highest(timelines)
        peaks.append((total, rank, timelines[number], place))
        if total > limit_bytes:
            break
    return peaks


def _memory_at(peak: _Peak) -> StageMemory:
    _, stage, timeline, place = peak
    parameters, gradients, optimizer, activations = by_category(live_at(timeline, place))
    return StageMemory(stage, parameters, gradients, optimizer, activations)


def timelines_of(
    e: Experiment, x: Shared, stage: int, held: StageParams, chunks: dict[StageParams, Chunk] | None = None
) -> list[Timeline]:
    """Actions of a rank in one of which it peaks. ``x``: of the experiment with the word of recomputation of this
    stage (`part_of_experiment`). ``chunks``: see `timelines_of_chunks`."""
    part = Part.of(e, x, held)
    always: Live = {"master": part.master, "optimizer": part.optimizer, "inputs": x.inputs}
    if shared_bytes := SLOTS * slot_bytes(e):
        always["shared"] = shared_bytes
    update = [_update(x, part, always)] if part.updating else []
    if e.virtual_stages > 1 or x.splits:
        return [*timelines_of_chunks(e, x, stage, always, {} if chunks is None else chunks), *update]
    in_flight = max(held for held, _ in moments_held(e, stage))
    timelines = []
    shared, e = x, part_of_experiment(e, held)
    for name, turn in _turns(x, part, int(in_flight)):
        x = turn.adapted(e, shared)
        steps = head_forward(x, part, turn) if part.has_head else []
        steps += [*head_reduction(x, part, turn), *layer_steps(x, part, turn), *tied_step(x, part, turn)]
        timelines.append(Timeline(name, turn.start(x, part, always), [*steps, *last_unit(x, part, turn)]))
    return [*timelines, *update]


def _update(x: Shared, part: Part, always: Live) -> Timeline:
    """The optimizer's update, which only holds reduced gradients."""
    start: Live = {**always, "gradients": part.master}
    return Timeline("update", start, [("the largest matrix", {"updating": part.updating})])


def _turns(x: Shared, part: Part, in_flight: int) -> list[tuple[str, Turn]]:
    """Backwards to evaluate: the first (no gradients yet), the second (as many in flight, gradients exist) and the last
    (no other micro-batch in flight)."""
    m = x.num_microbatches
    follows = m > in_flight
    turns = [
        (
            "first backward",
            Turn(in_flight, 0, m == 1, follows, m == 1 or not x.unsharded, in_flight > 1),
        ),
    ]
    if m > 2:
        follows, most = m - 1 > in_flight, min(in_flight, m - 1)
        second = Turn(most, part.accumulated, False, follows, not x.unsharded, True)
        turns.append(("second backward", second))
    if m > 1:
        turns.append(("last backward", Turn(1, part.accumulated, True, False, True, in_flight == 1)))
    return turns
