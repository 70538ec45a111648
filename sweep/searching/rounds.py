"""State of a search, read from its sweep's folder: which candidates ran, which run or wait, and what comes next.

A search stores no state of its own: every round reads the rows and the queue again, in the order of the attempts. So
the same command resumes wherever it was stopped, and rows from elsewhere count. Waiting points that were never begun
are chosen again every time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
from statistics import median
from typing import Any

from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import Point, SweepDir, entry_names, key_of, split_name
from results.tables.store import read_runs
from sweep.composing.search_settings import Settings
from sweep.planning.point_verdict import PlannedPoint
from sweep.searching.checked import CHECKS, Checks
from sweep.searching.choice import to_repeat
from sweep.searching.planned import PlannedSpace
from sweep.searching.session import Session
from sweep.searching.space import RUNNING, UNTRIED
from workloads.spec.experiment import Experiment, from_dict, layout_id

_OF_A_RUN = ("outcome", "method", "step_time_s", "config_json", "started_at", "world_size", "duration_s", "nodes")
ROW_COLUMNS = [*_OF_A_RUN, *CHECKS]
_HOUR_S = 3600.0


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
    rows = read_runs(sweep.path).select(ROW_COLUMNS).to_pylist()
    rows = sorted((row for row in rows if row["method"] == method), key=lambda one: str(one["started_at"]))
    checks = Checks(planned.cluster, rows)
    for row in rows:
        _add_row(now, row, checks)
    _add_queue(now, sweep)
    return now


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
    if len(now.times_s.get(place, ())) > 1:
        now.session.again(place, median(now.times_s[place]))
    elif time_s:
        if len(now.times_s) == 1:
            now.planned.anchor(place, time_s)
        now.session.expect(place)
        probed = checks.probed(row, now.planned.points[place].experiment)
        now.session.tell(place, "ok", float(time_s), probed)
    elif place not in now.times_s and row["outcome"] == "oom":
        now.session.tell(place, "oom")


def _add_queue(now: SearchRound, sweep: SweepDir) -> None:
    """Adds points that wait or run, and points that ended without a usable row."""
    reader = QueueReader(sweep, "", lambda line: None)
    waiting = reader.waiting()
    begun = {split_name(name)[0] for name in entry_names(sweep.history)}
    for number, point in enumerate((*waiting, *reader.claimed_by_others())):
        place = now.planned.place_of.get(layout_id(point.experiment))
        if place is None:
            continue
        untried = now.session.seen.state[place] == UNTRIED
        new = number < len(waiting) and point.stem not in begun and point.experiment.id == now.planned.ids[place]
        if new and untried:
            now.waiting[place] = point
            continue
        now.pending[int(now.planned.space.cell[place])].append(place)
        now.seeds[place].add(point.experiment.seed)
        if untried:
            now.session.seen.state[place] = RUNNING
    done = {key_of(name).partition("+")[0]: split_name(name)[1] for name in entry_names(sweep.done)}
    for place, one in enumerate(now.planned.ids):
        if one in done and now.session.seen.state[place] == UNTRIED:
            now.session.tell(place, "other")
    for place in now.times_s:
        experiment = now.planned.points[place].experiment
        seed = experiment.seed
        while dataclasses.replace(experiment, seed=seed).id in done:
            now.seeds[place].add(seed)
            seed += 1


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
    """For a repeat: nodes on which the layout ran before."""


def next_points(now: SearchRound, probabilities: Mapping[int, float], settings: Settings) -> list[Wanted]:
    """Points that should wait in the queue, most promising of each cell first.

    These are new candidates of unfinished cells, to fill each batch in addition to running points, and repeats of the
    top candidates of finished cells with no run in progress.
    """
    wanted: list[Wanted] = []
    for cell, probability in probabilities.items():
        session, pending = now.session, now.pending.get(cell, [])
        if session.end(cell, probability) is None:
            room = settings.batch - len(pending)
            best = session.best(cell)
            slow_s = None
            if best is not None and settings.slow is not None:
                slow_s = settings.slow * exp(float(session.seen.log_time[best]))
            wanted += [
                Wanted(cell=cell, place=one, point=now.planned.points[one], slow_step_s=slow_s)
                for one in (session.ask(cell, room) if room > 0 else ())
            ]
        elif not pending:
            wanted += _repeats(now, cell, settings.repeats)
    return wanted


def _repeats(now: SearchRound, cell: int, repeats: int) -> list[Wanted]:
    """Repeats of the top candidates of a finished cell, in turn."""
    repeated = []
    for one in to_repeat(now.planned.space, now.session.seen, cell) if repeats else ():
        tried, ran_on = now.seeds[one], tuple(sorted(set(now.nodes[one])))
        missing = 1 + repeats - max(len(tried), len(now.times_s[one]))
        for turn in range(missing):
            point = _repeated(now.planned.points[one], tried)
            repeated.append((turn, Wanted(cell=cell, place=one, point=point, slow_step_s=None, ran_on=ran_on)))
    return [one for _, one in sorted(repeated, key=lambda entry: entry[0])]


def _repeated(point: PlannedPoint, tried: set[int]) -> PlannedPoint:
    """The same layout with a seed that was not run yet."""
    experiment: Experiment = point.experiment
    seed = max(tried, default=experiment.seed) + 1
    tried.add(seed)
    return dataclasses.replace(point, experiment=dataclasses.replace(experiment, seed=seed))
