"""Memory of the host in closed form: activations that wait there (``activation_offload``), and all that a node needs.

A rank's layers have O bytes of one micro-batch on the host (`workloads.costs.memory.sizes.Part.offloaded`), from the
end of a layer's forward to the beginning of its backward. The engine takes as many pinned buffers as its schedule has
micro-batches in flight, and keeps them:

    host  O times the most micro-batches in flight (chunk by chunk with virtual stages)
    link  2 O m bytes a step, half of them in either direction

The optimizer's part (`workloads.costs.memory.host`) comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence

from workloads.costs.memory.estimate import moments_held
from workloads.costs.memory.host import rank_optimizer_bytes
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import StageParams, experiment_chunks, experiment_stages, part_of_experiment
from workloads.costs.shape.schedule import held_by_chunk
from workloads.spec.experiment import Experiment


def offloaded_of_chunks(e: Experiment, rank: int) -> list[tuple[int, ...]]:
    """Bytes of one micro-batch that each layer of each chunk of a pipeline rank has on the host, from the last layer to
    the first. ``e``: as `as_held` returns it."""

    def of(held: StageParams) -> tuple[int, ...]:
        own = part_of_experiment(e, held)
        return Part.of(own, Shared.of(own), held).offloaded

    return [of(held) for held in experiment_chunks(e)[rank]]


def activation_bytes(experiment: Experiment) -> list[int]:
    """Bytes of the host's memory for activations of each pipeline rank."""
    e = as_held(experiment)
    if e.activation_offload == "none":
        return [0] * e.pp
    return [most_held(e, rank, [sum(chunk) for chunk in offloaded_of_chunks(e, rank)]) for rank in range(e.pp)]


def most_held(e: Experiment, rank: int, of_chunks: Sequence[int]) -> int:
    """Bytes that a pipeline rank holds at most, of so many for one micro-batch of each chunk. ``e``: as `as_held`
    returns it."""
    if e.virtual_stages == 1:
        return int(max(in_flight for in_flight, _ in moments_held(e, rank))) * of_chunks[0]
    backwards = held_by_chunk(e.pp_schedule, rank, e.pp, e.num_microbatches, e.virtual_stages)
    moments = [held.activations for of_chunk in backwards for one in of_chunk for held in one.held]
    return max(sum(count * size for count, size in zip(held, of_chunks, strict=True)) for held in moments)


def link_bytes(experiment: Experiment) -> int:
    """Bytes of activations that cross the link to the host in one step, in both directions, on the rank with most."""
    e = as_held(experiment)
    if e.activation_offload == "none":
        return 0
    most = max(sum(sum(chunk) for chunk in offloaded_of_chunks(e, rank)) for rank in range(e.pp))
    return 2 * e.num_microbatches * most


def rank_host_bytes(experiment: Experiment) -> int:
    """Bytes of the host's memory for the pipeline rank that needs most, for its optimizer and its activations."""
    e = as_held(experiment)
    optimizers = [rank_optimizer_bytes(e, held) for held in experiment_stages(e)]
    return max(map(sum, zip(optimizers, activation_bytes(experiment), strict=True)))


def node_host_bytes(experiment: Experiment, devices_per_node: int) -> int:
    """Bytes of the memory of one node, if every rank on it needs as much as the one that needs most."""
    if not experiment.optimizer_offload and experiment.activation_offload == "none":
        return 0
    return rank_host_bytes(experiment) * min(devices_per_node, experiment.world_size)
