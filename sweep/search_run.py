"""``search``: runs a few points at a time, chosen anew after every round, until a better layout is improbable."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp

from rich.console import Console
from threadpoolctl import threadpool_limits

from launchers.state.sweep_dir import Point, SweepDir
from launchers.status.run_summary import RunSummary
from results.errors import UltrasweepError
from results.text import device_noun, plural
from sweep.conffiles import ConfFolders
from sweep.plan import PlannedPoint
from sweep.price import within_budget
from sweep.run import Prepared, Queued, enqueue, point_of, prepare
from sweep.searching.planned import PlannedSpace, known_rows, planned_space
from sweep.searching.rounds import Round, next_points, read_round
from sweep.searching.space import RUNNING, UNTRIED
from sweep.summary import layout
from workloads.protocol import Method

Launch = Callable[[Queued], RunSummary]
_MOST_TIES = 4
ENDS = {
    "settled": "a better one is improbable",
    "patience": "nothing better came",
    "exhausted": "everything that may fit has run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A plan that is searched, and what the search may spend."""

    prepared: Prepared
    planned: PlannedSpace
    budget_gpu_hours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a search stands at its end."""

    round: Round
    probabilities: dict[int, float]
    summary: RunSummary | None
    """Of its last round; None: nothing had to run."""
    over_budget: bool


def prepare_search(overrides: Sequence[str], folders: ConfFolders, extra_where: Sequence[str]) -> Search:
    """Plan as `run` does; the budget is the search's to spend. Raises as `prepare`."""
    prepared = prepare(overrides, folders, extra_where)
    if prepared.dry:
        raise UltrasweepError("search: launcher.dry=true shows the batch files of `run`; a search chooses as it goes")
    budget = prepared.plan.config.budget_gpu_hours
    points = tuple(
        dataclasses.replace(point, verdict="run", detail=None) if point.verdict == "over_budget" else point
        for point in prepared.plan.points
    )
    prepared = dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, points=points))
    planned = planned_space(prepared.plan, known_rows(prepared.plan))
    if not planned.points:
        raise UltrasweepError("search: no point of the plan can run; `plan --show all` says why")
    return Search(prepared=prepared, planned=planned, budget_gpu_hours=budget)


# The matrices are small: more threads wait for each other.
@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]
def run_search(search: Search, launch: Launch, say: Callable[[str], None]) -> Found:
    """Rounds until every cell is done, the budget is spent, or a round was interrupted. ``launch`` runs what waits in
    the queue; points of an earlier command that wait are run first."""
    prepared, settings = search.prepared, search.prepared.plan.config.search
    # The ledger has the whole plan; the queue gets what is chosen.
    queued = enqueue(prepared, added=())
    sweep, summary, before = queued.sweep, None, -1
    index_of = {point.experiment.id: index for index, point in enumerate(prepared.plan.points)}
    while True:
        now = read_round(sweep, search.planned, settings, prepared.settings.method)
        probabilities = {cell: now.session.probability(cell) for cell in search.planned.names}
        told = sum(now.runs.values())
        if summary is not None and (summary.interrupted or summary.detached or summary.message or told == before):
            return _found(search, now, summary, over_budget=False)
        before = told
        wanted = next_points(now, probabilities, settings.repeats)
        costs = [_cost_h(now, cell, point) for cell, point in wanted]
        left = None if search.budget_gpu_hours is None else search.budget_gpu_hours - now.spent
        fits = within_budget(costs, left)
        chosen = [point for (_, point), inside in zip(wanted, fits, strict=True) if inside]
        if not chosen and not now.pending:
            return _found(search, now, summary, over_budget=bool(wanted))
        _add(sweep, prepared.settings.method, index_of, chosen)
        cells = len({cell for (cell, _), inside in zip(wanted, fits, strict=True) if inside})
        if chosen:
            say(f"search: {plural(len(chosen), 'point')} of {plural(cells, 'model and size', 'models and sizes')}")
        summary = launch(queued)


def _cost_h(now: Round, cell: int, point: PlannedPoint) -> float:
    """GPU-hours that a run may cost: as planned, or what runs of its cell have cost so far where that is not known."""
    assert point.price is not None
    if point.price.expected_h is None and now.runs.get(cell):
        return now.gpu_hours[cell] / now.runs[cell]
    return point.price.charged_h


def _found(search: Search, now: Round, summary: RunSummary | None, *, over_budget: bool) -> Found:
    """Candidates that were chosen, and that wait or are not paid for, count as not tried."""
    state = now.session.seen.state
    state[state == RUNNING] = UNTRIED
    probabilities = {cell: now.session.probability(cell) for cell in search.planned.names}
    return Found(round=now, probabilities=probabilities, summary=summary, over_budget=over_budget)


def _add(sweep: SweepDir, method: Method, index_of: Mapping[str, int], chosen: Sequence[PlannedPoint]) -> None:
    # A repeat with another seed is no point of the plan: it comes after all of them.
    points: list[Point] = [
        point_of(index_of.get(point.experiment.id, len(index_of) + number), point, method)
        for number, point in enumerate(chosen)
    ]
    sweep.add_points(points)


def print_search(search: Search, found: Found, console: Console) -> None:
    """Say of every model and size: the fastest layouts, how probable a better one is, and what that has cost."""
    now, within = found.round, search.prepared.plan.config.search.within
    for cell, name in search.planned.names.items():
        console.print(_told(search, found, cell, name), highlight=False, markup=False, soft_wrap=True)
        ties = now.session.ties(cell)
        for place in ties[:_MOST_TIES]:
            seconds = exp(float(now.session.seen.log_time[place]))
            runs = len(now.times_s[place])
            console.print(
                f"  {layout(search.planned.points[place].experiment)}: {seconds:.4g} s a step, {plural(runs, 'run')}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        if len(ties) > _MOST_TIES:
            console.print(
                f"  and {len(ties) - _MOST_TIES} more within {within * 100:g} %", highlight=False, markup=False
            )
    if found.over_budget:
        hours = search.budget_gpu_hours
        console.print(f"the budget of {hours:g} {_unit(search)} covers no further run", highlight=False, markup=False)


def _unit(search: Search) -> str:
    return f"{device_noun(search.prepared.plan.config.cluster.backend)}-hours"


def _told(search: Search, found: Found, cell: int, name: str) -> str:
    now, settings = found.round, search.prepared.plan.config.search
    own = search.planned.space.of(cell)
    states = Counter(int(one) for one in now.session.seen.state[own])
    probability = found.probabilities[cell]
    end = now.session.end(cell, probability)
    why = ENDS[end] if end is not None else "not settled"
    if now.session.best(cell) is None:
        return (
            f"{name}: nothing ran; {plural(now.runs[cell], 'run')}, {now.gpu_hours[cell]:.3g} {_unit(search)}, {why}; "
            f"{states[UNTRIED]} of {plural(len(own), 'layout')} not tried"
        )
    return (
        f"{name}: {why}; a layout faster by more than {settings.within * 100:g} % has probability {probability:.2f}; "
        f"{plural(now.runs[cell], 'run')}, {now.gpu_hours[cell]:.3g} {_unit(search)}; "
        f"{states[UNTRIED]} of {plural(len(own), 'layout')} not tried"
    )
