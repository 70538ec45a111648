"""Seconds of one micro-batch in chunks of pipeline ranks, and of once-per-step work of ranks, for many at one time.

`workloads.costs.time.timeline` states the assumptions; `workloads.costs.time.layer_times` has the times of a layer.
Every array has one entry per chunk, or per rank, of the layouts in question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from workloads.costs.memory.activations import rank_tokens
from workloads.costs.shape.params import COMPUTE_BYTES
from workloads.costs.shape.partition import StageParams
from workloads.costs.time.step_simulation import ChunkWork
from workloads.costs.traffic.collectives import Collective, Contention, Group, collective_time_s
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Rates(NamedTuple):
    matmul: float
    """FLOP/s of the blocks' matrix products."""
    head: float
    """FLOP/s of the head's matrix products, which stay in bf16 in fp8 runs."""
    attention: float
    memory: float
    """Bytes per second."""


class LayerTimes(NamedTuple):
    """Seconds of one layer and one micro-batch on one rank; arrays in a `Setting`."""

    forward_s: float
    backward_s: float
    """Backward without recomputation."""
    weight_s: float
    """Part of ``backward_s`` for weight gradients of matmuls."""
    forward_exposed_s: float
    backward_exposed_s: float
    recompute_s: float
    """Recomputation, if the layer is recomputed."""
    recompute_exposed_s: float


class EndTimes(NamedTuple):
    """Seconds of embedding and head for one micro-batch."""

    head_forward_s: float
    head_backward_s: float
    exposed_s: float
    """The vocabulary-parallel collective on either end, forward or backward."""

    @classmethod
    def of(cls, e: Experiment, cluster: ClusterSpec, rates: Rates) -> EndTimes:
        """Times at these rates. The forward computes the gradients too (three products); under GPipe the backward
        computes them, and the logits again."""
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens = rank_tokens(e)[0]
        product = 2.0 * tokens * model.vocab_size * model.hidden_size / e.tp / rates.head
        forward, backward = (1, 3) if e.pp_schedule == "gpipe" else (3, 0)
        op: Collective = "all_gather" if e.sequence_parallel else "all_reduce"
        exposed = collective_time_s(op, float(c * tokens * model.hidden_size), e.tp, 1, cluster)
        return cls(forward * product, backward * product, exposed)


class HeldLayers(NamedTuple):
    """`StageParams` of chunks or ranks, as arrays."""

    layers: Ints
    """Number of all layers."""
    split: Ints
    replicated: Ints
    experts: Ints
    """``split``, ``replicated``, ``experts``: parameters of all layers (`workloads.costs.shape.params.Counts`)."""
    embedding: Ints
    head: Ints
    has_head: Ints
    final_norm: Ints

    @classmethod
    def of(cls, stages: Sequence[StageParams]) -> HeldLayers:
        rows = [
            (
                *(s.num_layers, s.layers.split, s.layers.replicated, s.layers.experts),
                *(s.embedding, s.head, s.has_head, s.final_norm),
            )
            for s in stages
        ]
        return cls(*np.array(rows, dtype=np.int64).T)


class Setting(NamedTuple):
    """All other inputs of a chunk's times, which its layout determines; arrays as in `HeldLayers`."""

    tp: Ints
    expert_ranks: Ints
    """Number of ranks that split one copy of the experts' weights: ``ep etp``."""
    compute_bytes: Ints
    master_bytes: Ints
    reduced_bytes: Ints
    """Bytes per gradient in sums over micro-batches and in reductions."""
    update_bytes: Ints
    """Bytes that memory moves while one parameter is updated (`workloads.costs.time.update_pace`)."""
    accumulated_bytes: Ints
    """Bytes read and written per element of a gradient that is added to others, or copied for a reduction."""
    accumulated_head_bytes: Ints
    """The same of the head, whose product may add to the sum itself."""
    accumulated_dense_bytes: Ints
    """The same of the layers' products outside routed experts."""
    accumulated_expert_bytes: Ints
    """The same of routed experts."""
    unscattered_bytes: Ints
    """Bytes read and written once a step per element of a gradient that is on one shard: FSDP2 divides it by its factor
    and copies the result to where a reduce-scatter would have written it (``foreach_reduce``)."""
    unscattered_expert_bytes: Ints
    """The same of routed experts."""
    gathered_bytes: Ints
    """Bytes per element of a block's matrices when gathered."""
    gathered_expert_bytes: Ints
    copied: Ints
    """1 if the first and the last of several stages both train the embedding."""
    shards: Ints
    expert_shards: Ints
    memory: Floats
    """B/s."""
    layers: LayerTimes
    """Sums over the layers of a chunk; recomputation counts for those that are recomputed."""
    ends: EndTimes
    of_shards: Group
    """Ranks that share one copy of the master weights."""
    of_replicas: Group
    """Ranks with the same shard of different copies."""
    of_expert_shards: Group
    of_expert_replicas: Group
    of_ends: Group
    """The first and the last rank of a pipeline."""
    beside: Contention
    """Of compute and data-parallel traffic."""
    zero_stage: Ints


class ChunkTimes(NamedTuple):
    """Seconds of one micro-batch of one stage, without those that data parallelism adds."""

    forward_s: Floats
    backward_s: Floats
    forward_exposed_s: Floats
    backward_exposed_s: Floats
    weight_s: Floats
    """Part of ``backward_s`` in W if the backward is split."""
    units: Ints
    """Number of units whose weights are gathered, and gradients reduced, one after another."""
    gather_s: Floats
    """Gathering all units' weights once."""
    scatter_s: Floats
    """Reduce-scattering all units' gradients once."""
    replicas_s: Floats
    """All-reducing gradient shards over replicas once."""
    compute_beside: Floats
    traffic_beside: Floats
    """``compute_beside``, ``traffic_beside``: `Contention` of compute and data-parallel traffic."""
    copied_s: Floats
    """Copying gathered weights, once a step (`gathered_copies_s`)."""
    unscattered_s: Floats
    """Copying gradients that are not scattered, once a step."""

    def work(self) -> ChunkWork:
        """Input of `workloads.costs.time.step_simulation`."""
        forward, backward = self.forward_s + self.forward_exposed_s, self.backward_s + self.backward_exposed_s
        inputs, sharding = backward - self.weight_s, (self.units, self.gather_s, self.scatter_s, self.replicas_s)
        beside, once = (self.compute_beside, self.traffic_beside), (self.copied_s, self.unscattered_s)
        return ChunkWork(forward, backward, inputs, self.weight_s, *sharding, *beside, *once)


def chunk_times(x: Setting, held: HeldLayers) -> ChunkTimes:
    r = x.reduced_bytes
    params, experts = _held_params(x, held)

    head, dense = held.head // x.tp, held.split // x.tp
    moved = x.accumulated_bytes * (params - head - dense - experts) + x.accumulated_expert_bytes * experts
    moved += x.accumulated_head_bytes * head + x.accumulated_dense_bytes * dense
    accumulating = moved / x.memory
    weight = x.layers.weight_s + accumulating
    has_head = held.has_head.astype(np.float64)
    forward = x.layers.forward_s + has_head * x.ends.head_forward_s
    backward = x.layers.backward_s + accumulating + x.layers.recompute_s + has_head * x.ends.head_backward_s
    backward_exposed = x.layers.backward_exposed_s + x.layers.recompute_exposed_s
    edges = x.ends.exposed_s * ((held.embedding > 0).astype(np.float64) + has_head)

    rest, routed = params - experts, experts > 0
    gather = x.of_shards.scattered_s(rest * x.gathered_bytes)
    gather += np.where(routed, x.of_expert_shards.scattered_s(experts * x.gathered_expert_bytes), 0.0)
    scatter = x.of_shards.scattered_s(r * rest)
    scatter += np.where(routed, x.of_expert_shards.scattered_s(r * experts), 0.0)
    replicas = x.of_replicas.reduced_s(r * rest // x.shards, np.minimum)
    of_experts = x.of_expert_replicas.reduced_s(r * experts // x.expert_shards, np.minimum)
    copied = gathered_copies_s(x, held)
    every, once = copied * (x.zero_stage == 3), copied * (x.zero_stage < 3)
    forward, backward = forward + every, backward + every
    unscattered = np.where(x.shards == 1, rest * x.unscattered_bytes, 0)
    unscattered += np.where(x.expert_shards == 1, experts * x.unscattered_expert_bytes, 0)
    return ChunkTimes(
        forward,
        backward,
        x.layers.forward_exposed_s + edges,
        backward_exposed + edges,
        weight,
        np.maximum(1, held.layers),
        gather,
        scatter,
        replicas + np.where(routed, of_experts, 0.0),
        *x.beside,
        once,
        unscattered / x.memory,
    )


def optimizer_s(x: Setting, held: HeldLayers) -> Floats:
    """Seconds by rank in which memory moves the update of the shard of master weights
    (`workloads.spec.updates.optimizer`)."""
    params, experts = _held_params(x, held)
    moved = (params - experts) // x.shards * x.update_bytes + experts // x.expert_shards * x.update_bytes
    seconds: Floats = moved / x.memory
    return seconds


def gathered_copies_s(x: Setting, held: HeldLayers) -> Floats:
    """Seconds in which memory copies weights while they are gathered once: a rank's shard is cast into the message, in
    a format below 16 bits after a pass for its scales, and the message is copied to where products read it. This is
    compute's own work, which follows the message (``foreach_all_gather_copy_out`` of FSDP2)."""
    params, experts = _held_params(x, held)
    moved = _copied_bytes(x, params - experts, x.shards, x.gathered_bytes)
    seconds: Floats = (moved + _copied_bytes(x, experts, x.expert_shards, x.gathered_expert_bytes)) / x.memory
    return seconds


def _copied_bytes(x: Setting, elements: Ints, shards: Ints, gathered: Ints) -> Ints:
    scaled = np.where(gathered < x.compute_bytes, x.master_bytes, 0)
    moved: Ints = elements // shards * (x.master_bytes + gathered + scaled) + 2 * gathered * elements
    return moved


def tied_s(x: Setting, held: HeldLayers) -> Floats:
    """Seconds by rank for summing the two copies of an embedding over the first and the last stage."""
    copied = (x.copied > 0) & (held.has_head > 0)
    elements = np.maximum(held.embedding, held.head)
    return np.where(copied, x.of_ends.reduced_s(x.master_bytes * elements / x.tp / x.shards, np.minimum), 0.0)


def _held_params(x: Setting, held: HeldLayers) -> tuple[Ints, Ints]:
    """(all, experts): parameters on one rank of a stage, or of all its stages."""
    experts = held.experts // x.expert_ranks
    layers = held.split // x.tp + held.replicated + experts
    return layers + (held.embedding + held.head) // x.tp + held.final_norm, experts
