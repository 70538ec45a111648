"""Gives one point of a grid its verdict, its predicted numbers and its price; the budget is left to the whole plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from results.text.numbers import format_bytes, plural
from sweep.composing.config import SweepConfig
from sweep.grids.expand import GridPoint
from sweep.grids.step_time import StepTime
from sweep.planning.auto_recompute import budget_limit
from sweep.planning.price import Price, price
from sweep.planning.reuse import FinishedAttempt
from sweep.predicting.forecast import Forecast
from workloads.contract.protocol import Method
from workloads.costs.memory.estimate import estimate_memory, peak_stage
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.rules.engine_support import is_own
from workloads.rules.installed_engines import unusable_here
from workloads.rules.layout_rules import Violation, violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    grid: str
    experiment: Experiment
    verdict: str
    rule: str | None = None
    """The first of ``broken``; or the rule by which a point is run on purpose."""
    detail: str | None = None
    """Why the point has its verdict, with all sentences of ``broken``."""
    broken: tuple[Violation, ...] = ()
    """All rules that an invalid point breaks: of its layout, its cluster and its engine, then of what it is run on."""
    fallbacks: tuple[str, ...] = ()
    """As of `GridPoint`."""
    peak_bytes: int | None = None
    """Predicted peak of the largest stage; None for a layout that breaks a rule, which has no prediction."""
    limit_bytes: int | None = None
    """Limit of one device, or of one process if all share the memory of a machine; None: unknown."""
    host_memory_bytes: int | None = None
    """Predicted memory of the fullest node that optimizers keep on its host; None: not predicted."""
    time: StepTime | None = None
    price: Price | None = None
    rehearsals: int | None = None
    """Ranks to rehearse for this point, without those equal to a rank of an earlier point; None: the point is
    measured."""
    cached_attempt: str | None = None
    cached_sweep: str | None = None
    """The attempt whose row is used instead of a run, and the sweep that it belongs to."""

    @property
    def broken_rules(self) -> tuple[str, ...]:
        """Names of ``broken``, each once."""
        return tuple(dict.fromkeys(one.rule for one in self.broken))

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        if self.time is None:
            return None
        return self.experiment.tokens_per_step / self.time.step_time_s / self.experiment.world_size


def may_not_fit(point: PlannedPoint) -> bool:
    """Whether the predicted peak exceeds what a device can hold; with `plan.oom_margin` above 1 such points can run."""
    return point.peak_bytes is not None and bool(point.limit_bytes) and point.peak_bytes > (point.limit_bytes or 0)


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """The most devices that one point can get."""

    devices: int
    why: str
    """Ends the sentence "needs 16 devices, ..."."""


class CheckedPoint(NamedTuple):
    """A point checked against the rules."""

    planned: PlannedPoint
    structural: bool
    """Whether its layout breaks a rule that holds for every engine."""
    predicted: bool
    """Whether it can be predicted: its layout is valid, and its engine is ours or another one that can run it."""
    refused: bool
    point: GridPoint

    @property
    def experiment(self) -> Experiment:
        return self.planned.experiment


def check_point(
    config: SweepConfig,
    point: GridPoint,
    method: Method,
    device_limit: DeviceLimit | None,
    host_bytes: int | None,
) -> CheckedPoint:
    """Checks a point against the rules. ``device_limit`` and ``host_bytes``: see `sweep.planning.plan.make_plan`."""
    experiment, cluster = point.experiment, config.cluster
    share = host_bytes // experiment.world_size if host_bytes is not None else None
    budget = budget_limit(cluster, point.budget_gib)
    limits = [limit for limit in (cluster.usable_bytes, share, budget) if limit is not None]
    planned = PlannedPoint(
        grid=point.grid,
        experiment=experiment,
        verdict="run",
        fallbacks=point.fallbacks,
        limit_bytes=min(limits, default=None),
    )
    broken = violations(experiment, cluster)
    structural = [violation for violation in broken if violation.rule != "engine_support"]
    of_engine = [violation for violation in broken if violation.rule == "engine_support"]
    too_wide = _too_wide(experiment, cluster, device_limit)
    if method != "measured" and not is_own(experiment):
        too_wide.append(Violation("engine_support", f"engine={experiment.engine} runs, but cannot be rehearsed"))
    if (unusable := unusable_here(experiment)) is not None:
        too_wide.append(Violation("engine_support", unusable))
    refused = (*structural, *of_engine, *too_wide)
    if refused:
        detail = "; ".join((refused[0].message, *(f"{one.rule}: {one.message}" for one in refused[1:])))
        planned = dataclasses.replace(planned, verdict="invalid", rule=refused[0].rule, detail=detail, broken=refused)
    elif point.chosen is not None and point.fits:
        planned = dataclasses.replace(planned, detail=point.chosen)
    predicted = not structural and (is_own(experiment) or not refused)
    return CheckedPoint(planned, bool(structural), predicted, bool(refused), point)


def with_verdict(
    config: SweepConfig,
    point: CheckedPoint,
    forecast: Forecast,
    time: StepTime | None,
    method: Method,
    finished: Mapping[str, FinishedAttempt],
    host_bytes: int | None,
    peaks: Mapping[str, int],
) -> PlannedPoint:
    """Adds the numbers and the verdict to a point whose layout breaks no rule.

    Points that the engine cannot run yet, or that need too many devices, are predicted too, to show what they would
    give.
    """
    experiment, cluster = point.experiment, config.cluster
    tensor_bytes = stage = None
    if point.predicted and is_own(experiment):
        tensor_bytes = peaks.get(experiment.id) if peaks else None
        if tensor_bytes is None:
            memory = peak_stage(experiment)
            tensor_bytes, stage = memory.peak_bytes, memory.stage
    elif point.predicted and (of_engine := forecast.memory.peak(experiment)) is not None:
        tensor_bytes, stage = of_engine.peak_bytes, of_engine.stage
    peak_bytes = tensor_bytes + cluster.device.workspace_bytes if tensor_bytes is not None else None
    of_host = None
    if tensor_bytes is not None and is_own(experiment):
        of_host = node_host_bytes(experiment, cluster.devices_per_node)
    if time is not None and tensor_bytes is not None and is_own(experiment):
        time = forecast.near_full(time, tensor_bytes)
    planned = dataclasses.replace(
        point.planned,
        peak_bytes=peak_bytes,
        host_memory_bytes=of_host,
        time=time,
        price=price(experiment, time, method, config.measure, config.plan),
    )
    if point.refused:
        return planned
    if finished and (attempt := finished.get(experiment.id)) is not None:  # computing the id costs a hash
        return dataclasses.replace(
            planned,
            verdict="cached",
            detail=f"{attempt.outcome} in attempt {attempt.attempt_id} of sweep {attempt.sweep}",
            cached_attempt=attempt.attempt_id,
            cached_sweep=attempt.sweep,
        )
    if config.plan.run_predicted_oom:
        return planned
    of_device, on_nodes = _over_budget(point.point, planned, stage, cluster), None
    # No run of another engine is refused by its structure alone.
    if tensor_bytes is not None and forecast.has_rows_of(experiment):
        margin = config.plan.oom_margin
        of_device = of_device or _too_big(planned, stage, cluster.usable_bytes, host_bytes, margin)
        on_nodes = too_big_for_host(of_host, experiment, cluster, margin)
    if why := "; ".join(filter(None, (of_device, on_nodes))):
        return dataclasses.replace(planned, verdict="predicted_oom", detail=why)
    return planned


def too_big_for_host(
    needed: int | None, experiment: Experiment, cluster: ClusterSpec, margin: float = 1.0
) -> str | None:
    """Describes in numbers why what the optimizer and activations have on the host does not fit there; None if it fits,
    or if the memory of the cluster's nodes is not known. ``needed``: bytes of a node."""
    limit = cluster.host.memory_bytes
    if not needed or limit is None or needed <= limit * margin:
        return None
    return (
        f"{on_host(experiment)} needs {format_bytes(needed)} of the host's memory on a node; "
        f"{format_bytes(limit)} x margin {margin:g} = {format_bytes(limit * margin)}"
    )


def on_host(experiment: Experiment) -> str:
    """The fields that put something into the memory of the host, with their values."""
    fields = [f"optimizer_offload={experiment.optimizer_offload:g}"] if experiment.optimizer_offload else []
    if experiment.activation_offload != "none":
        fields.append(f"activation_offload={experiment.activation_offload}")
    return " with ".join(fields)


def _too_wide(experiment: Experiment, cluster: ClusterSpec, device_limit: DeviceLimit | None) -> list[Violation]:
    """Why a point needs more devices than the cluster has, or than the launcher can give."""
    size, broken_rules = experiment.world_size, []
    if cluster.nodes is not None and size > cluster.nodes * cluster.devices_per_node:
        needed = -(-size // cluster.devices_per_node)
        has = f"cluster {cluster.name} has {plural(cluster.nodes, 'node')} of {cluster.devices_per_node} devices"
        broken_rules.append(Violation("cluster_nodes", f"{size} ranks need {needed} nodes; {has} (nodes in its file)"))
    if device_limit is not None and size > device_limit.devices:
        broken_rules.append(Violation("launcher_devices", f"needs {size} devices, {device_limit.why}"))
    return broken_rules


def _over_budget(point: GridPoint, planned: PlannedPoint, stage: int | None, cluster: ClusterSpec) -> str | None:
    """Describes in numbers why a point does not fit its memory budget, which has no margin; None if it does."""
    if not point.fits:
        return point.chosen
    limit = budget_limit(cluster, point.budget_gib)
    if limit is None or planned.peak_bytes is None or planned.peak_bytes <= limit:
        return None
    stage = peak_stage(point.experiment).stage if stage is None else stage
    needed = format_bytes(planned.peak_bytes + cluster.reserved_bytes)
    of_stage = f"stage {stage} of {point.experiment.pp} needs {needed}"
    return f"{of_stage} with what is reserved; memory_budget={point.budget_gib:g} GiB"


def _too_big(
    point: PlannedPoint, stage: int | None, device_bytes: int | None, host_bytes: int | None, margin: float
) -> str | None:
    """Describes in numbers why a point is predicted not to fit; None if it fits or its limits are unknown.

    ``stage``: the stage that needs most; None: not looked for yet.
    """
    experiment, peak_bytes = point.experiment, point.peak_bytes
    assert peak_bytes is not None
    if device_bytes is not None and peak_bytes > device_bytes * margin:
        stage = peak_stage(experiment).stage if stage is None else stage
        return (
            f"stage {stage} of {experiment.pp} needs {format_bytes(peak_bytes)}; "
            f"{format_bytes(device_bytes)} x margin {margin:g} = {format_bytes(device_bytes * margin)}"
        )
    if host_bytes is None or not is_own(experiment):
        return None
    stages = estimate_memory(experiment).stages
    together = sum(stage.peak_bytes for stage in stages) * (experiment.world_size // experiment.pp)
    together += node_host_bytes(experiment, experiment.world_size)
    if together > host_bytes * margin:
        each = format_bytes(peak_bytes)
        size, needed = experiment.world_size, format_bytes(together)
        many = f"{size} processes need {needed} together, at most {each} each"
        return (
            f"{many if size > 1 else f'1 process needs {needed}'}; this machine has {format_bytes(host_bytes)} "
            f"x margin {margin:g} = {format_bytes(host_bytes * margin)}"
        )
    return None
