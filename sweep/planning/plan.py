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
from typing import Literal

from results.text.numbers import format_bytes, plural
from sweep.composing.config import SweepConfig
from sweep.grids.columns import holds
from sweep.grids.expand import Expansion, ruled_out
from sweep.grids.walk import MISTAKES, Progress, silent
from sweep.planning import audit
from sweep.planning.point_verdict import DeviceLimit, PlannedPoint, check_point, with_verdict
from sweep.planning.price import information_order, shared_stage_discount, within_budget
from sweep.planning.reuse import FinishedAttempt
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known
from sweep.predicting.narrowed import Narrowed, narrowed
from sweep.predicting.power import Power
from workloads.contract.protocol import Method, Task
from workloads.contract.stages import rehearsed_ranks
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment, layout_id
from workloads.spec.expressions import Expression

_PROGRESS_EVERY = 500
"""Number of points between two progress reports."""


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
    power: Power
    """Power of a device, from which the energy of a token follows."""
    predicted_with: str = ""
    """Earlier measurements used for the step times, in words; empty: none."""
    fitted: frozenset[str] = frozenset()
    """Engines whose step times are fitted to measured rows, by `sweep.predicting.codebases.key_of_engine`."""
    narrowed: Narrowed | None = None
    """By how much they have narrowed the intervals of step times; None: there are none."""

    @property
    def to_run(self) -> tuple[PlannedPoint, ...]:
        return tuple(point for point in self.points if point.verdict == "run")

    @property
    def counts(self) -> Counter[str]:
        return Counter(point.verdict for point in self.points)

    @property
    def broken_rules(self) -> Counter[str]:
        """Number of points that break each rule; a point counts for every rule that it breaks."""
        return Counter(rule for point in self.points for rule in point.broken_rules)


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
    checked = [check_point(config, point, method, widest, host_bytes) for point in expansion.points]
    possible = [one.experiment for one in checked if one.predicted]
    # Computing the id of a layout means hashing it, which is slow. So compare everything before the hash first.
    ran = {name[:-8] for name in known.steps} if known else set()
    forecast = Forecast.of(config.cluster, known, [layout_id(one) for one in possible if ran and one.id[:-8] in ran])
    times = iter(forecast.times([_as_run(one, config) for one in possible]))
    for done, one in enumerate(checked):
        if not done % _PROGRESS_EVERY:
            progress("points predicted", done, count)
        planned_point = one.planned
        if not one.structural:
            time = next(times) if one.predicted else None
            planned_point = with_verdict(config, one, forecast, time, method, finished, host_bytes, peaks)
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
        power=Power.of(config.cluster, known.power if known is not None else None),
        predicted_with=forecast.used_for({(one.engine, one.engine_version) for one in possible}),
        fitted=frozenset(forecast.fitted),
        narrowed=narrowed(forecast, possible),
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
        margin = plan.config.plan.oom_margin
        if (smallest.peak_bytes or 0) <= cluster.usable_bytes * margin:
            host, on_host = cluster.host.memory_bytes, smallest.host_memory_bytes
            if host is None or on_host is None or on_host <= host * margin:
                raise InvalidSweep(
                    f"{begin}: {smallest.detail}; use a larger memory_budget, more devices, tp, pp, ZeRO 3, "
                    "smaller micro-batches or recompute=auto"
                )
            raise InvalidSweep(
                f"{begin}: {smallest.detail}; use a smaller optimizer_offload, "
                "fewer words of activation_offload, or more nodes"
            )
        peak, limit = format_bytes(smallest.peak_bytes), format_bytes(cluster.usable_bytes)
        raise InvalidSweep(
            f"{begin} needs {peak} "
            f"on a device, {cluster.device.name} has {limit} for training; use more devices, tp, pp, "
            "ZeRO 3 or recompute, or set plan.run_predicted_oom=true to run it anyway"
        )
    rules = plan.broken_rules
    most = rules.most_common(1)[0][0]
    first = next(one.message for point in plan.points for one in point.broken if one.rule == most)
    broken = ", ".join(f"{rule} ({count:,})" for rule, count in rules.most_common(4))
    raise InvalidSweep(f"no point can run; rules broken: {broken}; e.g. {first}")


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


def _as_run(experiment: Experiment, config: SweepConfig) -> Experiment:
    """The experiment whose step time a run measures: without a graph if too few steps come before the timed ones."""
    if experiment.cuda_graph != "auto" or config.measure.too_few_to_capture is None:
        return experiment
    return experiment.replace(cuda_graph="none")


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
