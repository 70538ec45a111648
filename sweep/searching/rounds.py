"""State of a search, read from its sweep's folder: which candidates ran, which run or wait, and what comes next.

A search stores no state of its own: every round reads the rows and the queue again, in the order of the attempts. So
the same command resumes wherever it was stopped, and rows from elsewhere count. Waiting points that were never begun
are chosen again every time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import Point, SweepDir, entry_names, key_of, split_name
from results.tables.store import read_runs
from sweep.composing.search_settings import Settings
from sweep.planning.point_verdict import PlannedPoint
from sweep.searching.checked import CHECKS, Checks
from sweep.searching.choice import MOST_FAILURES
from sweep.searching.planned import PlannedSpace
from sweep.searching.session import Session
from sweep.searching.space import OOM, RUNNING, UNTRIED
from workloads.spec.experiment import Experiment, from_dict, layout_id

_OF_A_RUN = ("outcome", "method", "step_time_s", "config_json", "started_at", "world_size", "duration_s", "nodes")
ROW_COLUMNS = [*_OF_A_RUN, *CHECKS]
_HOUR_S = 3600.0
REPRODUCIBLE = ("diverged", "cancelled")
"""Outcomes of a failure that another run would repeat, or that the user wanted."""


@dataclass(slots=True)
class SearchRound:
    """Current state of a search, from its folder."""

    session: Session
    planned: PlannedSpace
    times_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Step times of all runs of a candidate."""
    runs: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of attempts by cell, including failed ones."""
    gpu_hours: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    seeds: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Seeds of a candidate's points that were ever queued."""
    pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Candidates by cell with a point that runs, or that waits and must stay (a repeat, or begun before)."""
    waiting: dict[int, Point] = field(default_factory=dict)
    """Candidates whose point waits and was never begun, in the order in which they would run."""
    nodes: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Nodes on which a candidate ran."""

    @property
    def spent(self) -> float:
        return sum(self.gpu_hours.values())


def read_round(sweep: SweepDir | None, planned: PlannedSpace, settings: Settings, method: str) -> SearchRound:
    """Reads the state of a search. ``sweep`` None: nothing has run yet."""
    session = Session(planned.space, settings)
    now = SearchRound(session, planned)
    for place, row in enumerate(planned.known, start=len(planned.points)):
        session.seen.ended(place, "ok", row.step_time_s, float(planned.space.log_time[place]))
    if sweep is None:
        return now
    ended = _ended(sweep)  # read before the rows: a point ends after its row is written
    rows = read_runs(sweep.path).select(ROW_COLUMNS).to_pylist()
    rows = sorted((row for row in rows if row["method"] == method), key=lambda one: str(one["started_at"]))
    checks = Checks(planned.cluster, rows)
    for row in rows:
        _add_row(now, row, checks)
    _add_queue(now, sweep, ended)
    return now


def _ended(sweep: SweepDir) -> dict[str, str]:
    """Outcomes of the points that have ended, by experiment id."""
    return {key_of(name).partition("+")[0]: split_name(name)[1] for name in entry_names(sweep.done)}


def _add_row(now: SearchRound, row: Mapping[str, Any], checks: Checks) -> None:
    place = _place(now.planned, row["config_json"])
    if place is None:
        return
    cell = int(now.planned.space.cell[place])
    now.runs[cell] += 1
    devices = row["world_size"] if row["method"] == "measured" else 1
    now.gpu_hours[cell] += (row["duration_s"] or 0.0) * devices / _HOUR_S
    time_s = row["step_time_s"] if row["outcome"] == "ok" else None
    if time_s:
        now.times_s[place].append(float(time_s))
        now.nodes[place] += row["nodes"] or []
    if time_s:
        if len(now.times_s) == 1 and len(now.times_s[place]) == 1:
            now.planned.anchor(place, time_s)
        if len(now.times_s[place]) == 1:
            now.session.expect(place)
        probed = checks.probed(row, now.planned.points[place].experiment)
        now.session.tell(place, "ok", float(time_s), probed, row["nodes"] or ())
    elif place not in now.times_s and row["outcome"] == "oom":
        now.session.tell(place, "oom")


def _add_queue(now: SearchRound, sweep: SweepDir, ended: Mapping[str, str]) -> None:
    """Adds points that wait or run, and points that ended without a usable row. ``ended``: `_ended` from before the
    rows were read."""
    reader = QueueReader(sweep, "", lambda line: None)
    waiting = reader.waiting()
    claimed = reader.claimed_by_others()
    _add_ended(now, _ended(sweep), ended)
    begun = {split_name(name)[0] for name in entry_names(sweep.history)}
    for number, point in enumerate((*waiting, *claimed)):
        place = now.planned.place_of.get(layout_id(point.experiment))
        if place is None:
            continue
        untried = now.session.seen.state[place] == UNTRIED
        new = number < len(waiting) and point.stem not in begun and point.experiment.id == now.planned.ids[place]
        if new and untried:
            now.waiting[place] = point
            continue
        now.seeds[place].add(point.experiment.seed)
        _add_pending(now, place)


def _add_pending(now: SearchRound, place: int) -> None:
    """Adds a run in progress of a candidate."""
    seen = now.session.seen
    now.pending[int(now.planned.space.cell[place])].append(place)
    if seen.has_run(place):
        seen.repeating[place] += 1
    elif seen.state[place] != OOM:
        seen.state[place] = RUNNING


def _add_ended(now: SearchRound, done: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Adds the ended points of each candidate: their seeds, and those that failed or ran out of memory.

    ``done``: outcome by experiment id. ``before``: the same from before the rows were read. A success that was not
    there then, and whose row was not read, counts as in progress until the next look.
    """
    for place, one in enumerate(now.planned.ids):
        experiment, outcomes, late = now.planned.points[place].experiment, list[str](), 0
        seed = experiment.seed
        while one in done:
            outcomes.append(done[one])
            late += done[one] == "ok" and one not in before
            now.seeds[place].add(seed)
            seed += 1
            one = dataclasses.replace(experiment, seed=seed).id
        if "oom" in outcomes and not now.times_s.get(place) and now.session.seen.state[place] != OOM:
            now.session.tell(place, "oom")  # its row came after the rows were read
        timed = len(now.times_s.get(place, ()))
        unread = min(late, max(0, outcomes.count("ok") - timed))
        for _ in range(unread):
            _add_pending(now, place)
        for outcome in _failed(outcomes, timed + unread):
            now.session.tell(place, "other")
            if outcome in REPRODUCIBLE:
                now.session.seen.failures[place] = MOST_FAILURES


def _failed(outcomes: Sequence[str], timed: int) -> list[str]:
    """The outcomes of a candidate's ended points without those that are known: out of memory, and ``timed`` ones with a
    step time."""
    successes = outcomes.count("ok")
    return [one for one in outcomes if one not in ("ok", "oom")] + ["ok"] * max(0, successes - timed)


def _place(planned: PlannedSpace, text: str | None) -> int | None:
    import json

    from workloads.spec.errors import InvalidExperiment

    try:
        return planned.place_of.get(layout_id(from_dict(json.loads(text or ""))))
    except (ValueError, TypeError, KeyError, InvalidExperiment):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A run that the search wants next."""

    cell: int
    place: int
    point: PlannedPoint
    slow_step_s: float | None
    """Step time in seconds above which the run may end early."""
    ran_on: tuple[str, ...] = ()
    """Nodes on which the layout ran before."""


def next_points(now: SearchRound, settings: Settings) -> list[Wanted]:
    """Points that should wait in the queue, most promising of each cell first.

    In each unfinished cell they fill the batch in addition to running points: new candidates, those that failed again,
    and at last repeats of the best.
    """
    wanted: list[Wanted] = []
    session = now.session
    for cell in now.planned.names:
        room = settings.batch - len(now.pending.get(cell, []))
        if room <= 0 or session.end(cell) is not None:
            continue
        best, slow_s = session.best(cell), None
        if best is not None and settings.slow is not None:
            slow_s = settings.slow * exp(float(session.seen.log_time[best]))
        for one in session.ask(cell, room):
            point, again = now.planned.points[one], session.seen.has_run(one)
            if now.seeds.get(one):
                point = _repeated(point, now.seeds[one])
            ran_on = tuple(sorted(set(now.nodes.get(one, ()))))
            wanted.append(
                Wanted(cell=cell, place=one, point=point, slow_step_s=None if again else slow_s, ran_on=ran_on)
            )
    return wanted


def _repeated(point: PlannedPoint, tried: set[int]) -> PlannedPoint:
    """The same layout with a seed that was not run yet."""
    experiment: Experiment = point.experiment
    seed = max(tried, default=experiment.seed) + 1
    tried.add(seed)
    return dataclasses.replace(point, experiment=dataclasses.replace(experiment, seed=seed))
