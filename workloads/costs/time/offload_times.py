"""Seconds that copies of activations to the host and back add to a step (``activation_offload``).

A layer has o bytes on the host and takes f seconds forward and b backward, of one micro-batch on one rank. As in
`workloads.engine.training.activation_offload`, a layer's copy runs beside the work of one other layer:

    forward    down: max(0, o / link - f), the copy of a layer beside the next one
    backward   up:   max(0, o / link - b), the copy of a layer beside the backward of the one after it

Copies also slow what runs beside them (`SLOWED`). Nothing of its chunk runs beside the last layer's copy back: it is
exposed as a whole, unless it stays on the device.
Copies have the link's rate in one direction alone, because a rank is in a forward or in a backward. An optimizer on
the host (`workloads.costs.time.host_update`) uses the link after the last backward, so the two do not share it. A step
takes longer by what the rank with the longest waits waits, in each micro-batch and in the ``(pp - 1) / v`` rounds in
which the pipeline fills and drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workloads.costs.memory.host_activations import offloaded_of_chunks
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import experiment_layers, recompute_by_layer, with_word
from workloads.costs.shape.schedule import stage_at
from workloads.costs.time.layer_times import layer_times, rates_of
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of

SLOWED = 0.26
"""Seconds by which a second of copies to or from the host slows the layers beside it: Llama 8B, dp 2, ZeRO 3, 4 x 4,096
tokens, 10.4 GB a device and direction, which take 0.19 s each and fit beside the layers; the step took 1.556 s instead
of 1.456 (two H200, results/recorded/h200x2_budgets/NOTE.md)."""


class Waits(NamedTuple):
    """Seconds that compute waits for copies, or is slowed by them, in one micro-batch of one chunk."""

    forward_s: float
    backward_s: float


LayerSeconds = tuple[float, float]
"""Seconds of one micro-batch in a layer, forward and backward, with what of messages is exposed."""


def seconds_of_layers(experiment: Experiment, cluster: ClusterSpec) -> list[list[list[LayerSeconds]]] | None:
    """`LayerSeconds` of the layers of each chunk of each pipeline rank, from the last layer to the first; None if the
    rates of the device are not known."""
    e = as_held(experiment)
    rates = rates_of(e, cluster)
    if rates is None:
        return None
    kinds, words, stages = layers_of(e.model), recompute_by_layer(e), experiment_layers(e)
    seconds: dict[tuple[int, str], LayerSeconds] = {}
    for kind, word in set(zip(kinds.order, words, strict=True)):
        one = layer_times(with_word(e, word), cluster, rates, kinds.kinds[kind])
        backward = one.backward_s + one.backward_exposed_s + one.recompute_s + one.recompute_exposed_s
        seconds[kind, word] = one.forward_s + one.forward_exposed_s, backward
    return [
        [
            [
                seconds[kinds.order[layer], words[layer]]
                for layer in reversed(stages[stage_at(e.pp_schedule, rank, chunk, e.pp)])
            ]
            for chunk in range(e.virtual_stages)
        ]
        for rank in range(e.pp)
    ]


def waits_of_chunks(experiment: Experiment, cluster: ClusterSpec) -> list[list[Waits]] | None:
    """By pipeline rank, the waits of its chunks; None if the rate of the link or of the device is not known."""
    e = as_held(experiment)
    if e.activation_offload == "none":
        return [[Waits(0.0, 0.0)] * e.virtual_stages] * e.pp
    seconds, link = seconds_of_layers(e, cluster), cluster.host.one_way_bandwidth
    if seconds is None or link is None:
        return None
    return [
        [waits_of(*both, link) for both in zip(seconds[rank], offloaded_of_chunks(e, rank), strict=True)]
        for rank in range(e.pp)
    ]


def waits_of(layers: Sequence[LayerSeconds], offloaded: Sequence[int], link: float) -> Waits:
    """The waits of a chunk with these layers and bytes on the host, from its last layer to its first."""
    forward = backward = 0.0
    for place, ((forward_s, backward_s), size) in enumerate(zip(layers, offloaded, strict=True)):
        copy = size / link
        forward += max(0.0, copy - forward_s) + SLOWED * min(copy, forward_s)
        backward += max(0.0, copy - backward_s) + SLOWED * min(copy, backward_s) if place else copy
    return Waits(forward, backward)


def added_by_offload(experiment: Experiment, cluster: ClusterSpec) -> float | None:
    """Seconds that a step takes longer: 0 without offload, None if they are not known."""
    waits = waits_of_chunks(experiment, cluster)
    if waits is None:
        return None
    return rounds_of(experiment) * max(sum(sum(chunk) for chunk in rank) for rank in waits)


def rounds_of(experiment: Experiment) -> float:
    """Number of micro-batches whose waits a step counts: all, and those in which the pipeline fills and drains."""
    return experiment.num_microbatches + (experiment.pp - 1) / experiment.virtual_stages
