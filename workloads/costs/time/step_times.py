"""Components and seconds of the steps of many layouts; everything that layouts share is computed once.

Layouts differ in few properties that determine a layer's times, and in few that determine data-parallel communication:
both results are cached. The rest is a table of numbers, one row per layout, on which the formulas work as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from workloads.costs.memory.activations import rank_tokens
from workloads.costs.shape.fp8 import gathered_bytes, keeps_low
from workloads.costs.shape.held_model import as_held, copies_of_heads
from workloads.costs.shape.params import COMPUTE_BYTES
from workloads.costs.shape.partition import experiment_stages, ranks_alike, with_word
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.costs.shape.weight_sums import SAVED_WITH_SHARDS, added_bytes, experts_add
from workloads.costs.time.copied_heads import copied_heads_s
from workloads.costs.time.layer_times import layer_times, rates_of
from workloads.costs.time.matrix_updates import matrix_update_s
from workloads.costs.time.model_parallel import ModelParallel, starts
from workloads.costs.time.rank_times import (
    ChunkTimes,
    EndTimes,
    Floats,
    HeldLayers,
    Ints,
    LayerTimes,
    chunk_times,
    optimizer_s,
    tied_s,
)
from workloads.costs.time.setting_tables import HOP, MESSAGE, RECOMPUTE, HeldKinds, OfLayers, setting_of
from workloads.costs.time.step_bounds import (
    LayoutSteps,
    PipelineShape,
    ends_s,
    least_steps_s,
    parted_steps_s,
    step_bounds_s,
)
from workloads.costs.time.update_pace import paced_bytes, rows_of_operations_s
from workloads.costs.traffic.collectives import (
    Contention,
    Group,
    contention_of,
    group_of,
    members_per_node,
    tier_of_group,
)
from workloads.costs.traffic.measured_network import ProbedCluster
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees, stride
from workloads.spec.model_layers import layers_of
from workloads.spec.recomputation import is_by_stage
from workloads.spec.updates.optimizer import optimizer_of, reduced_bytes
from workloads.spec.updates.words import UPDATE_FIELDS

_AT_ONCE = 2048
"""Number of layouts whose chunks form one table."""
_MOST_KEPT = 20_000


class StepParts(NamedTuple):
    """Times of several layouts, by kind of chunk as in `LayoutSteps`."""

    times: ChunkTimes
    steps: LayoutSteps
    ranks_s: Floats
    """Optimizer seconds by kind of rank."""
    latency_s: Floats
    """Seconds of latency of a message, by layout."""


@dataclass(slots=True)
class StepTimes:
    """Step times on one cluster, with caches."""

    cluster: ClusterSpec
    _layers: dict[Hashable, OfLayers | None] = field(default_factory=dict)
    _groups: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)
    _held: dict[Hashable, HeldKinds] = field(default_factory=dict)

    def seconds(self, experiments: Sequence[Experiment]) -> Floats:
        """``step_time_s`` of `workloads.costs.time.timeline.estimate_time` by experiment; NaN if unknown. Raises the
        same errors."""
        seconds: Floats = self._by_layout(experiments, step_bounds_s)[0]
        return seconds

    def parted_s(self, experiments: Sequence[Experiment]) -> Floats:
        """`parted_steps_s` by experiment, shape (4, experiments)."""
        return self._by_layout(experiments, parted_steps_s, 4)

    def least_s(self, alike: ModelParallel, of: Ints, zero_stages: Ints, replicas: int) -> Floats:
        """`least_steps_s` of layouts with 1F1B or without a pipeline that are like those of ``alike`` with the indices
        ``of``, apart from their ZeRO stages and so many replicas of shards (below ZeRO 1 all are replicas)."""
        keys = np.stack([alike.degrees[of], zero_stages > 0], axis=1)
        keys, of_key = np.unique(keys, axis=0, return_inverse=True)
        divided = [_divided(alike.experiments[at], replicas if sharded else 0) for at, sharded in keys.tolist()]
        groups = np.array([self._group(e) for e in divided])
        data = np.column_stack([groups[of_key.reshape(-1)], zero_stages])
        least = np.empty((3, len(of)))
        for start in range(0, len(of), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            least[:, part] = least_steps_s(self._with_data(alike.take(of[part]), data[part]).steps)
        return least

    def ends_s(self, experiments: Sequence[Experiment]) -> Floats:
        """The part of `seconds` that follows the work of the last micro-batch, by experiment."""
        seconds: Floats = self._by_layout(experiments, ends_s)[0]
        return seconds

    def _by_layout(
        self, experiments: Sequence[Experiment], of_steps: Callable[[LayoutSteps], Floats], parts: int = 1
    ) -> Floats:
        seconds = np.full((parts, len(experiments)), np.nan)
        for start in range(0, len(experiments), _AT_ONCE):
            part = experiments[start : start + _AT_ONCE]
            known = [at for at, one in enumerate(part) if self.is_known(one)]
            if known:
                seconds[:, [start + at for at in known]] = of_steps(self._parts([part[at] for at in known]).steps)
        return seconds

    def again_s(self, experiment: Experiment, word: str) -> Floats:
        """Seconds that a layer of each kind takes for recomputing with a word, of one micro-batch; the rates must be
        known (`is_known`)."""
        of_word = self._layer(as_held(with_word(experiment, word)))
        assert of_word is not None
        seconds: Floats = of_word.kinds[:, RECOMPUTE:].sum(axis=1)
        return seconds

    def is_known(self, experiment: Experiment) -> bool:
        """Whether the cluster's device has a known rate for the precision."""
        return self._layer(as_held(experiment)) is not None

    def parts(self, experiments: Sequence[Experiment]) -> StepParts:
        """Components of the steps. All experiments must be `is_known` and break no rule of their layout."""
        return self._parts(experiments)

    def model_parallel(self, given: Sequence[Experiment], *, least: bool = False) -> ModelParallel:
        """What the layouts share with others; they must be `is_known`. ``least``: their experts' products add to sums,
        as they do with some ZeRO stages and replicas, which takes no longer than what others do."""
        experiments = [as_held(e) for e in given]
        held = [self._kinds(e) for e in experiments]
        layers = [one for e in experiments if (one := self._layer(e, least or experts_add(e))) is not None]
        numbers, first = np.arange(len(experiments)), dict[Hashable, int]()
        return ModelParallel(
            experiments,
            np.array([(*one.whole, *one.ends) for one in layers]),
            np.concatenate([one.chunks for one in held], axis=1),
            np.concatenate([one.ranks for one in held], axis=1),
            np.repeat(numbers, [one.chunks.shape[1] for one in held]),
            np.repeat(numbers, [one.ranks.shape[1] for one in held]),
            np.concatenate([self._sums(e, one, two) for e, one, two in zip(experiments, held, layers, strict=True)]),
            [
                PipelineShape(e.pp_schedule, e.num_microbatches, e.pp, e.virtual_stages, one.places)
                for e, one in zip(experiments, held, strict=True)
            ],
            np.array([first.setdefault(_DEGREES(e), at) for at, e in enumerate(experiments)]),
        )

    def _parts(self, given: Sequence[Experiment]) -> StepParts:
        alike = self.model_parallel(given)
        data = np.array([(*self._group(e), e.zero_stage) for e in alike.experiments])
        kinds = np.bincount(alike.of_rank).tolist()
        of_matrices = [self._of_matrices_s(e, count) for e, count in zip(given, kinds, strict=True)]
        return self._with_data(alike, data, np.concatenate(of_matrices))

    def _with_data(self, alike: ModelParallel, data: Floats, of_matrices_s: Floats | float = 0.0) -> StepParts:
        """Components of steps. ``data``: the other columns of `setting_of`, by layout; ``of_matrices_s``: what is added
        to the optimizer's seconds, by rank."""
        table = np.concatenate([alike.table, data], axis=1)
        x, of_ranks = setting_of(table[alike.of_chunk], LayerTimes(*alike.sums.T)), setting_of(table[alike.of_rank])
        ranks = HeldLayers(*alike.ranks)
        times, first = chunk_times(x, HeldLayers(*alike.chunks)), starts(alike.of_rank)
        optimizers_s = optimizer_s(of_ranks, ranks) + of_matrices_s
        message, latency, bandwidth = table[:, MESSAGE], table[:, HOP], table[:, HOP + 1]
        splits = np.array([one.schedule in SPLIT_BACKWARD for one in alike.schedules])
        steps = LayoutSteps(
            chunks=times.work(),
            zero_stage=table[alike.of_chunk, -1].astype(np.int64),
            splits=splits[alike.of_chunk].astype(np.int64),
            schedules=alike.schedules,
            first=starts(alike.of_chunk),
            hop_s=self._hops_s(alike.experiments, message, latency + message / bandwidth),
            tied_s=np.maximum.reduceat(tied_s(of_ranks, ranks), first),
            optimizer_s=np.maximum.reduceat(optimizers_s, first),
        )
        return StepParts(times, steps, optimizers_s, latency)

    def _of_matrices_s(self, e: Experiment, kinds: int) -> Floats:
        """Seconds that matrices and copies of heads add to the update of each of the kinds of ranks."""
        update = optimizer_of(e)
        if not update.whole_matrices and not update.keeps_lines and not copies_of_heads(e):
            return np.zeros(kinds)
        stages = [experiment_stages(e)[kind] for kind in dict.fromkeys(ranks_alike(e))]
        return np.array(
            [
                matrix_update_s(e, one, self.cluster)
                + rows_of_operations_s(e, one)
                + copied_heads_s(e, one, self.cluster)
                for one in stages
            ]
        )

    def _sums(self, e: Experiment, held: HeldKinds, times: OfLayers) -> Floats:
        """Sums of the layers' times by chunk, of shape (chunks, fields of `LayerTimes`)."""
        sums: Floats = held.of_kind @ times.kinds
        again: Floats = held.recomputed @ times.kinds[:, RECOMPUTE:]
        for word in set(held.words) - {""}:
            rows = [at for at, one in enumerate(held.words) if one == word]
            of_word = self._layer(with_word(e, word))
            assert of_word is not None  # the device's rates do not depend on recomputation
            again[rows] = held.recomputed[rows] @ of_word.kinds[:, RECOMPUTE:]
        sums[:, RECOMPUTE:] = again
        return sums

    def _layer(self, e: Experiment, adds: bool = False) -> OfLayers | None:
        """Part of a layout's `Setting` that depends on its micro-batch and its split inside a stage. ``adds``: products
        of experts add their weight gradients to sums; the times of layers do not depend on it."""
        word = "" if is_by_stage(e.recompute) else e.recompute
        key = _OF_LAYER(e), e.pp_schedule == "gpipe", _makes_sums(e), word, adds
        if key not in self._layers:
            _make_room(self._layers)
            self._layers[key] = self._new_layer(e, adds)
        return self._layers[key]

    def _new_layer(self, e: Experiment, adds: bool) -> OfLayers | None:
        rates = rates_of(e, self.cluster)
        if rates is None:
            return None
        c = COMPUTE_BYTES[e.precision]
        times = [layer_times(e, self.cluster, rates, kind) for kind in layers_of(e.model).kinds]
        gathered = gathered_bytes(e, c), gathered_bytes(e, c, of_experts=True)
        r = reduced_bytes(e)
        # Adding reads c, and reads and writes r. A product that adds to a sum reads and writes r, not c; one that
        # makes it, in the only micro-batch or in each, reads nothing.
        only = e.num_microbatches == 1
        added, added_experts = added_bytes(c, r, only=only and e.gradient_accumulation_fusion)
        of_sum = (r if _makes_sums(e) else 2 * r) - c
        if e.zero_stage >= 2 and e.gradient_accumulation_fusion:
            of_sum = max(of_sum, added - SAVED_WITH_SHARDS)
        of_head = of_sum if e.gradient_accumulation_fusion else added
        of_dense = added if keeps_low(e) else of_head  # fp8 products cannot add to fp32
        update = optimizer_of(e)
        numbers = (
            e.tp,
            e.ep * e.etp,
            c,
            update.master_bytes,
            r,
            paced_bytes(e),
            added,
            of_head,
            of_dense,
            of_sum if adds else added_experts,
            0 if e.gradient_accumulation_fusion else 4 * r,  # two operations, each reads and writes r
            0 if adds or e.gradient_accumulation_fusion else 4 * r,
            *gathered,
            e.model.tie_embeddings or e.model.mtp_modules > 0,
        )
        message = c * rank_tokens(e)[1] * e.model.hidden_size * e.model.streams
        ends = (*EndTimes.of(e, self.cluster, rates), message)
        return OfLayers((*numbers, rates.memory), np.array(times), ends)

    def _group(self, e: Experiment) -> tuple[float, ...]:
        """Part of a layout's `Setting` that depends on its data parallelism and its pipeline."""
        key = _OF_GROUPS(e), e.zero_stage > 0
        if key not in self._groups:
            _make_room(self._groups)
            self._groups[key] = self._new_group(e)
        return self._groups[key]

    def _new_group(self, e: Experiment) -> tuple[float, ...]:
        def group(size: int, apart: int) -> Group:
            return group_of(size, apart, self.cluster)

        (copies, shards), (expert_copies, expert_shards) = data_degrees(e), expert_degrees(e)
        inner, expert_inner, neighbours = e.tp, e.ep * e.etp, stride(e, "pp")
        routed = e.model.moe is not None
        return (
            *(shards, expert_shards if routed else 1),
            *group(shards, inner),
            *group(copies, inner * shards),
            *(group(expert_shards, expert_inner) if routed else group(1, 1)),
            *(group(expert_copies, expert_inner * expert_shards) if routed else group(1, 1)),
            *(group(2, neighbours * (e.pp - 1)) if e.pp > 1 else group(1, 1)),
            *self._hop(e.pp, neighbours),
            *self._beside((shards, inner), (copies, inner * shards)),
        )

    def _beside(self, sharded: tuple[int, int], copied: tuple[int, int]) -> Contention:
        """`Contention` of the data-parallel groups (size, stride), of shards and of copies, together: the greatest."""
        groups = ((*sharded, False), (*copied, True))
        each = [contention_of(size, apart, self.cluster, reduces=sums) for size, apart, sums in groups if size > 1]
        return Contention(*map(max, zip(*each, strict=True))) if each else Contention()

    def _hop(self, pp: int, apart: int) -> tuple[float, float]:
        """(latency in seconds, bytes per second) of a message from one stage to the next."""
        if pp == 1:
            return 0.0, np.inf
        tier = tier_of_group(pp, apart, self.cluster)
        return tier.latency_s, tier.bandwidth

    def _hops_s(self, experiments: Sequence[Experiment], message: Floats, hop_s: Floats) -> Floats:
        """Seconds of a message between stages by layout: those that a probe has timed, else ``hop_s``."""
        if not isinstance(self.cluster, ProbedCluster):
            return hop_s
        hops = hop_s.copy()
        for at, e in enumerate(experiments):
            # a pair of neighbours that lie in two nodes, if any does
            crosses = e.pp > 1 and members_per_node(e.pp, stride(e, "pp"), self.cluster.domain) < e.pp
            timed = self.cluster.network.seconds("send", float(message[at]), 2, 1) if crosses else None
            hops[at] = hop_s[at] if timed is None else timed
        return hops

    def _kinds(self, e: Experiment) -> HeldKinds:
        every = e.recompute_every if e.recompute != "none" else 1
        key = _OF_STAGES(e), every, e.recompute if is_by_stage(e.recompute) else ""
        if key not in self._held:
            _make_room(self._held)
            self._held[key] = HeldKinds.made(e)
        return self._held[key]


def _divided(e: Experiment, replicas: int) -> Experiment:
    """The layout with so many replicas of ZeRO's shards; 0: without ZeRO, which has no shards."""
    if replicas == 0:
        return e.replace(dp_replicate=e.dp, dp_shard=1, zero_stage=0)
    return e.replace(dp_replicate=replicas, dp_shard=e.dp // replicas, zero_stage=1)


def _makes_sums(e: Experiment) -> bool:
    """Whether products that add gradients make a sum in each micro-batch: in the only one, or with ZeRO 2 and 3, which
    reduce it."""
    return e.num_microbatches == 1 or (e.zero_stage >= 2 and e.gradient_accumulation_fusion)


def _make_room(kept: dict[Hashable, Any]) -> None:
    """Clears a full cache."""
    if len(kept) >= _MOST_KEPT:
        kept.clear()


_OF_LAYER = attrgetter(
    *("model", "tp", "cp", "ep", "etp", "micro_batch_size", "seq_len", "slowest_length", "cp_kind"),
    "sequence_parallel",
    *("precision", "attention", "recurrence", "cuda_graph", "compile", "routing", "routing_imbalance"),
    *("capacity_factor", "documents", "gradient_accumulation_fusion", "engine", "engine_version", *UPDATE_FIELDS),
)
_OF_GROUPS = attrgetter("model.moe", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "pp")
_DEGREES = attrgetter("dp", "cp", "tp", "ep", "etp", "pp")
_OF_STAGES = attrgetter("model", "pp_schedule", "pp", "virtual_stages", "pp_split", "pp_stages", "seq_len")
