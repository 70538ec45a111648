"""What a sweep's folder says of a search: which candidates ran, which run or wait, what comes next.

Nothing of a search is stored: every round reads the rows and the queue again, in the order of the attempts. So the same
command goes on wherever it was stopped, and rows that came from elsewhere count.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import SweepDir, entry_names, key_of, split_name
from results.store import read_attempts
from sweep.plan import PlannedPoint
from sweep.searching.checked import CHECKS, Checks
from sweep.searching.choice import to_repeat
from sweep.searching.planned import PlannedSpace
from sweep.searching.session import Session
from sweep.searching.settings import Settings
from sweep.searching.space import RUNNING, UNTRIED
from workloads.experiment import Experiment, from_dict, layout_id

_OF_A_RUN = ("outcome", "method", "step_time_s", "config_json", "started_at", "world_size", "duration_s")
ROW_COLUMNS = [*_OF_A_RUN, *CHECKS]
_HOUR_S = 3600.0


@dataclass(slots=True)
class Round:
    """A search as its folder shows it now."""

    session: Session
    planned: PlannedSpace
    times_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Step times of every run of a candidate."""
    runs: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Attempts by cell, also those that failed."""
    gpu_hours: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    seeds: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Of a candidate's points in the queue, whatever became of them."""
    pending: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Points of a cell that wait or run."""

    @property
    def spent(self) -> float:
        return sum(self.gpu_hours.values())


def read_round(sweep: SweepDir | None, planned: PlannedSpace, settings: Settings, method: str) -> Round:
    """``sweep`` None: nothing has run yet."""
    session = Session(planned.space, settings)
    now = Round(session, planned)
    for place, row in enumerate(planned.known, start=len(planned.points)):
        session.seen.ended(place, "ok", row.step_time_s, float(planned.space.log_time[place]))
    if sweep is None:
        return now
    rows = read_attempts(sweep.path).select(ROW_COLUMNS).to_pylist()
    rows = sorted((row for row in rows if row["method"] == method), key=lambda one: str(one["started_at"]))
    checks = Checks(planned.cluster, rows)
    for row in rows:
        _tell_row(now, row, checks)
    _tell_queue(now, sweep)
    return now


def _tell_row(now: Round, row: Mapping[str, Any], checks: Checks) -> None:
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


def _tell_queue(now: Round, sweep: SweepDir) -> None:
    """Points that wait or run, and those that ended without a row that says anything of their layout."""
    reader = QueueReader(sweep, "", lambda line: None)
    waiting = reader.waiting()
    for point in (*waiting, *reader.claimed_by_others()):
        place = now.planned.place_of.get(layout_id(point.experiment))
        if place is not None:
            now.pending[int(now.planned.space.cell[place])] += 1
            now.seeds[place].add(point.experiment.seed)
            if now.session.seen.state[place] == UNTRIED:
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

    from workloads.errors import InvalidExperiment

    try:
        return planned.place_of.get(layout_id(from_dict(json.loads(text or ""))))
    except (ValueError, TypeError, KeyError, InvalidExperiment):
        return None


def next_points(now: Round, probabilities: Mapping[int, float], repeats: int) -> list[tuple[int, PlannedPoint]]:
    """What shall run next, with the cell of each: candidates of cells that are not done, and repeats of the top of
    those that are. Nothing of a cell of which points still wait or run."""
    found: list[tuple[int, PlannedPoint]] = []
    for cell, probability in probabilities.items():
        if now.pending.get(cell):
            continue
        if now.session.end(cell, probability) is None:
            found += [(cell, now.planned.points[one]) for one in now.session.ask(cell)]
        elif repeats:
            for one in to_repeat(now.planned.space, now.session.seen, cell):
                tried = now.seeds[one]
                missing = 1 + repeats - max(len(tried), len(now.times_s[one]))
                found += [(cell, _repeated(now.planned.points[one], tried)) for _ in range(missing)]
    return found


def _repeated(point: PlannedPoint, tried: set[int]) -> PlannedPoint:
    """The same layout with a seed that was not run yet."""
    experiment: Experiment = point.experiment
    seed = max(tried, default=experiment.seed) + 1
    tried.add(seed)
    return dataclasses.replace(point, experiment=dataclasses.replace(experiment, seed=seed))
