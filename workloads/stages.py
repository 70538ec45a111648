"""Picks the ranks of a rehearsal, finds equal pipeline stages, and computes a step time from them. No torch here.

All ranks of one pipeline stage do the same work. The first stage holds the embedding and the last one the head; the
middle stages hold only layers. So a rehearsal runs one rank of the first stage and one of the last. Their results are
stored under `stage_key` and used again for every point that has the same stage.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import asdict, dataclass

from workloads.cluster import ClusterSpec
from workloads.costs.partition import experiment_layers
from workloads.costs.schedule import microbatches_in_flight, schedule_actions
from workloads.costs.timeline import estimate_time, simulate
from workloads.experiment import Experiment
from workloads.mesh import rank_of
from workloads.protocol import RankResult, Task

_SAME_FIELDS = (
    *("dp_shard", "tp", "cp", "ep", "micro_batch_size", "seq_len", "zero_stage", "recompute", "sequence_parallel"),
    *("precision", "attention", "compile", "virtual_stages", "engine", "engine_version"),
)
"""Fields of an experiment on which its stages' memory and compute depend as they stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedTimes:
    """Times of a whole step, computed from its rehearsed stages, in seconds. None: neither measured nor modelled."""

    step_time_s: float | None
    compute_time_s: float | None
    communication_time_s: float | None
    time_source: str
    """``compute_measured``: compute is measured, communication is modelled. ``estimated``: both are modelled."""


def rehearsed_ranks(experiment: Experiment) -> tuple[int, ...]:
    """Global ranks to run: one of the first stage and, if there are several stages, one of the last."""
    first = rank_of(experiment)
    return (first,) if experiment.pp == 1 else (first, rank_of(experiment, pp=experiment.pp - 1))


def shortened(experiment: Experiment) -> Experiment:
    """The experiment with fewer micro-batches, but the same peak memory and the same work for each of them.

    1F1B holds at most ``pp`` micro-batches; one more makes gradients accumulate while the pipeline is full. GPipe holds
    all micro-batches, so its experiment is returned unchanged.
    """
    if experiment.pp_schedule == "gpipe":
        return experiment
    microbatches = min(experiment.num_microbatches, experiment.pp + 1)
    return experiment.replace(global_batch_size=microbatches * experiment.sequences_per_round)


def stage_key(task: Task, rank: int) -> str:
    """A hash that is equal for two ranks, of any points, if both allocate and compute the same."""
    experiment = shortened(task.experiment)
    stage = rank // (experiment.world_size // experiment.pp)
    model = asdict(experiment.model)
    model.pop("name")
    model["num_layers"] = len(experiment_layers(experiment)[stage])
    actions = schedule_actions(experiment.pp_schedule, stage, experiment.pp, experiment.num_microbatches)
    same = {
        "model": model,
        "ends": (stage == 0, stage == experiment.pp - 1),
        "in_flight": microbatches_in_flight(actions),
        "accumulates": experiment.num_microbatches > 1,
        "gpipe": experiment.pp_schedule == "gpipe",
        "replicates": experiment.dp_replicate > 1,
        "measure": asdict(task.measure),
        "device": (task.method, task.device),
    }
    for name in _SAME_FIELDS:
        same[name] = getattr(experiment, name)
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def assemble(experiment: Experiment, cluster: ClusterSpec, results: dict[int, RankResult]) -> RehearsedTimes:
    """The times of the whole step from the results of its rehearsed ranks, by global rank.

    The measured forward and backward times of the first and last stage fill the schedule; a middle stage takes the time
    of the first one, scaled to its number of layers. The time after the last backward (optimizer, and the casts and
    copies of the gradient reduction) is that of the slower of the two. Communication comes from the closed form.
    """
    estimate = estimate_time(experiment, cluster)
    communication = estimate.communication_s if estimate is not None else None
    ends = [results[rank] for rank in rehearsed_ranks(experiment)]
    if any(end.forward_s is None or end.backward_s is None for end in ends):
        return RehearsedTimes(
            step_time_s=estimate.step_time_s if estimate is not None else None,
            compute_time_s=None,
            communication_time_s=communication,
            time_source="estimated",
        )
    forward, backward = [], []
    for stage in range(experiment.pp):
        end = ends[-1] if stage == experiment.pp - 1 else ends[0]
        scale = 1.0
        if 0 < stage < experiment.pp - 1:
            layers = experiment_layers(experiment)
            scale = len(layers[stage]) / len(layers[0])
        assert end.forward_s is not None
        assert end.backward_s is not None
        forward.append(end.forward_s * scale)
        backward.append(end.backward_s * scale)
    actions = [
        schedule_actions(experiment.pp_schedule, stage, experiment.pp, experiment.num_microbatches)
        for stage in range(experiment.pp)
    ]
    busy = simulate(actions, forward, backward, 0.0).total_s
    compute = busy + max(_after_backward_s(end) for end in ends)
    return RehearsedTimes(
        step_time_s=compute + communication if communication is not None else None,
        compute_time_s=compute,
        communication_time_s=communication,
        time_source="compute_measured",
    )


def _after_backward_s(end: RankResult) -> float:
    timed = [step for step in end.steps if not step.is_warmup]
    return statistics.median((step.reduce_exposed_s or 0.0) + (step.optimizer_s or 0.0) for step in timed)
