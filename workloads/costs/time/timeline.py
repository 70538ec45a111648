"""Step time in seconds at calibrated rates, by part: compute, exposed communication, bubble, optimizer.

Rehearsals take its communication, and simulations the work of every action. The sum includes neither gaps between
kernels nor host time, so it is not a prediction: plans take that of `workloads.predict`, and use only the ratio of two
layouts from here.

Exposed communication is the time that it adds to a step: where it overlaps with nothing, and the slowdown of compute
that overlaps with it. Assumptions:

compute     matmul FLOPs / (peak * matmul_efficiency); attention at its own share of that; norms, RoPE, SwiGLU,
            residuals and gradient accumulation at memory bandwidth. Kernels follow each other without gaps
tp          forward: all gathers and scatters are exposed. Backward: a row-parallel layer's gather is exposed; a
            column-parallel layer's gather of its input overlaps with the input-gradient matmul, and its scatter with
            the weight-gradient matmul. Overlapping compute and communication slow each other
            (`collectives.together_s`)
dp          reductions are hidden behind their backward and weight gathers behind their forward, except for the last
            unit reduced and the first unit gathered; see `workloads.costs.time.step_simulation`
pp          `pipeline_time_s` of every chunk's actual times, messages included, and a bound on the extra time of a
            chunk's first and last action (`step_bounds_s`). A split backward's W has the weight gradients of matmuls,
            their accumulation and their reduction; I has the rest: attention, norms, recomputation
cp          a ring's messages are hidden behind attention (Ring Attention, arXiv:2310.01889); all-gathers and
            all-to-alls (Ulysses, arXiv:2309.14509) are exposed
host        an optimizer on the host adds `workloads.costs.time.host_update`, of the fullest rank, to every rank, and
            activations there `workloads.costs.time.offload_times`
ep          the rank with most tokens counts; exchanges are exposed, except that shared experts hide the first one; see
            `workloads.costs.time.expert_times`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workloads.costs.time.host_update import added_by_host
from workloads.costs.time.offload_times import added_by_offload, waits_of_chunks
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
    """Seconds of one optimizer step by part, on the busiest stage. The parts add up."""

    step_time_s: float
    compute_s: float
    communication_s: float
    """Exposed communication, not hidden behind compute, also with the host."""
    bubble_s: float
    """Time in which the busiest stage waits for other stages."""
    optimizer_s: float


def estimate_time(experiment: Experiment, cluster: ClusterSpec) -> TimeEstimate | None:
    """Returns the time of one step; None if the cluster's device has no known rate for the precision, or its host none
    for an optimizer there.

    The experiment must break no rule of `workloads.rules.layout_rules`. Raises `InfeasibleLayout` if the layout leaves
    the only node of a cluster without a link between nodes. For ``step_time_s`` alone of many layouts use `StepTimes`.
    """
    e = experiment
    step_times = StepTimes(cluster)
    on_host, waits = added_by_host(e, cluster), added_by_offload(e, cluster)
    if on_host is None or waits is None or not step_times.is_known(e):
        return None
    parts = step_times.parts([e])
    times, steps = parts.times, parts.steps
    step, steady = float(step_bounds_s(steps)[0]) + on_host + waits, steady_times(steps.chunks, steps.zero_stage)

    def by_rank(of_chunks: Floats) -> Floats:
        """Sums over the chunks of each kind of rank."""
        whole: Floats = of_chunks.reshape(-1, e.virtual_stages).sum(axis=1)
        return whole

    backward = steady.input_s + steady.weight_s if e.pp_schedule == "interleaved_zero_bubble" else steady.backward_s
    busy = e.num_microbatches * by_rank(steady.forward_s + steady.wait_s + backward)
    busiest = int(busy.argmax())
    compute = e.num_microbatches * float(by_rank(times.forward_s + times.backward_s)[busiest])
    once = max(0.0, float(by_rank(once_s(steps))[busiest])) + float(steps.tied_s[0])  # a rounded difference
    optimizer = float(steps.optimizer_s[0]) + on_host
    return TimeEstimate(
        step_time_s=step,
        compute_s=compute,
        communication_s=max(0.0, float(busy[busiest]) - compute) + once + waits,
        bubble_s=max(0.0, step - float(busy[busiest]) - once - waits - optimizer),
        optimizer_s=optimizer,
    )


def simulate_experiment(experiment: Experiment, cluster: ClusterSpec) -> Timeline | None:
    """Simulates one step event by event; None and errors as for `estimate_time`.

    This takes a second for some hundred thousand actions, so plans, which evaluate many layouts, use a bound instead.
    """
    work = step_work(experiment, cluster)
    return simulate_step(work) if work is not None else None


def estimate_idle(experiment: Experiment, cluster: ClusterSpec) -> tuple[float, ...] | None:
    """Share of a step in which each pipeline rank waits for another; None and errors as for `estimate_time`.

    The mean over ranks corresponds to ``pipeline_idle_s`` / ``step_time_s`` of a measured run.
    """
    timeline = simulate_experiment(experiment, cluster)
    return tuple(idle / timeline.step_s for idle in timeline.idle_s) if timeline is not None else None


def step_work(
    experiment: Experiment, cluster: ClusterSpec, measured: Sequence[tuple[float, float, float]] | None = None
) -> StepWork | None:
    """Input of `simulate_step` for one step; None and errors as for `estimate_time`.

    ``measured``: by pipeline rank, the seconds of one micro-batch's forward and backward through all its chunks, and of
    its optimizer. They replace the closed form's, split equally over chunks. Communication remains the closed form's.
    """
    e, step_times = experiment, StepTimes(cluster)
    on_host, waits = added_by_host(e, cluster), waits_of_chunks(e, cluster)
    if on_host is None or waits is None or not step_times.is_known(e):
        return None
    parts = step_times.parts([e])
    times = [ChunkTimes(*one) for one in zip(*(column.tolist() for column in parts.times), strict=True)]
    v, places = e.virtual_stages, parts.steps.schedules[0].places.tolist()
    ranks = [[times[at] for at in places[start : start + v]] for start in range(0, len(places), v)]
    optimizer = [float(parts.ranks_s[places[start] // v]) + on_host for start in range(0, len(places), v)]
    if measured is not None:
        optimizer = [after for _, _, after in measured]
        for chunks, (forward, backward, _) in zip(ranks, measured, strict=True):
            weight = 0.5 / v * backward
            chunks[:] = [one._replace(forward_s=forward / v, backward_s=2 * weight, weight_s=weight) for one in chunks]
    for chunks, of_rank in zip(ranks, waits, strict=True):
        for at, (one, wait) in enumerate(zip(chunks, of_rank, strict=True)):
            forward, backward = one.forward_exposed_s + wait.forward_s, one.backward_exposed_s + wait.backward_s
            chunks[at] = one._replace(forward_exposed_s=forward, backward_exposed_s=backward)
    latency = float(parts.latency_s[0])
    return StepWork(
        schedule=e.pp_schedule,
        num_microbatches=e.num_microbatches,
        chunks=tuple(tuple(one.work() for one in chunks) for chunks in ranks),
        zero_stage=e.zero_stage,
        latency_s=latency,
        message_s=float(parts.steps.hop_s[0]) - latency,
        tied_s=float(parts.steps.tied_s[0]),
        optimizer_s=tuple(optimizer),
    )
