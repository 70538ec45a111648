"""The plan: every grid point with a verdict, its numbers and its price. No torch, no GPU, nothing is started.

invalid         a rule of the layout (or of this version of the engine, or of this machine) forbids it
predicted_oom   its predicted peak exceeds what a device can hold, with a margin
cached          the results folder has a row that answers it
over_budget     the budget ends before it
run             everything else
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from results.text import format_bytes
from sweep.config import SweepConfig
from sweep.expand import Expansion, GridPoint
from sweep.price import Price, information_order, price, shared_stage_discount, spend
from workloads.cluster import ClusterSpec
from workloads.costs.memory import estimate_memory
from workloads.costs.timeline import TimeEstimate, estimate_time
from workloads.errors import InvalidSweep
from workloads.experiment import Experiment
from workloads.protocol import Method, Task
from workloads.rules import violations


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    grid: str
    experiment: Experiment
    verdict: str
    rule: str | None = None
    detail: str | None = None
    peak_bytes: int | None = None
    """Predicted; None for an invalid layout, of which nothing can be predicted."""
    time: TimeEstimate | None = None
    price: Price | None = None
    cached_attempt: str | None = None

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
    """Those to run first, in the order in which they are drawn, then the others in the order of their grids."""
    duplicates: int
    not_sampled: int

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished attempt that a point need not repeat."""

    attempt_id: str
    sweep: str
    outcome: str


def make_plan(
    config: SweepConfig,
    expansion: Expansion,
    method: Method,
    answers: Mapping[str, Answer] | None = None,
    device_limit: DeviceLimit | None = None,
) -> Plan:
    """Judge every point.

    ``answers``: by experiment id, what the results folder knows for this method and device. ``device_limit``: what the
    launcher can give one point; None: as many nodes of the cluster as it needs.
    """
    answers = {} if config.plan.run_cached else answers or {}
    judged = [_judge(config, point, method, answers, device_limit) for point in expansion.points]
    candidates = [point for point in judged if point.verdict == "run"]
    others = [point for point in judged if point.verdict != "run"]
    prices = [point.price for point in candidates if point.price is not None]
    assert len(prices) == len(candidates)
    order = information_order(
        [point.experiment for point in candidates], [point.tokens_per_s_per_gpu for point in candidates], prices
    )
    ordered = [candidates[at] for at in order]
    if method != "measured":
        ordered = _without_repeated_stages(config, method, ordered)
    funded = _fund(ordered, config.budget_gpu_hours)
    return Plan(
        config=config,
        method=method,
        points=(*funded, *others),
        duplicates=expansion.duplicates,
        not_sampled=expansion.not_sampled,
    )


def refuse_hopeless(plan: Plan) -> None:
    """Raise `InvalidSweep` when no point can ever run: the plan is then the answer to a mistake."""
    counts = plan.counts
    if counts["run"] or counts["cached"] or counts["over_budget"]:
        return
    cluster = plan.config.cluster
    too_big = [point for point in plan.points if point.verdict == "predicted_oom" and point.peak_bytes is not None]
    if too_big:
        smallest = min(too_big, key=lambda point: point.peak_bytes or 0)
        peak, limit = format_bytes(smallest.peak_bytes), format_bytes(cluster.usable_bytes)
        raise InvalidSweep(
            f"no point fits in memory: the smallest of {len(too_big):,} ({smallest.experiment.id}) needs {peak} "
            f"on a device, {cluster.device.name} has {limit} for training; use more devices, tp, pp, "
            "ZeRO 3 or recompute, or plan.run_predicted_oom=true to try"
        )
    rules = Counter(point.rule for point in plan.points)
    first = next(point for point in plan.points if point.rule == rules.most_common(1)[0][0])
    told = ", ".join(f"{rule} ({count:,})" for rule, count in rules.most_common(4))
    raise InvalidSweep(f"no point can run; rules broken: {told}; e.g. {first.detail}")


def known_answers(results_dir: Path, method: Method, cluster: ClusterSpec) -> dict[str, Answer]:
    """Attempts below ``results_dir`` that settle their experiment on this device: ``ok``, and ``oom`` (which repeats).

    Rehearsals count for the same cluster file (their communication comes from it), measured runs also for another file
    that describes the device they ran on. A folder that does not exist, or holds no sweep yet, knows nothing.
    """
    if not results_dir.exists():
        return {}
    from results.errors import InvalidResults
    from results.schema import MEASUREMENT_VERSION
    from results.store import read_attempts

    if not results_dir.is_dir():
        raise InvalidSweep(f"results_dir={results_dir} is a file; give the folder that holds the sweeps")
    try:
        table = read_attempts(results_dir)
    except InvalidResults:
        return {}
    columns = [
        "experiment_id",
        "attempt_id",
        "sweep",
        "outcome",
        "method",
        "cluster",
        "device_name",
        "measurement_version",
    ]
    names = {cluster.device.name, *cluster.device.driver_names}
    answers: dict[str, Answer] = {}
    for row in table.select(columns).to_pylist():
        same_device = row["cluster"] == cluster.name or (method == "measured" and row["device_name"] in names)
        if (
            row["method"] == method
            and row["measurement_version"] == MEASUREMENT_VERSION
            and row["outcome"] in ("ok", "oom")
            and same_device
        ):
            answer = Answer(attempt_id=row["attempt_id"], sweep=row["sweep"] or "?", outcome=row["outcome"])
            answers.setdefault(row["experiment_id"], answer)
    return answers


def _judge(
    config: SweepConfig,
    point: GridPoint,
    method: Method,
    answers: Mapping[str, Answer],
    device_limit: DeviceLimit | None,
) -> PlannedPoint:
    experiment, cluster = point.experiment, config.cluster
    planned = PlannedPoint(grid=point.grid, experiment=experiment, verdict="run")
    broken = violations(experiment, cluster)
    if (
        device_limit is not None
        and method == "measured"
        and experiment.world_size > device_limit.devices
        and not broken
    ):
        message = f"needs {experiment.world_size} devices, {device_limit.why}"
        return dataclasses.replace(planned, verdict="invalid", rule="launcher_devices", detail=message)
    structural = [violation for violation in broken if violation.rule != "engine_support"]
    if broken:
        first = structural[0] if structural else broken[0]
        planned = dataclasses.replace(planned, verdict="invalid", rule=first.rule, detail=first.message)
        if structural:
            return planned
    # What the engine cannot run yet is predicted nevertheless: that is what the plan is asked for.
    memory, time = estimate_memory(experiment), estimate_time(experiment, cluster)
    planned = dataclasses.replace(
        planned,
        peak_bytes=memory.peak_bytes,
        time=time,
        price=price(experiment, time, method, config.measure, config.plan),
    )
    if broken:
        return planned
    if answers and (answer := answers.get(experiment.id)) is not None:
        detail = f"{answer.outcome} in attempt {answer.attempt_id} of sweep {answer.sweep}"
        return dataclasses.replace(planned, verdict="cached", detail=detail, cached_attempt=answer.attempt_id)
    limit, margin = cluster.usable_bytes, config.plan.oom_margin
    if limit is not None and memory.peak_bytes > limit * margin and not config.plan.run_predicted_oom:
        detail = (
            f"stage {memory.peak_stage} of {experiment.pp} needs {format_bytes(memory.peak_bytes)}; "
            f"{format_bytes(limit)} x margin {margin:g} = {format_bytes(limit * margin)}"
        )
        return dataclasses.replace(planned, verdict="predicted_oom", detail=detail)
    return planned


def _without_repeated_stages(
    config: SweepConfig, method: Method, ordered: Sequence[PlannedPoint]
) -> list[PlannedPoint]:
    """The same points with the price of what is new in each: stages rehearsed for one are reused by all others."""

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
        result.append(dataclasses.replace(point, price=priced))
    return result


def _fund(ordered: Sequence[PlannedPoint], budget_h: float | None) -> list[PlannedPoint]:
    costs = [point.price.charged_h for point in ordered if point.price is not None]
    paid = spend(costs, budget_h)
    funded = [point for point, fits in zip(ordered, paid, strict=True) if fits]
    spent = sum(cost for cost, fits in zip(costs, paid, strict=True) if fits)
    for point, cost, fits in zip(ordered, costs, paid, strict=True):
        if not fits:
            detail = f"needs {cost:.3g} GPU-h; points before it take {spent:.3g} of {budget_h:g}"
            funded.append(dataclasses.replace(point, verdict="over_budget", detail=detail))
    return funded
