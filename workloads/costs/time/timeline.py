"""What the parts of a step take at calibrated rates, in seconds: compute, exposed communication, bubble, optimizer.

Rehearsals take the communication of it, and simulations the work of every action. Its sum knows no gaps between kernels
and no host, so that it is no prediction: plans take that of `workloads.predict`, and of this the ratio of two layouts.

Exposed communication is what a step takes longer for it: where nothing else runs beside, and what compute beside it
loses. The parts are taken as follows.

compute     matmul FLOPs / (peak * matmul_efficiency); attention at its own share of that; norms, RoPE, SwiGLU,
            residuals and gradient accumulation at memory bandwidth. Kernels follow each other without gaps
tp          forward: all gathers and scatters are exposed. Backward: a row-parallel layer's gather is; a column-parallel
            layer gathers its input beside the input-gradient matmul and scatters beside the weight-gradient matmul.
            Compute and traffic beside each other slow each other (`collectives.together_s`)
dp          gradients hide behind their backward and gathered weights behind their forward, except for the last unit
            reduced and the first unit gathered; see `workloads.costs.time.step_simulation`
pp          `pipeline_time_s` of every chunk's actual times, messages included, and a bound on what the first and the
            last of a chunk's actions take longer (`step_bounds_s`). A split backward's W has the weights' gradients of
            matmuls, their accumulation and their reduction, I all else: attention, norms, what is computed again
cp          a ring's messages hide behind attention; gathers and all-to-alls are exposed
ep          the rank with most tokens counts; exchanges are exposed but for shared experts beside the first of them,
            see `workloads.costs.time.expert_times`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workloads.costs.time.pipeline import Simulation, Span, pipeline_time_s, simulate
from workloads.costs.time.rank_times import ChunkTimes, Floats
from workloads.costs.time.step_bounds import once_s, steady_times, step_bounds_s
from workloads.costs.time.step_simulation import StepWork, Timeline, simulate_step
from workloads.costs.time.step_times import StepTimes
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

__all__ = [
    "Simulation",
    "Span",
    "TimeEstimate",
    "Timeline",
    "estimate_idle",
    "estimate_time",
    "pipeline_time_s",
    "simulate",
    "simulate_experiment",
    "step_work",
]


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Where one optimizer step's time goes, in seconds, seen from the busiest stage. The parts add up."""

    step_time_s: float
    compute_s: float
    communication_s: float
    """Exposed: not hidden behind compute."""
    bubble_s: float
    """The busiest stage's waiting for other stages."""
    optimizer_s: float


def estimate_time(experiment: Experiment, cluster: ClusterSpec) -> TimeEstimate | None:
    """Time of one step; None where the cluster's device has no known rate for the precision.

    Raises `InfeasibleLayout` when the layout leaves the only node of a cluster without a link between nodes. Expects an
    experiment that breaks no rule of `workloads.rules.layout_rules`. For many layouts `StepTimes` gives the first field
    alone.
    """
    e = experiment
    found = StepTimes(cluster)
    if not found.is_known(e):
        return None
    parts = found.parts([e])
    times, steps = parts.times, parts.steps
    step, steady = float(step_bounds_s(steps)[0]), steady_times(steps.chunks, steps.zero_stage)

    def by_rank(of_chunks: Floats) -> Floats:
        """Together, of each kind of rank."""
        whole: Floats = of_chunks.reshape(-1, e.virtual_stages).sum(axis=1)
        return whole

    backward = steady.input_s + steady.weight_s if e.pp_schedule == "interleaved_zero_bubble" else steady.backward_s
    busy = e.num_microbatches * by_rank(steady.forward_s + steady.wait_s + backward)
    busiest = int(busy.argmax())
    compute = e.num_microbatches * float(by_rank(times.forward_s + times.backward_s)[busiest])
    once = float(by_rank(once_s(steps))[busiest] + steps.tied_s[0])
    optimizer = float(steps.optimizer_s[0])
    return TimeEstimate(
        step_time_s=step,
        compute_s=compute,
        communication_s=float(busy[busiest]) - compute + once,
        bubble_s=max(0.0, step - float(busy[busiest]) - once - optimizer),
        optimizer_s=optimizer,
    )


def simulate_experiment(experiment: Experiment, cluster: ClusterSpec) -> Timeline | None:
    """One step of an experiment, event by event; None, and errors, as of `estimate_time`.

    It takes a second for some hundred thousand actions, so plans, which ask for many layouts, take a bound instead.
    """
    work = step_work(experiment, cluster)
    return simulate_step(work) if work is not None else None


def estimate_idle(experiment: Experiment, cluster: ClusterSpec) -> tuple[float, ...] | None:
    """The share of a step in which each pipeline rank waits for another; None, and errors, as of `estimate_time`.

    Their mean is what ``pipeline_idle_s`` over ``step_time_s`` is of a measured run.
    """
    found = simulate_experiment(experiment, cluster)
    return tuple(idle / found.step_s for idle in found.idle_s) if found is not None else None


def step_work(
    experiment: Experiment, cluster: ClusterSpec, measured: Sequence[tuple[float, float, float]] | None = None
) -> StepWork | None:
    """What a step consists of, for `simulate_step`; None, and errors, as of `estimate_time`.

    ``measured``: by pipeline rank the seconds of one micro-batch's forward and backward through all its chunks, and of
    its optimizer; they stand in the place of the closed form's, chunks alike. Communication stays the closed form's.
    """
    e, found = experiment, StepTimes(cluster)
    if not found.is_known(e):
        return None
    parts = found.parts([e])
    times = [ChunkTimes(*one) for one in zip(*(column.tolist() for column in parts.times), strict=True)]
    v, places = e.virtual_stages, parts.steps.schedules[0].places.tolist()
    ranks = [[times[at] for at in places[start : start + v]] for start in range(0, len(places), v)]
    optimizer = [float(parts.ranks_s[places[start] // v]) for start in range(0, len(places), v)]
    if measured is not None:
        optimizer = [after for _, _, after in measured]
        for own, (forward, backward, _) in zip(ranks, measured, strict=True):
            weight = 0.5 / v * backward
            own[:] = [one._replace(forward_s=forward / v, backward_s=2 * weight, weight_s=weight) for one in own]
    latency = float(parts.latency_s[0])
    return StepWork(
        schedule=e.pp_schedule,
        num_microbatches=e.num_microbatches,
        chunks=tuple(tuple(one.work() for one in own) for own in ranks),
        zero_stage=e.zero_stage,
        latency_s=latency,
        message_s=float(parts.steps.hop_s[0]) - latency,
        tied_s=float(parts.steps.tied_s[0]),
        optimizer_s=tuple(optimizer),
    )
