"""Seconds of one micro-batch in each chunk of a pipeline rank, and of what a rank does once a step.

`workloads.costs.timeline` says how the parts are taken, and has what a layer takes.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.cluster import ClusterSpec
from workloads.costs.activations import rank_tokens
from workloads.costs.collectives import Collective, collective_time_s
from workloads.costs.fp8 import gathered_bytes
from workloads.costs.memory import parameter_shard_bytes
from workloads.costs.params import COMPUTE_BYTES, MASTER_BYTES, local_params
from workloads.costs.partition import StageParams
from workloads.experiment import Experiment
from workloads.mesh import data_degrees, expert_degrees, stride

OPTIMIZER_PASSES = 10
"""How often each master-sized value is read or written: norm 1 read, clipping 1 read and 1 write, AdamW 4 reads
(weight, gradient, two moments) and 3 writes."""


class Rates(NamedTuple):
    matmul: float
    """FLOP/s of the blocks' matrix products."""
    head: float
    """FLOP/s of the head's, which stay in bf16 in fp8 runs."""
    attention: float
    memory: float
    """Bytes per second."""


class LayerTimes(NamedTuple):
    """One layer and one micro-batch on one rank, in seconds."""

    forward_s: float
    backward_s: float
    """Without recomputation."""
    weight_s: float
    """Of that, the weights' gradients of matmuls."""
    forward_exposed_s: float
    backward_exposed_s: float
    again_s: float
    """Recomputation, where the layer is recomputed."""
    again_exposed_s: float


class EndTimes(NamedTuple):
    """Embedding and head, one micro-batch, in seconds."""

    head_forward_s: float
    head_backward_s: float
    exposed_s: float
    """The vocabulary-parallel collective on either end, forward or backward."""

    @classmethod
    def of(cls, e: Experiment, cluster: ClusterSpec, rates: Rates) -> EndTimes:
        """Gradients are computed in the forward (three products); under GPipe in its backward, logits again."""
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens = rank_tokens(e)[0]
        product = 2.0 * tokens * model.vocab_size * model.hidden_size / e.tp / rates.head
        forward, backward = (1, 3) if e.pp_schedule == "gpipe" else (3, 0)
        op: Collective = "all_gather" if e.sequence_parallel else "all_reduce"
        exposed = collective_time_s(op, float(c * tokens * model.hidden_size), e.tp, 1, cluster)
        return cls(forward * product, backward * product, exposed)


class ChunkTimes(NamedTuple):
    """One micro-batch of one stage, in seconds."""

    forward_s: float
    backward_s: float
    forward_exposed_s: float
    backward_exposed_s: float
    weight_s: float
    """Of ``backward_s`` and ``backward_exposed_s``, what W has where a backward is split."""


class RankTimes(NamedTuple):
    """One pipeline rank: its stages, and what happens once a step, in seconds."""

    chunks: tuple[ChunkTimes, ...]
    busy_s: float
    """Of one micro-batch in all chunks."""
    once_exposed_s: float
    optimizer_s: float


def _held_params(e: Experiment, held: StageParams) -> tuple[int, int]:
    """Parameters on one rank of a stage or of all its stages: (all, experts)."""
    layers, experts = local_params(e, held.layers)
    return layers + experts + (held.embedding + held.head) // e.tp + held.final_norm, experts


def _sharding_s(e: Experiment, cluster: ClusterSpec, held: StageParams) -> tuple[float, float]:
    """Gathering weights and scattering gradients over the ranks that share master weights, experts over theirs."""
    c, g = COMPUTE_BYTES[e.precision], MASTER_BYTES[e.precision]
    params, experts = _held_params(e, held)
    parts = [(params - experts, gathered_bytes(e, c), data_degrees(e)[1], e.tp)]
    if experts:
        parts.append((experts, gathered_bytes(e, c, of_experts=True), expert_degrees(e)[1], e.ep * e.etp))
    gather = sum(
        collective_time_s("all_gather", one * size, shards, apart, cluster) for size, one, shards, apart in parts
    )
    return gather, sum(
        collective_time_s("reduce_scatter", g * size, shards, apart, cluster) for size, _, shards, apart in parts
    )


def _replicas_s(e: Experiment, cluster: ClusterSpec, held: StageParams) -> float:
    """Summing shards of gradients over the replicas of the master weights, experts over theirs."""
    g = MASTER_BYTES[e.precision]
    params, experts = _held_params(e, held)
    copies, shards = data_degrees(e)
    total = collective_time_s("all_reduce", g * (params - experts) // shards, copies, e.tp * shards, cluster)
    if experts:
        copies, shards = expert_degrees(e)
        total += collective_time_s("all_reduce", g * experts // shards, copies, e.ep * e.etp * shards, cluster)
    return total


def chunk_times(
    e: Experiment,
    cluster: ClusterSpec,
    rates: Rates,
    held: StageParams,
    dense: LayerTimes,
    moe: LayerTimes,
    ends: EndTimes,
) -> ChunkTimes:
    c, g = COMPUTE_BYTES[e.precision], MASTER_BYTES[e.precision]
    d, r = held.dense_layers, held.moe_layers
    params, _ = _held_params(e, held)

    forward = d * dense.forward_s + r * moe.forward_s
    # Adding a gradient to what earlier micro-batches left, or copying it for reduction: read c, read and write g.
    accumulating = (c + 2 * g) * params / rates.memory
    backward = d * dense.backward_s + r * moe.backward_s + accumulating
    backward += held.dense_recomputed * dense.again_s + held.moe_recomputed * moe.again_s
    weight = d * dense.weight_s + r * moe.weight_s + accumulating
    forward_exposed = d * dense.forward_exposed_s + r * moe.forward_exposed_s
    backward_exposed = d * dense.backward_exposed_s + r * moe.backward_exposed_s
    backward_exposed += held.dense_recomputed * dense.again_exposed_s + held.moe_recomputed * moe.again_exposed_s
    if held.has_head:
        forward, backward = forward + ends.head_forward_s, backward + ends.head_backward_s
    edges = ends.exposed_s * ((held.embedding > 0) + held.has_head)

    if e.zero_stage >= 2:
        gather, scatter = _sharding_s(e, cluster, held)
        if e.zero_stage == 3:
            forward_exposed += max(0.0, gather - forward) + gather / max(1, held.num_layers)
            both = gather + scatter
            left = max(0.0, both - backward)
            weight += left * scatter / both if left else 0.0
        else:
            left = max(0.0, scatter - backward)
            weight += left
        backward_exposed += left
    return ChunkTimes(forward, backward, forward_exposed + edges, backward_exposed + edges, weight)


def rank_times(
    e: Experiment, cluster: ClusterSpec, rates: Rates, held: StageParams, chunks: tuple[ChunkTimes, ...]
) -> RankTimes:
    c, g = COMPUTE_BYTES[e.precision], MASTER_BYTES[e.precision]
    params, experts = _held_params(e, held)
    shard_bytes = parameter_shard_bytes(e, params - experts, experts)
    forward = backward = exposed = 0.0
    for chunk in chunks:
        forward, backward = forward + chunk.forward_s, backward + chunk.backward_s
        exposed += chunk.forward_exposed_s + chunk.backward_exposed_s
    unit = max(1, held.num_layers)
    gather, scatter = _sharding_s(e, cluster, held)
    replicas = _replicas_s(e, cluster, held)
    once = 0.0
    if e.zero_stage < 3:
        once += max(0.0, gather - forward) + gather / unit
    last = replicas + (scatter if e.zero_stage <= 1 else 0.0)
    once += max(0.0, last - backward) + (scatter + replicas) / unit
    once += _tied_s(e, cluster, held, g)
    return RankTimes(
        chunks=chunks,
        busy_s=forward + backward + exposed,
        once_exposed_s=once,
        optimizer_s=(OPTIMIZER_PASSES + 1 + c / g) * shard_bytes / rates.memory,  # and casting the new weights
    )


def _tied_s(e: Experiment, cluster: ClusterSpec, held: StageParams, g: int) -> float:
    """Summing the two copies of a tied embedding over the first and the last stage."""
    if not e.model.tie_embeddings or e.pp == 1 or not held.has_head or held.head == 0:
        return 0.0
    distance = stride(e, "pp") * (e.pp - 1)
    return collective_time_s("all_reduce", g * held.head / e.tp / data_degrees(e)[1], 2, distance, cluster)
