"""The plan: every grid point with its verdict, its predicted numbers and its price. Needs no torch and no GPU.

invalid         a rule of the layout (or of this version of the engine, or of this machine) forbids it
predicted_oom   its predicted peak exceeds what a device can hold, with a margin
cached          it has a finished attempt: in this sweep, or in another one with plan.reuse=true
over_budget     the budget does not cover it
run             everything else
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from results.text.numbers import format_bytes, plural
from sweep.composing.config import SweepConfig
from sweep.grids.columns import holds
from sweep.grids.expand import Expansion, GridPoint, ruled_out
from sweep.grids.step_time import StepTime
from sweep.grids.walk import MISTAKES, Progress, silent
from sweep.planning import audit
from sweep.planning.price import Price, information_order, price, shared_stage_discount, within_budget
from sweep.planning.reuse import FinishedAttempt
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known
from workloads.contract.protocol import Method, Task
from workloads.contract.stages import rehearsed_ranks
from workloads.costs.memory.estimate import estimate_memory, peak_stage
from workloads.rules.engine_support import is_own
from workloads.rules.installed_engines import unusable_here
from workloads.rules.layout_rules import Violation, violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment, layout_id
from workloads.spec.expressions import Expression

_PROGRESS_EVERY = 500
"""Number of points between two progress reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    grid: str
    experiment: Experiment
    verdict: str
    rule: str | None = None
    detail: str | None = None
    peak_bytes: int | None = None
    """Predicted peak of the largest stage; None for a layout that breaks a rule, which has no prediction."""
    limit_bytes: int | None = None
    """Limit of one device, or of one process if all share the memory of a machine; None: unknown."""
    time: StepTime | None = None
    price: Price | None = None
    rehearsals: int | None = None
    """Ranks to rehearse for this point, without those equal to a rank of an earlier point; None: the point is
    measured."""
    cached_attempt: str | None = None
    cached_sweep: str | None = None
    """The attempt whose row is used instead of a run, and the sweep that it belongs to."""

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        if self.time is None:
            return None
        return self.experiment.tokens_per_step / self.time.step_time_s / self.experiment.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    config: SweepConfig
    method: Method
    points: tuple[PlannedPoint, ...]
    """Points to run first, in the order in which pilots claim them; then the others, in the order of their grids."""
    duplicates: int
    not_sampled: int
    combinations: int = 0
    """Number of combinations of the axes of all grids."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of combinations left out by each derived value and each condition, see `Expansion.dropped`."""
    unpredicted: int = 0
    """Part of `dropped`: points that a condition left out because the value it uses is not predicted."""
    predicted_with: str = ""
    """Earlier measurements used for the step times, in words; empty: none."""

    @property
    def to_run(self) -> tuple[PlannedPoint, ...]:
        return tuple(point for point in self.points if point.verdict == "run")

    @property
    def counts(self) -> Counter[str]:
        return Counter(point.verdict for point in self.points)


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """The most devices that one point can get."""

    devices: int
    why: str
    """Ends the sentence "needs 16 devices, ..."."""


def make_plan(
    config: SweepConfig,
    expansion: Expansion,
    method: Method,
    finished: Mapping[str, FinishedAttempt] | None = None,
    device_limit: DeviceLimit | None = None,
    host_bytes: int | None = None,
    progress: Progress = silent,
    known: Known | None = None,
    peaks: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Give every point its verdict.

    ``finished``: by experiment id, attempts that need no other run (see `sweep.planning.reuse`). ``device_limit``: the
    most devices that the launcher can give one point; None: as many nodes of the cluster as it needs. ``host_bytes``:
    memory that all processes of a point share; None: every device has its own. ``known``: earlier measurements on the
    cluster, used for the step times. ``peaks``: see `sweep.planning.earlier_peaks`. Raises
    `InvalidSweep` if the conditions on predicted values leave no point.
    """
    finished = finished or {}
    conditions = {grid.name: grid.where_predicted for grid in config.grids}
    dropped = Counter(expansion.dropped)
    unpredicted = 0
    planned: list[PlannedPoint] = []
    count, widest = len(expansion.points), device_limit if method == "measured" else None
    checked = [_checked(config, point, method, widest, host_bytes) for point in expansion.points]
    possible = [one.experiment for one in checked if one.predicted]
    # An id differs from that of its layout in the hash alone, whose computation takes long.
    ran = {name[:-8] for name in known.steps} if known else set()
    forecast = Forecast.of(config.cluster, known, [layout_id(one) for one in possible if ran and one.id[:-8] in ran])
    times = iter(forecast.times(possible))
    for done, one in enumerate(checked):
        if not done % _PROGRESS_EVERY:
            progress("points predicted", done, count)
        planned_point = one.planned
        if not one.structural:
            time = next(times) if one.predicted else None
            planned_point = _planned(config, one, forecast, time, method, finished, host_bytes, peaks)
        if (failed := _failed_condition(planned_point, conditions.get(planned_point.grid, {}))) is None:
            planned.append(planned_point)
        else:
            dropped[failed.place] += 1
            unpredicted += not failed.known
    if not planned:
        raise InvalidSweep(
            f"no point is left of {plural(len(expansion.points), 'point')} after the conditions on predicted values; "
            f"{ruled_out(dropped)}"
        )
    planned = _audited(planned, config)
    candidates = [point for point in planned if point.verdict == "run"]
    others = [point for point in planned if point.verdict != "run"]
    prices = [point.price for point in candidates if point.price is not None]
    assert len(prices) == len(candidates)
    order = information_order(
        [point.experiment for point in candidates], [point.tokens_per_s_per_gpu for point in candidates], prices
    )
    ordered = [candidates[at] for at in order]
    if method != "measured":
        ordered = _without_repeated_stages(config, method, ordered)
    affordable = _apply_budget(ordered, config.budget_gpu_hours)
    return Plan(
        config=config,
        method=method,
        points=(*affordable, *others),
        duplicates=expansion.duplicates,
        not_sampled=expansion.not_sampled,
        combinations=expansion.combinations,
        dropped=dict(dropped),
        unpredicted=unpredicted,
        predicted_with=forecast.used_for({(one.engine, one.engine_version) for one in possible}),
    )


def refuse_if_nothing_can_run(plan: Plan) -> None:
    """Raise `InvalidSweep` with the numbers if no point of the plan can ever run, which is a mistake of the user."""
    counts = plan.counts
    if counts["run"] or counts["cached"] or counts["over_budget"]:
        return
    cluster = plan.config.cluster
    too_big = [point for point in plan.points if point.verdict == "predicted_oom" and point.peak_bytes is not None]
    if too_big:
        smallest = min(too_big, key=lambda point: point.peak_bytes or 0)
        begin = f"no point fits in memory: the smallest of {len(too_big):,} ({smallest.experiment.id})"
        if cluster.usable_bytes is None:
            raise InvalidSweep(f"{begin}: {smallest.detail}; use a smaller model or micro-batch, or fewer processes")
        peak, limit = format_bytes(smallest.peak_bytes), format_bytes(cluster.usable_bytes)
        raise InvalidSweep(
            f"{begin} needs {peak} "
            f"on a device, {cluster.device.name} has {limit} for training; use more devices, tp, pp, "
            "ZeRO 3 or recompute, or set plan.run_predicted_oom=true to run it anyway"
        )
    rules = Counter(point.rule for point in plan.points)
    first = next(point for point in plan.points if point.rule == rules.most_common(1)[0][0])
    broken = ", ".join(f"{rule} ({count:,})" for rule, count in rules.most_common(4))
    raise InvalidSweep(f"no point can run; rules broken: {broken}; e.g. {first.detail}")


@dataclass(frozen=True, slots=True)
class _Failed:
    place: str
    known: bool
    """False: a value that the condition uses is not predicted."""


def _failed_condition(point: PlannedPoint, conditions: Mapping[str, Expression]) -> _Failed | None:
    """The first condition on predicted values that a point does not meet."""
    for place, condition in conditions.items():
        try:
            met = holds(condition, point)
        except MISTAKES as error:
            raise InvalidSweep(f"grid {point.grid}: {place}: {error}") from None
        if not met:
            return _Failed(place, met is not None)
    return None


class _Checked(NamedTuple):
    """A point checked against the rules."""

    planned: PlannedPoint
    structural: bool
    """Whether its layout breaks a rule that holds for every engine."""
    predicted: bool
    """Whether it can be predicted: its layout is valid, and its engine is ours or another one that can run it."""
    refused: bool

    @property
    def experiment(self) -> Experiment:
        return self.planned.experiment


def _checked(
    config: SweepConfig,
    point: GridPoint,
    method: Method,
    device_limit: DeviceLimit | None,
    host_bytes: int | None,
) -> _Checked:
    experiment, cluster = point.experiment, config.cluster
    share = host_bytes // experiment.world_size if host_bytes is not None else None
    limits = [limit for limit in (cluster.usable_bytes, share) if limit is not None]
    planned = PlannedPoint(grid=point.grid, experiment=experiment, verdict="run", limit_bytes=min(limits, default=None))
    broken = violations(experiment, cluster)
    structural = [violation for violation in broken if violation.rule != "engine_support"]
    too_wide = [] if structural else _too_wide(experiment, cluster, device_limit)
    if method != "measured" and not is_own(experiment):
        too_wide.append(Violation("engine_support", f"engine={experiment.engine} runs, but cannot be rehearsed"))
    if (unusable := unusable_here(experiment)) is not None:
        too_wide.append(Violation("engine_support", unusable))
    refused = (*structural, *broken, *too_wide)
    if refused:
        planned = dataclasses.replace(planned, verdict="invalid", rule=refused[0].rule, detail=refused[0].message)
    predicted = not structural and (is_own(experiment) or not refused)
    return _Checked(planned, bool(structural), predicted, bool(refused))


def _planned(
    config: SweepConfig,
    point: _Checked,
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
    if time is not None and tensor_bytes is not None and is_own(experiment):
        time = forecast.near_full(time, tensor_bytes)
    planned = dataclasses.replace(
        point.planned,
        peak_bytes=peak_bytes,
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
    # No run of another engine is refused by its structure alone.
    may_refuse = forecast.has_rows_of(experiment)
    if tensor_bytes is not None and may_refuse and not config.plan.run_predicted_oom:
        detail = _too_big(planned, stage, cluster.usable_bytes, host_bytes, config.plan.oom_margin)
        if detail is not None:
            return dataclasses.replace(planned, verdict="predicted_oom", detail=detail)
    return planned


def _audited(points: list[PlannedPoint], config: SweepConfig) -> list[PlannedPoint]:
    """Returns the points, with a share of those predicted not to fit in a device set to run on purpose, and the reason.

    Points whose processes share the memory of a machine are never chosen, because the machine itself would run out.
    """
    options, limit = config.plan, config.cluster.usable_bytes

    def refused(point: PlannedPoint) -> bool:
        return point.verdict == "predicted_oom" and limit is not None and (point.peak_bytes or 0) > limit

    def has_run(point: PlannedPoint) -> bool:
        """Chosen before, or measured elsewhere. A repeated plan counts these points, and so chooses no other in their
        place."""
        peak = point.peak_bytes or 0
        return point.verdict == "cached" and limit is not None and peak > limit * max(1.0, options.oom_margin)

    candidates = [point for point in points if refused(point) or has_run(point)]
    ids = audit.chosen((point.experiment.id for point in candidates), options.audit, options.audit_seed)
    if not ids:
        return points
    reason = f"run on purpose (plan.audit={options.audit:g}, seed {options.audit_seed}): predicted out of memory, "
    return [
        dataclasses.replace(point, verdict="run", rule=audit.RULE, detail=f"{reason}{point.detail}")
        if refused(point) and point.experiment.id in ids
        else point
        for point in points
    ]


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
    if together > host_bytes * margin:
        each = format_bytes(peak_bytes)
        size, needed = experiment.world_size, format_bytes(together)
        many = f"{size} processes need {needed} together, at most {each} each"
        return (
            f"{many if size > 1 else f'1 process needs {needed}'}; this machine has {format_bytes(host_bytes)} "
            f"x margin {margin:g} = {format_bytes(host_bytes * margin)}"
        )
    return None


def _without_repeated_stages(
    config: SweepConfig, method: Method, ordered: Sequence[PlannedPoint]
) -> list[PlannedPoint]:
    """Returns the points, each priced without the stages that an earlier point has rehearsed: those are not run
    again."""

    device: Literal["cuda", "cpu"] = "cuda" if method == "rehearsed" else "cpu"

    def task(experiment: Experiment) -> Task:
        return Task(
            attempt_id="",
            experiment=experiment,
            measure=config.measure,
            cluster=config.cluster,
            method=method,
            device=device,
        )

    shares = shared_stage_discount([point.experiment for point in ordered], task)
    result = []
    for point, share in zip(ordered, shares, strict=True):
        assert point.price is not None
        expected = point.price.expected_h
        priced = dataclasses.replace(
            point.price,
            expected_h=expected * share if expected is not None else None,
            worst_h=point.price.worst_h * share,
        )
        rehearsals = round(share * len(rehearsed_ranks(point.experiment)))
        result.append(dataclasses.replace(point, price=priced, rehearsals=rehearsals))
    return result


def _apply_budget(ordered: Sequence[PlannedPoint], budget_h: float | None) -> list[PlannedPoint]:
    costs = [point.price.charged_h for point in ordered if point.price is not None]
    fits = within_budget(costs, budget_h)
    result = [point for point, inside in zip(ordered, fits, strict=True) if inside]
    spent = sum(cost for cost, inside in zip(costs, fits, strict=True) if inside)
    for point, cost, inside in zip(ordered, costs, fits, strict=True):
        if not inside:
            detail = f"needs {cost:.3g} GPU-h; points before it take {spent:.3g} of {budget_h:g}"
            result.append(dataclasses.replace(point, verdict="over_budget", detail=detail))
    return result
