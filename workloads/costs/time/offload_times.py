"""Seconds that copies of activations to the host and back add to a step (``activation_offload``).

A layer has o bytes on the host, whose copies take c = o / link seconds, and computes f seconds forward and b
backward, of one micro-batch on one rank. As in `workloads.engine.training.activation_offload`, a layer's copy runs
beside the work of one other layer. Each slows the other, and the longer one paces both (s: `SLOWED`, in captured steps
`SLOWED_IN_GRAPHS`):

    forward    down: max(COPIES_BESIDE c, f + s c), the copy of a layer beside the next one
    backward   up:   max(COPIES_BESIDE c, b + s c), the copy of a layer beside the backward of the one after it

Under ZeRO 2 and 3 the gather of another layer's weights and the reduction of its gradients run beside both, on another
link and another stream. With g seconds of them a layer lasts ``f | g``, the longer of compute and traffic, both slowed
by the other (`workloads.costs.traffic.collectives.together_s`, as in `workloads.costs.time.step_simulation`). Copies
delay compute alone: they add what the above, slowed as well, exceeds ``f | g`` by, which is nothing where gathers and
reductions take longest. Nothing of its chunk runs beside the last layer's copy back except the gather of its weights:
the rest is exposed, unless the layer stays on the device.

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
from workloads.costs.time.rank_times import ChunkTimes
from workloads.costs.time.step_simulation import Most, Seconds
from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.collectives import Contention, slowed_s, together_s
from workloads.rules.captured_steps import is_captured
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of

SLOWED = 0.26
"""Seconds by which a second of copies to or from the host slows the layers beside it in eager steps: Llama 8B, dp 2,
ZeRO 3, 4 x 4,096 tokens, 10.4 GB a device and direction, which take 0.19 s each and fit beside the layers; the step
took 1.556 s instead of 1.456 (two H200, results/recorded/h200x2_budgets/NOTE.md)."""
SLOWED_IN_GRAPHS = 0.05
"""The same in captured steps, from the time of forward and backward in four rows whose copies fit beside the layers: 8
layers of Llama 8B 0.03, 0.07 and (cp 2) 0.00, Llama 3B 0.06 (H200, results/recorded/h200x1_streamed, h200x2_streamed).
Why eager copies slow more is not measured."""
COPIES_BESIDE = 1.07
"""How much longer copies take beside layers than alone (in a probe): six captured rows whose copies take longer than
their layers, 1.066 to 1.087 (Llama 1B, SmolLM 1.7B and 8 layers of Llama 8B with all activations on the host, the same
two folders and h200x1_streamed_again)."""


class Waits(NamedTuple):
    """Seconds that compute waits for copies, or is slowed by them, in one micro-batch of one chunk."""

    forward_s: float
    backward_s: float


class LayerSeconds(NamedTuple):
    """Seconds of one micro-batch in a layer."""

    forward_s: float
    backward_s: float
    """``forward_s``, ``backward_s``: compute, with what of messages inside the layer is exposed."""
    gather_s: float
    reduce_s: float
    """``gather_s``, ``reduce_s``: gather of its weights, reduction of its gradients, if every micro-batch has one."""
    compute_beside: float
    traffic_beside: float
    """``compute_beside``, ``traffic_beside``: `Contention` of compute with these."""


def seconds_of_layers(experiment: Experiment, cluster: ClusterSpec) -> list[list[list[LayerSeconds]]] | None:
    """`LayerSeconds` of the layers of each chunk of each pipeline rank, from the last layer to the first; None if the
    rates of the device are not known."""
    e = as_held(experiment)
    rates = rates_of(e, cluster)
    if rates is None:
        return None
    kinds, words, stages = layers_of(e.model), recompute_by_layer(e), experiment_layers(e)
    computed: dict[tuple[int, str], tuple[float, float]] = {}
    for kind, word in set(zip(kinds.order, words, strict=True)):
        one = layer_times(with_word(e, word), cluster, rates, kinds.kinds[kind])
        backward = one.backward_s + one.backward_exposed_s + one.recompute_s + one.recompute_exposed_s
        computed[kind, word] = one.forward_s + one.forward_exposed_s, backward
    traffic = _traffic_of_chunks(e, cluster)
    return [
        [
            [
                LayerSeconds(*computed[kinds.order[layer], words[layer]], *traffic[rank][chunk])
                for layer in reversed(stages[stage_at(e.pp_schedule, rank, chunk, e.pp)])
            ]
            for chunk in range(e.virtual_stages)
        ]
        for rank in range(e.pp)
    ]


def _traffic_of_chunks(e: Experiment, cluster: ClusterSpec) -> list[list[tuple[float, float, float, float]]]:
    """The fields of `LayerSeconds` about data-parallel traffic, of a layer of each chunk of each pipeline rank."""
    v = e.virtual_stages
    if e.zero_stage < 2:
        return [[(0.0, 0.0, *Contention())] * v] * e.pp
    parts, found = StepTimes(cluster).parts([e]), []
    for place in parts.steps.schedules[0].places.tolist():
        one = ChunkTimes(*(column[place] for column in parts.times))
        gather, reduce = (float(seconds / one.units) for seconds in (one.gather_s, one.scatter_s))
        beside = float(one.compute_beside), float(one.traffic_beside)
        found.append((gather if e.zero_stage == 3 else 0.0, reduce, *beside))
    return [found[start : start + v] for start in range(0, len(found), v)]


def waits_of_chunks(experiment: Experiment, cluster: ClusterSpec) -> list[list[Waits]] | None:
    """By pipeline rank, the waits of its chunks; None if the rate of the link or of the device is not known."""
    e = as_held(experiment)
    if e.activation_offload == "none":
        return [[Waits(0.0, 0.0)] * e.virtual_stages] * e.pp
    seconds, link = seconds_of_layers(e, cluster), cluster.host.one_way_bandwidth
    if seconds is None or link is None:
        return None
    slowed = slowed_of(e, cluster)
    return [
        [waits_of(*both, link, slowed) for both in zip(seconds[rank], offloaded_of_chunks(e, rank), strict=True)]
        for rank in range(e.pp)
    ]


def slowed_of(experiment: Experiment, cluster: ClusterSpec) -> float:
    """Seconds by which a second of copies slows the layers beside it."""
    return SLOWED_IN_GRAPHS if is_captured(experiment, cluster.backend) else SLOWED


def waits_of(layers: Sequence[LayerSeconds], offloaded: Sequence[int], link: float, slowed: float) -> Waits:
    """The waits of a chunk with these layers and bytes on the host, from its last layer to its first. ``slowed``: from
    `slowed_of`."""
    forward = backward = 0.0
    for place, (one, size) in enumerate(zip(layers, offloaded, strict=True)):
        copy, beside = size / link, Contention(one.compute_beside, one.traffic_beside)
        forward += waiting_s(copy, one.forward_s, one.gather_s, beside, slowed)
        if place:
            backward += waiting_s(copy, one.backward_s, one.gather_s + one.reduce_s, beside, slowed)
        else:
            backward += max(0.0, copy - one.gather_s)
    return Waits(forward, backward)


def waiting_s(
    copy_s: Seconds, compute_s: Seconds, traffic_s: Seconds, beside: Contention, slowed: float, most: Most = max
) -> Seconds:
    """Seconds that copies add to a layer with so much compute and traffic. ``slowed``: from `slowed_of`; ``most``: as
    in `together_s`."""
    later = most(COPIES_BESIDE * copy_s, compute_s + slowed * copy_s) - compute_s
    waits_for_traffic = together_s(compute_s, traffic_s, most, beside) - slowed_s(compute_s, traffic_s, beside)
    return most(0.0, later - waits_for_traffic)


def added_by_offload(experiment: Experiment, cluster: ClusterSpec) -> float | None:
    """Seconds that a step takes longer: 0 without offload, None if they are not known."""
    waits = waits_of_chunks(experiment, cluster)
    if waits is None:
        return None
    return rounds_of(experiment) * max(sum(sum(chunk) for chunk in rank) for rank in waits)


def rounds_of(experiment: Experiment) -> float:
    """Number of micro-batches whose waits a step counts: all, and those in which the pipeline fills and drains."""
    return experiment.num_microbatches + (experiment.pp - 1) / experiment.virtual_stages
