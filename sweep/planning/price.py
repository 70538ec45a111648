"""The cost of a point in device-hours, the order in which points are run, and which of them a budget covers.

Order ("cheapest information first"): points are grouped in cells of one model, routing, world size and sequence length.
Every cell's predicted fastest point comes first, then every cell's second, and so on; among points of equal rank the
cheaper comes first. So a sweep that ends early (by its budget, or by hand) has run the likely best layout of every cell
before the fortieth of any. If no speed can be predicted, the order of the grid is the rank.

Points take their expected hours from the budget in that order (their worst case if no time can be predicted). A point
that no longer fits gets the verdict ``over_budget``; cheaper points after it may still fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from results.text.numbers import name_routing
from sweep.composing.config import PlanOptions
from sweep.grids.step_time import StepTime
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Method, Task
from workloads.contract.stages import rehearsed_ranks, shortened, stage_key
from workloads.spec.cluster import ClusterSpec
from workloads.spec.documents.lengths import without_path
from workloads.spec.experiment import Experiment

_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Device-hours of one point. A rehearsal uses one device, whatever the layout."""

    devices: int
    expected_h: float | None
    """None: the step time cannot be predicted."""
    worst_h: float
    """Device-hours if the point uses its whole deadline."""
    deadline_s: float

    @property
    def charged_h(self) -> float:
        """Device-hours that the point takes from a budget."""
        return self.expected_h if self.expected_h is not None else self.worst_h


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The size of an allocation: ``devices`` in all, on ``nodes``."""

    nodes: int
    devices: int


def price(
    experiment: Experiment, time: StepTime | None, method: Method, measure: MeasureSpec, options: PlanOptions
) -> Price:
    """Cost and deadline of one point. ``time`` None: its step time cannot be predicted."""
    compile_s = options.compile_s if experiment.compile != "none" else 0.0
    if method == "measured":
        devices, overhead_s = experiment.world_size, options.overhead_s + compile_s
        steps_s = measure.steps_of(time.step_time_s) * time.step_time_s if time is not None else None
    else:
        ranks = len(rehearsed_ranks(experiment))
        devices, overhead_s = 1, ranks * (options.rehearsed_rank_s + compile_s)
        one_rank_s = _rehearsed_steps_s(experiment, time, method, measure)
        steps_s = ranks * one_rank_s if one_rank_s is not None else None
    deadline = options.deadline
    extra_s = deadline.factor * steps_s if steps_s is not None else deadline.without_estimate_s
    deadline_s = deadline.base_s + overhead_s + extra_s
    return Price(
        devices=devices,
        expected_h=(overhead_s + steps_s) * devices / _HOUR if steps_s is not None else None,
        worst_h=deadline_s * devices / _HOUR,
        deadline_s=deadline_s,
    )


def _rehearsed_steps_s(
    experiment: Experiment, time: StepTime | None, method: Method, measure: MeasureSpec
) -> float | None:
    """Seconds for the steps of one rank: compute only, over few micro-batches. 0 on FakeTensor; None: unknown."""
    if method == "rehearsed_fake":
        return 0.0
    if time is None:
        return None
    share = shortened(experiment).num_microbatches / experiment.num_microbatches
    step_s = time.compute_s * share + time.optimizer_s
    return measure.steps_of(step_s) * step_s


def shape(experiment: Experiment, method: Method, cluster: ClusterSpec) -> JobShape:
    """The allocation that a point runs in."""
    if method != "measured":
        return JobShape(nodes=1, devices=1)
    size = experiment.world_size
    return JobShape(nodes=-(-size // cluster.devices_per_node), devices=size)


def information_order(
    experiments: Sequence[Experiment], rates: Sequence[float | None], prices: Sequence[Price]
) -> list[int]:
    """Indices of the points in the order in which they are run. ``rates``: predicted tokens/s/GPU, or None."""
    cells: dict[tuple[str, str, str | None, int, int], list[int]] = defaultdict(list)
    for position, e in enumerate(experiments):
        routing = name_routing(e.routing, e.routing_imbalance, e.capacity_factor)
        cells[e.model.name, routing, without_path(e.documents), e.world_size, e.seq_len].append(position)
    rank: dict[int, int] = {}
    for members in cells.values():
        members.sort(key=lambda position: -(rates[position] or 0.0))
        rank.update({position: place for place, position in enumerate(members)})
    return sorted(range(len(experiments)), key=lambda at: (rank[at], prices[at].charged_h, at))


def within_budget(costs: Sequence[float], budget_h: float | None) -> list[bool]:
    """For each of ``costs`` (device-hours), in order, whether the budget covers it; None: no budget, all are
    covered."""
    if budget_h is None:
        return [True] * len(costs)
    left, fits = budget_h, []
    for cost in costs:
        fits.append(cost <= left)
        left -= cost if fits[-1] else 0.0
    return fits


def shared_stage_discount(experiments: Sequence[Experiment], task: Callable[[Experiment], Task]) -> list[float]:
    """For each point, the share of its ranks that no earlier point has rehearsed; only those cost anything."""
    seen: set[str] = set()
    shares = []
    for experiment in experiments:
        ranks = rehearsed_ranks(experiment)
        keys = {stage_key(task(experiment), rank) for rank in ranks}
        shares.append(len(keys - seen) / len(ranks))
        seen |= keys
    return shares
