"""``search``: runs a few points at a time, chosen again after every run, until a better layout is improbable."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

from rich.console import Console
from threadpoolctl import threadpool_limits

from launchers.state.sweep_dir import Point, SweepDir
from launchers.status.run_summary import RunSummary
from results.errors import UltrasweepError
from results.text.numbers import device_noun, plural
from sweep.composing.conffiles import ConfFolders
from sweep.planning.summary import layout
from sweep.running.run import Prepared, Queued, enqueued, point_of, prepare
from sweep.searching.feeding import Feeder, choose_points
from sweep.searching.planned import PlannedSpace, known_rows, planned_space
from sweep.searching.rounds import SearchRound, read_round
from sweep.searching.space import RUNNING, UNTRIED

Feed = Callable[[], str]
"""Called by the launcher each time it reads the sweep's status: may add points to the queue. Returns a line for the
user; empty if there is nothing to say."""
Launch = Callable[[Queued, Feed], RunSummary]
LINGER_S = 10.0
"""Seconds that a pilot without a point waits for another one: longer than the interval at which a launcher reads the
status and adds points."""
SIDE_BY_SIDE_H = 0.01
"""Default of ``launcher.target_h`` for a search. It is so low that each waiting point may get a pilot of its own."""
_MOST_TIES = 4
ENDS = {
    "settled": "a better layout is improbable",
    "patience": "no better layout for long enough",
    "exhausted": "every layout that may fit has run",
    "tied": "the fastest cannot be told apart, and more repeats are not allowed (search.repeats) or would hardly help",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A plan to search, and the budget of the search."""

    prepared: Prepared
    planned: PlannedSpace
    budget_gpu_hours: float | None

    @property
    def most_points(self) -> int:
        """Runs of the search if every layout runs once and all repeats are used."""
        return len(self.planned.points) + len(self.planned.names) * self.prepared.plan.config.search.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Result of a search."""

    round: SearchRound
    probabilities: dict[int, float]
    summary: RunSummary | None
    """Summary of its last round; None: nothing had to run."""
    over_budget: bool


def prepare_search(overrides: Sequence[str], folders: ConfFolders, extra_where: Sequence[str]) -> Search:
    """Plan as `run` does, but leave the budget to the search. Raises the errors of `prepare`."""
    prepared = prepare(overrides, folders, extra_where)
    budget = prepared.plan.config.budget_gpu_hours
    points = tuple(
        dataclasses.replace(point, verdict="run", detail=None) if point.verdict == "over_budget" else point
        for point in prepared.plan.points
    )
    settings = dataclasses.replace(prepared.settings, linger_s=LINGER_S)
    slurm = prepared.slurm
    if slurm is not None and slurm.target_h is None:
        slurm = dataclasses.replace(slurm, target_h=SIDE_BY_SIDE_H)
    plan = dataclasses.replace(prepared.plan, points=points)
    prepared = dataclasses.replace(prepared, plan=plan, settings=settings, slurm=slurm)
    planned = planned_space(prepared.plan, known_rows(prepared.plan))
    if not planned.points:
        raise UltrasweepError("search: no point of the plan can run; `plan --show all` lists the reasons")
    return Search(prepared=prepared, planned=planned, budget_gpu_hours=budget)


def first_points(search: Search) -> list[Point]:
    """The points that would wait in the queue when the search begins or goes on. Nothing is written."""
    path, prepared = search.prepared.plan.config.sweep_dir, search.prepared
    sweep = SweepDir.open(path) if SweepDir(path).marker.exists() else None
    settings, method = prepared.plan.config.search, prepared.settings.method
    now = read_round(sweep, search.planned, settings, method)
    choice = choose_points(now, settings, search.budget_gpu_hours)
    return [point_of(one.place, one.point, method) for one in choice.chosen]


# The matrices are small: more threads would only wait for each other.
@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]
def run_search(search: Search, launch: Launch, say: Callable[[str], None]) -> SearchOutcome:
    """Launch until every cell is done, the budget is spent, or the user interrupts.

    ``launch`` runs the waiting points of the queue and calls the feed to add more.
    """
    # The ledger has the whole plan; the queue only gets chosen points.
    with enqueued(search.prepared, added=()) as queued:
        return _search(search, queued, launch, say)


def _search(search: Search, queued: Queued, launch: Launch, say: Callable[[str], None]) -> SearchOutcome:
    prepared, settings = search.prepared, search.prepared.plan.config.search
    method = prepared.settings.method
    summary, before = None, -1
    while True:
        if summary is not None and (summary.interrupted or summary.detached or summary.message):
            now = read_round(queued.sweep, search.planned, settings, method)
            return _outcome(search, now, summary, over_budget=False)
        feeder = Feeder(queued.sweep, search.planned, settings, method, search.budget_gpu_hours)
        look = feeder.look()
        attempts = sum(look.round.runs.values())
        if not look.chosen and not look.round.pending:
            return _outcome(search, look.round, summary, over_budget=look.over_budget)
        if summary is not None and attempts == before:
            return _outcome(search, look.round, summary, over_budget=False)
        before = attempts
        if look.added:
            say(feeder.message(look))
        summary = launch(queued, feeder.feed)


def _outcome(search: Search, now: SearchRound, summary: RunSummary | None, *, over_budget: bool) -> SearchOutcome:
    """The outcome at the end of the search. Candidates that were chosen but have not run count as not tried."""
    seen = now.session.seen
    seen.state[seen.state == RUNNING] = UNTRIED
    seen.repeating[:] = 0
    probabilities = {cell: now.session.probability(cell) for cell in search.planned.names}
    return SearchOutcome(round=now, probabilities=probabilities, summary=summary, over_budget=over_budget)


def print_search(search: Search, result: SearchOutcome, console: Console) -> None:
    """Print for every model and size: the fastest layouts, the probability of a better one, and the cost so far."""
    now = result.round
    for cell, name in search.planned.names.items():
        console.print(_cell_line(search, result, cell, name), highlight=False, markup=False, soft_wrap=True)
        ties = now.session.ties(cell)
        for place in ties[:_MOST_TIES]:
            seconds = exp(float(now.session.seen.log_time[place]))
            times_s = now.times_s[place]
            between = f" from {min(times_s):.4g} to {max(times_s):.4g} s" if len(times_s) > 1 else ""
            console.print(
                f"  {layout(search.planned.points[place].experiment)}: {seconds:.4g} s a step, "
                f"{plural(len(times_s), 'run')}{between}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        if len(ties) > _MOST_TIES:
            console.print(f"  {len(ties) - _MOST_TIES} more may be the fastest", highlight=False, markup=False)
    if result.over_budget:
        hours = search.budget_gpu_hours
        console.print(f"the budget of {hours:g} {_unit(search)} covers no further run", highlight=False, markup=False)


def _unit(search: Search) -> str:
    return f"{device_noun(search.prepared.plan.config.cluster.backend)}-hours"


def _cell_line(search: Search, result: SearchOutcome, cell: int, name: str) -> str:
    now, settings = result.round, search.prepared.plan.config.search
    candidates = search.planned.space.of(cell)
    states = Counter(int(one) for one in now.session.seen.state[candidates])
    probability = result.probabilities[cell]
    end = now.session.end(cell)
    why = ENDS[end] if end is not None else "not settled"
    if now.session.best(cell) is None:
        return (
            f"{name}: nothing ran; {plural(now.runs[cell], 'run')}, {now.gpu_hours[cell]:.3g} {_unit(search)}, {why}; "
            f"{states[UNTRIED]} of {plural(len(candidates), 'layout')} not tried"
        )
    return (
        f"{name}: {why}; a layout faster by more than {settings.within * 100:g} % has probability {probability:.2f}; "
        f"{plural(now.runs[cell], 'run')}, {now.gpu_hours[cell]:.3g} {_unit(search)}; "
        f"{states[UNTRIED]} of {plural(len(candidates), 'layout')} not tried"
    )
