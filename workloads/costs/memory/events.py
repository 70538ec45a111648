"""Memory of a rank as events: what tensors an action of the schedule allocates and frees, unit by unit.

A step is a unit's turn in an action (the head's forward, a layer's backward, the reduction of its gradients) and says
how large the tensors are that change in it: a tensor that grows is allocated, one that shrinks is freed. All others
stay. Within a step what is freed goes first, so that a rank peaks at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = range(4)


class Tensor(NamedTuple):
    """A tensor, or a group of tensors that come and go together."""

    category: int
    name: str
    made_in: str
    """Where the engine makes it, below ``workloads/engine``."""


TENSORS: Mapping[str, Tensor] = {
    "master": Tensor(PARAMETERS, "master weights", "training/data_parallel.py apply_data_parallel"),
    "weights": Tensor(PARAMETERS, "gathered weights", "training/data_parallel.py apply_data_parallel"),
    "other_weights": Tensor(PARAMETERS, "other chunks' gathered weights", "training/data_parallel.py GradientSync"),
    "gradients": Tensor(GRADIENTS, "gradients, reduced or accumulated", "training/data_parallel.py GradientSync"),
    "other_gradients": Tensor(GRADIENTS, "other chunks' gradients", "training/data_parallel.py GradientSync"),
    "of_experts": Tensor(GRADIENTS, "gradients of a layer's experts", "ops/grouped_linear.py"),
    "of_tied": Tensor(GRADIENTS, "tied weight's gradient from the head", "ops/linear_cross_entropy.py"),
    "of_last": Tensor(
        GRADIENTS, "gradient of the embedding or the last unit", "training/data_parallel.py GradientSync"
    ),
    "optimizer": Tensor(OPTIMIZER, "optimizer's state", "training/optimizer.py"),
    "updating": Tensor(ACTIVATIONS, "matrices of an update", "training/muon.py Muon._gathered"),
    "inputs": Tensor(ACTIVATIONS, "token ids, targets and RoPE tables", "training/data.py"),
    "shared": Tensor(ACTIVATIONS, "memory shared by tensor-parallel ranks", "collectives/peer_memory.py PeerMemory"),
    "others": Tensor(ACTIVATIONS, "saved by other micro-batches", "training/pipeline.py _Step.held"),
    "deferred": Tensor(ACTIVATIONS, "held by other micro-batches or chunks", "ops/linear.py DeferredGradients"),
    "saved": Tensor(ACTIVATIONS, "saved by this micro-batch", "layers/block.py Block.forward"),
    "leaving": Tensor(ACTIVATIONS, "on their way to the host", "training/activation_offload.py ActivationStore.launch"),
    "fetched": Tensor(ACTIVATIONS, "back from the host", "training/activation_offload.py ActivationStore.fetch"),
    "documents": Tensor(ACTIVATIONS, "tables and masks of packed documents", "layers/transformer.py Chunk.forward"),
    "left": Tensor(ACTIVATIONS, "kept for its weight gradients", "ops/linear.py DeferredGradients"),
    "working": Tensor(ACTIVATIONS, "recomputed tensors, gradients of a layer", "layers/recompute.py"),
    "loss": Tensor(ACTIVATIONS, "logits and gradients of the loss", "ops/linear_cross_entropy.py"),
    "stream": Tensor(ACTIVATIONS, "gradient of the residual stream", "layers/block.py Block.forward"),
    "received": Tensor(ACTIVATIONS, "gradient received from the next stage", "training/messages.py Messages.take"),
    "end_gradient": Tensor(ACTIVATIONS, "gradient of an end, not yet reduced", "ops/linear_cross_entropy.py"),
    "gathering": Tensor(ACTIVATIONS, "FSDP's buffer to gather a unit", "training/data_parallel.py apply_data_parallel"),
    "flat": Tensor(ACTIVATIONS, "flat copy or sums to reduce", "training/gradient_memory.py InMemoryOfActivations"),
    "reducing": Tensor(ACTIVATIONS, "gradients being reduced", "ops/linear.py"),
    "new_shard": Tensor(ACTIVATIONS, "new shard, to be added", "training/gradient_memory.py InMemoryOfActivations"),
    "other_flat": Tensor(ACTIVATIONS, "other chunks' flat copies", "training/gradient_memory.py InMemoryOfActivations"),
}
"""Every tensor of a step by its key."""

Live = dict[str, int]
"""Bytes of tensors by key."""
Step = tuple[str, Live]
"""A unit's turn, and the new bytes of the tensors that change in it."""


class Timeline(NamedTuple):
    """Steps of one action, for one micro-batch."""

    action: str
    start: Live
    """What exists when it starts."""
    steps: list[Step]


class Event(NamedTuple):
    """An allocation or a free."""

    step: int
    """Number of the step in its timeline; -1 for what exists at the start."""
    unit: str
    tensor: str
    """Key in `TENSORS`."""
    bytes: int
    """What is allocated; negative if it is freed."""
    total: int
    """What exists afterwards."""


def highest(timelines: Iterable[Timeline]) -> tuple[int, int, int]:
    """(timeline, step, bytes) of the first of the highest steps."""
    most = at = place = -1
    for number, (_, start, steps) in enumerate(timelines):
        live = start.copy()
        for count, (_, changes) in enumerate(steps):
            live.update(changes)
            total = sum(live.values())
            if total > most:
                most, at, place = total, number, count
    return at, place, most


def live_at(timeline: Timeline, place: int) -> Live:
    """Bytes of every tensor at the end of a step."""
    live = timeline.start.copy()
    for _, changes in timeline.steps[: place + 1]:
        live.update(changes)
    return live


def by_category(live: Live) -> list[int]:
    """Bytes by category."""
    result = [0, 0, 0, 0]
    for key, size in live.items():
        result[TENSORS[key].category] += size
    return result


def events_of(timeline: Timeline) -> list[Event]:
    """Allocations and frees of an action, in order. What exists when it starts comes first."""
    live: Live = {}
    total, events = 0, []
    for step, (unit, changes) in enumerate([("at its start", timeline.start), *timeline.steps], -1):
        differences = [(key, size - live.get(key, 0)) for key, size in changes.items()]
        for key, change in sorted(differences, key=lambda one: one[1] > 0):
            if change:
                total += change
                events.append(Event(step, unit, key, change, total))
        live.update(changes)
    return events
