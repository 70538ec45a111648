"""The answer of ``advise``: the fastest layouts of some numbers of devices, or the fewest devices, and the least money,
that train a number of tokens in a number of days."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweep.advising.offloads import Rankings
from sweep.advising.published import PublishedLayout, published
from sweep.advising.question import OBJECTIVES, Goal, Question
from sweep.advising.ranked import Peak, Ranked, RankedLayout
from sweep.advising.times import Times
from sweep.predicting.known import Known, known_of
from sweep.predicting.power import Power
from workloads.spec.checks import choice
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.updates.words import UPDATE_FIELDS

TOP = 5
DAY_S, HOUR_S = 86_400.0, 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAnswer:
    """The best layouts of one number of devices."""

    ranked: Ranked
    smallest: tuple[Experiment, Peak] | None
    """If nothing fits: the layout with the lowest peak memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costed:
    """A layout with its days and device-hours for the goal's tokens."""

    ranked_layout: RankedLayout
    days: float
    device_hours: float
    slow_days: float
    """Days at the slow end of the predicted step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalAnswer:
    goal: Goal
    fewest: Costed | None
    """Layout on the fewest devices whose predicted time reaches the goal; None: none of the sizes does."""
    surely: Costed | None
    """Layout on the fewest devices that reaches the goal also at the slow end of its prediction."""
    cheapest: Costed | None
    """Layout with the fewest device-hours of those that reach the goal."""
    soonest: Costed | None
    """Layout with the fewest days; None also if the question does not optimise time."""
    sizes: tuple[int, ...]
    """Numbers of devices for which some layout obeys the rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    question: Question
    rankings: Rankings
    limit_bytes: int
    """Limit for the closed form of memory: usable bytes without the workspace of matrix products."""
    times: Times
    power: Power
    optimise: str | None
    """One of `OBJECTIVES`, by which layouts are ranked over all numbers of devices; None: each number has its own."""
    sizes: tuple[SizeAnswer, ...]
    """Answers for every number of devices for which some layout obeys the rules; empty for an inverse question."""
    goal: GoalAnswer | None
    published: tuple[PublishedLayout, ...]
    """Layouts that teams published for these numbers of devices; empty for an inverse question."""
    top: int
    """Number of layouts of each number of devices, and of `ranked`."""

    @property
    def best(self) -> tuple[RankedLayout, ...]:
        """All layouts that the answer names, each once."""
        layouts = [one for size in self.sizes for one in size.ranked.best] if self.optimise is None else [*self.ranked]
        if self.goal is not None:
            costed = (self.goal.fewest, self.goal.surely, self.goal.cheapest, self.goal.soonest)
            layouts += [one.ranked_layout for one in costed if one is not None]
        return tuple({one.experiment.id: one for one in layouts}.values())

    @property
    def ranked(self) -> tuple[RankedLayout, ...]:
        """The best layouts of all numbers of devices by the objective, best first; empty without one.

        The power of a device is the same for all layouts, so energy and cost both follow the device-hours of a token.
        """
        if self.optimise is None:
            return ()
        by_time = self.optimise == "time"

        def amount(one: RankedLayout) -> float:
            return one.time.cautious_s * (1 if by_time else one.experiment.world_size)

        layouts = [one for size in self.sizes for one in size.ranked.best]
        return tuple(sorted(layouts, key=lambda one: (amount(one), one.experiment.id))[: self.top])


def answer(question: Question, top: int = TOP, known: Known | None = None, optimise: str | None = None) -> Advice:
    """Answers a question. ``known``: measurements on the cluster; None: read the question's results folder.
    ``optimise``: one of `OBJECTIVES`, by which the layouts of all numbers of devices are ranked together.

    Raises `InvalidSweep` if no layout obeys the rules, if a device has too little memory for anything, or for energy if
    the power of the device is not known.
    """
    known = known_of(question.config) if known is None else known
    power = Power.of(question.cluster, known.power)
    if optimise is not None:
        _check_objective(optimise, question, power)
    times = Times.of(question, known)
    rankings = Rankings.of(question, times)
    goal, sizes = None, []
    if question.goal is not None:
        goal = _for_goal(rankings, question.goal, soonest=optimise == "time")
    else:
        for size in rankings.sizes:
            ranked = rankings.best(size, top)
            sizes.append(SizeAnswer(ranked=ranked, smallest=None if ranked.best else rankings.smallest(size)))
    return Advice(
        question=question,
        rankings=rankings,
        limit_bytes=question.usable_bytes - question.cluster.device.workspace_bytes,
        times=times,
        power=power,
        optimise=optimise,
        top=top,
        sizes=tuple(sizes),
        goal=goal,
        published=published(question, rankings.each[0]) if goal is None else (),
    )


def costed(ranked_layout: RankedLayout, goal: Goal) -> Costed:
    """A layout with its days and device-hours for the goal's tokens."""
    steps, size = goal.tokens / ranked_layout.experiment.tokens_per_step, ranked_layout.experiment.world_size
    return Costed(
        ranked_layout=ranked_layout,
        days=steps * ranked_layout.time.step_time_s / DAY_S,
        device_hours=steps * ranked_layout.time.step_time_s * size / HOUR_S,
        slow_days=steps * ranked_layout.time.high_s / DAY_S,
    )


def _check_objective(optimise: str, question: Question, power: Power) -> None:
    choice("advise: optimise", optimise, OBJECTIVES)
    if optimise == "energy" and not power.is_known:
        device = question.cluster.device.name
        raise InvalidSweep(
            f"advise: optimise=energy: the power of {device} is not known, neither from a measured row in "
            f"{question.config.results_dir} nor as power_w in its device file; give cluster.device.power_w=700"
        )


def _for_goal(rankings: Rankings, goal: Goal, *, soonest: bool) -> GoalAnswer:
    """Tries sizes from the smallest on, and skips those that cannot reach the goal by their bound.

    More devices cost more device-hours in nearly all cases, but not always: a larger cluster may do without
    recomputation. So every size is tried whose bound is below the cheapest so far.
    """
    sizes = rankings.sizes
    per_step = rankings.question.tokens_per_step
    steps = goal.tokens / per_step
    longest_s = goal.days * DAY_S / steps
    fewest = surely = cheapest = None
    for size in sizes:
        bound_s = rankings.bound_s(size)
        if not bound_s <= longest_s:
            continue
        if surely is not None and cheapest is not None and bound_s * steps * size / HOUR_S >= cheapest.device_hours:
            continue
        for layout in rankings.best(size, 1).best:
            one = costed(layout, goal)
            if one.days > goal.days:
                continue
            fewest = fewest or one
            surely = surely or (one if one.slow_days <= goal.days else None)
            if cheapest is None or one.device_hours < cheapest.device_hours:
                cheapest = one
    return GoalAnswer(
        goal=goal,
        fewest=fewest,
        surely=surely,
        cheapest=cheapest,
        soonest=_soonest(rankings, goal, sizes) if soonest and fewest is not None else None,
        sizes=sizes,
    )


def _soonest(rankings: Rankings, goal: Goal, sizes: Sequence[int]) -> Costed | None:
    """The layout with the fewest days. Sizes are tried in the order of their bounds, until none is left that may be
    faster."""
    best: Costed | None = None
    for bound_s, size in sorted((rankings.bound_s(size), size) for size in sizes):
        if best is not None and bound_s >= best.ranked_layout.time.step_time_s:
            break
        for layout in rankings.best(size, 1).best:
            one = costed(layout, goal)
            best = one if best is None or one.days < best.days else best
    return best


def settling_words(question: Question, best: Sequence[RankedLayout]) -> list[str]:
    """Arguments of ``python -m sweep search``, not quoted, for a search that measures the answer.

    The search covers the choices of the best layouts and all their combinations. Raises `InvalidSweep` without a
    layout.
    """
    if not best:
        raise InvalidSweep("advise: nothing fits, so nothing is left to settle")
    words = ["+grid=one_point", f"model={question.model_given}", f"cluster={question.cluster_name}"]
    words += question.cluster_changes
    words += [f"+grid.axes.engine={question.engine}"] if question.engine != ENGINE else []
    words += [f"+grid.axes.memory_budget={question.memory_budget:g}"] if question.memory_budget is not None else []
    sizes = dict.fromkeys(one.experiment.world_size for one in best)
    for name in _AXES:
        values = list(dict.fromkeys(getattr(one.experiment, name) for one in best))
        if values != [_USUAL[name]]:
            written = [_written(value) for value in values]
            words.append(f"grid.axes.{name}={written[0] if len(written) == 1 else '[' + ','.join(written) + ']'}")
    asked = [word for one in question.where for word in ("--where", one.text)]
    conf = [word for folder in question.conf for word in ("--conf", str(folder))]
    return [*words, *conf, "--where", " or ".join(f"world_size == {size}" for size in sizes), *asked]


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_AXES = (
    *("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "micro_batch_size", "global_batch_size", "seq_len"),
    *("zero_stage", "recompute", "recompute_every", "pp_schedule", "virtual_stages", "cp_kind", "precision", "routing"),
    *("routing_imbalance", "compile", "cuda_graph", "activation_offload", "recurrence", *UPDATE_FIELDS),
)
_USUAL = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "micro_batch_size"), 1),
    "global_batch_size": 1,
    "seq_len": 4096,
    "zero_stage": 0,
    "recompute": "none",
    "recompute_every": 1,
    "pp_schedule": "none",
    "virtual_stages": 1,
    "cp_kind": "ring",
    "precision": "bf16",
    "routing": "balanced",
    "routing_imbalance": 1.0,
    "compile": "none",
    "cuda_graph": "auto",
    "activation_offload": "none",
    "recurrence": "torch",
    **UPDATE_FIELDS,
}
"""Values in the grid `one_point`."""
