"""Picks the ranks of a rehearsal, finds equal pipeline stages, and computes a step time from them. No torch here.

All ranks with one pipeline coordinate do the same work. The first stage holds the embedding and the last one the head
(in a V-shaped schedule the first pipeline rank holds both); the middle stages hold only layers. So a rehearsal runs one
rank of the first stage and one of the last. If layers are recomputed differently or only some have routed experts, a
middle rank may hold more than either, so the rank with the highest predicted peak is run too. Results are
stored under `stage_key` and reused for every point that has the same rank.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workloads.contract.protocol import HOST_WAIT, RankResult, Task
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.partition import experiment_layers, recompute_by_layer
from workloads.costs.shape.schedule import INTERLEAVED, V_SHAPED, Held, held_by_rank, stage_at
from workloads.costs.time.pipeline import pipeline_time_s
from workloads.costs.time.step_simulation import simulate_step
from workloads.costs.time.timeline import estimate_time, step_work
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees, rank_of
from workloads.spec.model_spec import model_to_dict
from workloads.spec.recomputation import is_by_stage
from workloads.spec.weights import routed

HOSTS_TOGETHER = 1.15
"""Ratio of the step time of two ranks with tp 2 to the mean step time of either alone, in host-bound steps: 11 pairs on
two hosts, with a standard deviation of 0.07 (results/another_device/h100x2_host_work). Tensor-parallel ranks wait for
each other in every layer. Data-parallel ranks wait once a step; their ratio scatters too widely to be used: mean 1.12,
standard deviation 0.14."""
RANKS_TOGETHER = 1.045
"""Ratio of real step times to those computed from one rank alone, in device-bound steps whose layers have collectives,
probably because each collective begins with the last rank that reaches it. 22 pairs with tp, cp or ep on two H200: mean
1.048, median 1.042, standard deviation 0.04; six pairs with data parallelism only: 1.01 (docs/accuracy_details.md). No
pair has a pipeline or more than two devices."""

_SAME_FIELDS = (
    *(
        "dp_shard",
        "tp",
        "cp",
        "cp_kind",
        "ep",
        "etp",
        "routing",
        "routing_imbalance",
        "capacity_factor",
        "micro_batch_size",
        "seq_len",
        "zero_stage",
        "sequence_parallel",
    ),
    *("precision", "attention", "compile", "virtual_stages", "engine", "engine_version"),
)
"""Fields of an experiment that enter `stage_key` unchanged, because memory and compute of its stages depend on them.
Recomputation enters as it is on the layers of the stage, see `_recomputed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedTimes:
    """Times of a whole step, computed from its rehearsed stages, in seconds. None: neither measured nor modelled."""

    step_time_s: float | None
    compute_time_s: float | None
    communication_time_s: float | None
    time_source: str | None
    """``compute_measured``: compute is measured, communication is modelled. ``estimated``: both are modelled. None:
    there is no step time."""


def rehearsed_ranks(experiment: Experiment) -> tuple[int, ...]:
    """Global ranks to run: one of the first stage and, if there are several stages, one of the last.

    With ``recompute_every`` or words of ``recompute`` by stage, and where only some layers have routed experts, one
    rank of the stage with the highest predicted peak is added, in between; where the stages are written out, also one
    with most layers.
    """
    return tuple(rank_of(experiment, pp=rank) for rank in _rehearsed(experiment))


def _rehearsed(e: Experiment) -> list[int]:
    """The pipeline ranks to run, in order."""
    ranks = {0, e.pp - 1}
    mixed = len({routed(e.model, layer) for layer in range(e.model.num_layers)}) > 1
    if e.pp > 2 and (e.recompute_every > 1 or is_by_stage(e.recompute) or mixed or e.pp_stages is not None):
        ranks.add(estimate_memory(e).peak_stage)
    if e.pp_stages is not None:
        ranks.add(max(range(e.pp), key=lambda rank: _layers_of_rank(e, rank)))
    return sorted(ranks)


def shortened(experiment: Experiment) -> Experiment:
    """Returns the experiment with fewer micro-batches, but the same peak memory and the same work per micro-batch.

    The number of micro-batches is the smallest with which every rank reaches the most it ever holds, plus one, so that
    gradients accumulate while the pipeline is full: ``pp + 1`` for 1F1B. With ZeRO 0 to 2 there are at least three:
    only a micro-batch that is neither first nor last finds all gradients allocated and frees no gathered weights. GPipe
    holds all micro-batches, so its experiment is returned unchanged. Interleaved schedules process groups of ``pp``
    micro-batches; the size of the last group decides what else is held while a chunk's gradients are reduced, so this
    size is kept.
    """
    e = experiment
    if e.pp_schedule == "gpipe":
        return e
    most = _most_held(e, e.num_microbatches)
    enough = next(count for count in range(1, e.num_microbatches + 1) if _most_held(e, count) == most)
    count = min(e.num_microbatches, max(enough + 1, 3 if e.zero_stage < 3 else 2))
    if e.pp_schedule in INTERLEAVED:
        count += (e.num_microbatches - count) % e.pp
    return e.replace(global_batch_size=count * e.sequences_per_round)


def _most_held(e: Experiment, num_microbatches: int) -> list[tuple[Held, ...]]:
    return [held_by_rank(e.pp_schedule, rank, e.pp, num_microbatches, e.virtual_stages) for rank in range(e.pp)]


def stage_key(task: Task, rank: int) -> str:
    """Returns a hash that is equal for two ranks, of any points, if both allocate and compute the same.

    Whether steps are profiled after the timed ones changes neither, so ``profile`` is left out.
    """
    experiment = shortened(task.experiment)
    pp_rank = rank // (experiment.world_size // experiment.pp)
    model: dict[str, Any] = {"layers": None, **model_to_dict(experiment.model)}
    model.pop("name")
    model["num_layers"] = _layers_of_rank(experiment, pp_rank)
    if model["layers"] is not None:
        kinds, order = model["layers"].pop("kinds"), model["layers"].pop("order")
        stages = experiment_layers(experiment)
        model["layers"]["kinds_by_chunk"] = [
            [kinds[order[at]] for at in stages[stage]] for stage in _stages_of_rank(experiment, pp_rank)
        ]
    moments = _most_held(experiment, experiment.num_microbatches)[pp_rank]
    same = {
        "model": model,
        "ends": _ends(experiment, pp_rank),
        "held": [asdict(moment) for moment in moments],
        "accumulates": min(experiment.num_microbatches, 3),
        "gpipe": experiment.pp_schedule == "gpipe",
        "last_group": experiment.num_microbatches % experiment.pp if experiment.pp_schedule in INTERLEAVED else None,
        "replicates": data_degrees(experiment)[0] > 1,
        "measure": {name: value for name, value in asdict(task.measure).items() if name != "profile"},
        "device": (task.method, task.device),
        "stand_ins": True,
    }
    for name in _SAME_FIELDS:
        same[name] = getattr(experiment, name)
    if experiment.pad_vocab_to is not None:
        same["pad_vocab_to"] = experiment.pad_vocab_to
    if experiment.update_words:
        same["updates"] = experiment.update_words
    if experiment.activation_offload != "none":
        same["activation_offload"] = experiment.activation_offload
    if experiment.recurrence != "torch":
        same["recurrence"] = experiment.recurrence
    if experiment.documents is not None:
        same["documents"] = experiment.packing
    if experiment.gradient_accumulation_fusion:
        same["gradient_accumulation_fusion"] = True
    if experiment.pp_stages is not None:
        layers, own = experiment_layers(experiment), _stages_of_rank(experiment, pp_rank)
        same["layers_by_chunk"] = [len(layers[stage]) for stage in own]
    same |= _recomputed(experiment, pp_rank)
    if experiment.model.moe is not None:
        replicas, shards = expert_degrees(experiment)
        same["experts"] = (_routed_of_rank(experiment, pp_rank), replicas > 1, shards)
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def assemble(experiment: Experiment, cluster: ClusterSpec, results: dict[int, RankResult]) -> RehearsedTimes:
    """Computes the times of the whole step from the results of its rehearsed ranks, by global rank.

    The schedule is filled with the measured forward and backward times of the first and the last rank, without the
    copies that stand in for data of other ranks. A middle rank takes the times of the first one (in a V-shaped schedule
    those of the last one, which also holds neither embedding nor head), scaled to its layers: a forward by their
    number, a backward by what they compute, which is half as much again where a full recomputation runs first. The time
    after the last backward (optimizer, casts and copies of the gradient reduction) is that of the slowest rehearsed
    rank. Communication comes from the closed form. `real_step_s` puts these together; the communication time is what
    the step takes longer than without communication, including the time that ranks wait for each other.
    """
    estimate = estimate_time(experiment, cluster)
    ends = [results[rank] for rank in rehearsed_ranks(experiment)]
    if any(end.forward_s is None or end.backward_s is None for end in ends):
        return RehearsedTimes(
            step_time_s=estimate.step_time_s if estimate is not None else None,
            compute_time_s=None,
            communication_time_s=estimate.communication_s if estimate is not None else None,
            time_source="estimated" if estimate is not None else None,
        )
    measured = dict(zip(_rehearsed(experiment), ends, strict=True))
    forward, backward = [], []
    for rank in range(experiment.pp):
        middle_like = experiment.pp - 1 if experiment.pp_schedule in V_SHAPED else 0
        like = rank if rank in measured else middle_like
        if not _layers_of_rank(experiment, like):
            like = rank if rank in measured else max(measured, key=lambda one: _layers_of_rank(experiment, one))
        end = measured[like]
        assert end.forward_s is not None
        assert end.backward_s is not None
        forward_s = end.forward_s - (end.stand_ins_forward_s or 0.0)
        backward_s = end.backward_s - (end.stand_ins_backward_s or 0.0)
        forward.append(forward_s * _ratio(_layers_of_rank(experiment, rank), _layers_of_rank(experiment, like)))
        backward.append(backward_s * _ratio(_backward_work(experiment, rank), _backward_work(experiment, like)))
    e = experiment
    after = max(_after_backward_s(end) for end in ends)
    busy, step = real_step_s(e, cluster, forward, backward, after, _any(map(_waited_for_host, ends)))
    return RehearsedTimes(
        step_time_s=step,
        compute_time_s=busy + after,
        communication_time_s=max(0.0, step - busy - after) if step is not None else None,
        time_source="compute_measured",
    )


def real_step_s(
    e: Experiment,
    cluster: ClusterSpec,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    after_s: float,
    waited: bool | None,
) -> tuple[float, float | None]:
    """Returns the seconds of the schedule without communication, and those of the step (None: rates are not known).

    ``forward_s``, ``backward_s``: time of one micro-batch, by pipeline rank. ``waited``: whether devices waited for the
    host; None: unknown, then neither factor applies. If they did not wait, ranks that meet in collectives of layers
    take `RANKS_TOGETHER` times as long together as one alone. If they did, communication is hidden behind the host's
    work, but tensor-parallel ranks wait for each other's hosts: the step is then at least `HOSTS_TOGETHER` times its
    compute.
    """
    busy = pipeline_time_s(e.pp_schedule, forward_s, backward_s, e.num_microbatches, virtual_stages=e.virtual_stages)
    work = step_work(e, cluster, [(*both, after_s) for both in zip(forward_s, backward_s, strict=True)])
    if work is None:
        return busy, None
    step = simulate_step(work).step_s
    if waited is False and max(e.tp, e.cp, e.ep) > 1:
        step *= RANKS_TOGETHER
    elif waited and e.tp > 1:
        step = max(step, HOSTS_TOGETHER * busy + after_s)
    return busy, step


def _ratio(work: int, measured: int) -> float:
    """Work of a rank in units of that of a measured one, which has none only if it is the rank itself."""
    return work / measured if measured else 1.0


def _any(values: Iterable[bool | None]) -> bool | None:
    """True if any value is true; otherwise None if any is unknown."""
    every = list(values)
    return True if True in every else None if None in every else False


def _waited_for_host(end: RankResult) -> bool | None:
    """Whether the device was idle when the host had launched a step's last backward; None: not known. An allocator that
    stops to free its cache makes the host wait for the device, so such runs are not used."""
    timed = [step for step in end.steps if not step.is_warmup]
    if end.host_lead_s is None or any(step.allocator_retries for step in timed):
        return None
    return end.host_lead_s < HOST_WAIT * statistics.median(step.step_time_s for step in timed)


def _stages_of_rank(e: Experiment, rank: int) -> list[int]:
    return [stage_at(e.pp_schedule, rank, chunk, e.pp) for chunk in range(e.virtual_stages)]


def _layers_of_rank(e: Experiment, rank: int) -> int:
    return sum(len(experiment_layers(e)[stage]) for stage in _stages_of_rank(e, rank))


def _routed_of_rank(e: Experiment, rank: int) -> int:
    """Number of a rank's layers that have routed experts."""
    return sum(routed(e.model, layer) for stage in _stages_of_rank(e, rank) for layer in experiment_layers(e)[stage])


def _recompute_by_layer(e: Experiment, rank: int) -> list[str]:
    words, layers = recompute_by_layer(e), experiment_layers(e)
    return [words[layer] for stage in _stages_of_rank(e, rank) for layer in layers[stage]]


def _backward_work(e: Experiment, rank: int) -> int:
    """Work of a rank's layers in backward, in units of one layer's forward. Cheap operations are not counted."""
    return sum(3 if kind == "full" else 2 for kind in _recompute_by_layer(e, rank))


def _recomputed(e: Experiment, rank: int) -> dict[str, object]:
    """Recomputation of a rank's layers: one word if it is the same for all of them, else also the word of each
    layer."""
    kinds = _recompute_by_layer(e, rank)
    if len(set(kinds)) == 1:
        return {"recompute": kinds[0]}
    word = kinds[0] if is_by_stage(e.recompute) else e.recompute
    return {"recompute": word, "recompute_by_layer": kinds}


def _ends(e: Experiment, rank: int) -> tuple[bool, bool]:
    """Whether a pipeline rank holds the embedding and the head."""
    stages = _stages_of_rank(e, rank)
    return 0 in stages, e.num_stages - 1 in stages


def _after_backward_s(end: RankResult) -> float:
    timed = [step for step in end.steps if not step.is_warmup]
    return statistics.median((step.reduce_exposed_s or 0.0) + (step.optimizer_s or 0.0) for step in timed)
