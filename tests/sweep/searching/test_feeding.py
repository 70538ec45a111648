"""What waits in the queue of a search while its points run, several at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from launchers.state.queue import Claim, QueueReader
from launchers.status.run_summary import RunSummary
from results.tables.store import read_runs
from sweep.running.run import Queued, enqueue
from sweep.searching import rounds
from sweep.searching.feeding import Feeder
from sweep.searching.rounds import next_points, read_round
from sweep.searching.search_run import Search, run_search
from sweep.searching.space import OOM, OTHER, RUNNING
from tests.sweep.searching.test_run import SMALL, Cluster, best_s, off, searched
from workloads.spec.experiment import layout_id


class SideBySide(Cluster):
    """Runs several points at a time; the one that was claimed first ends first."""

    at_once = 2
    claims: list[Claim]

    def __call__(self, queued: Queued, feed: Callable[[], str]) -> RunSummary:
        reader = QueueReader(queued.sweep, "pilot", lambda line: None)
        self.claims, self.waited, before = [], [], len(self.ran)
        while True:
            while len(self.claims) < self.at_once and (claim := reader.claim_next(lambda found: found)):
                self.claims.append(claim)
            if not self.claims:
                break
            self.end(queued, self.claims.pop(0))
            feed()
            self.waited.append(len(reader.waiting()) + len(self.claims))
        return RunSummary(outcomes={}, attempts=len(self.ran) - before, left=0, too_wide=0, interrupted=False)


def feeder(search: Search) -> tuple[Feeder, Queued]:
    queued = enqueue(search.prepared, added=())
    settings = search.prepared.plan.config.search
    return Feeder(queued.sweep, search.planned, settings, "measured", search.budget_gpu_hours), queued


def waiting(queued: Queued) -> list[str]:
    return [layout_id(point.experiment) for point in QueueReader(queued.sweep, "", print).waiting()]


@pytest.mark.exhaustive(seconds=20)
def test_every_end_is_followed_by_another_point(tmp_path: Path) -> None:
    search = searched(tmp_path)
    cluster = SideBySide(search, off)
    launches: list[int] = []

    def launch(queued: Queued, feed: Callable[[], str]) -> RunSummary:
        launches.append(len(cluster.ran))
        return cluster(queued, feed)

    found = run_search(search, launch, lambda line: None)
    assert launches == [0], "one launch for the whole search"
    assert len(set(cluster.ran)) == len(cluster.ran) <= 80
    (cell,) = search.planned.names
    best = found.round.session.best(cell)
    assert best is not None and found.probabilities[cell] <= 0.1
    assert math.exp(found.round.session.seen.log_time[best]) <= best_s(search, off) * 1.01
    assert set(cluster.waited[: len(cluster.ran) // 2]) == {3}, "a batch runs or waits at any time"


@pytest.mark.slow
def test_what_waits_is_what_promises_most_by_now(tmp_path: Path) -> None:
    search = searched(tmp_path)
    feed, queued = feeder(search)
    feed.look()
    first = waiting(queued)
    assert len(first) == 3
    assert feed.feed() == "", "nothing has ended"
    cluster = SideBySide(search, off)
    reader = QueueReader(queued.sweep, "pilot", print)
    claims = [claim for _ in range(2) if (claim := reader.claim_next(lambda found: found))]
    running = [layout_id(claim.point.experiment) for claim in claims]
    assert running == first[:2], "in the order in which they were chosen"
    cluster.end(queued, claims.pop(0))
    feed.feed()

    # The same choice by hand: one has ended, one runs and counts as if it had turned out as expected, two wait.
    settings = search.prepared.plan.config.search
    now = read_round(queued.sweep, search.planned, settings, "measured")
    state = now.session.seen.state
    assert [layout_id(search.planned.points[one].experiment) for one in (state == RUNNING).nonzero()[0]] == running[1:]
    assert set(now.waiting) == {search.planned.place_of[one] for one in waiting(queued)}
    wanted = next_points(now, settings)
    assert [layout_id(one.point.experiment) for one in wanted] == waiting(queued)
    assert len(wanted) == 2 and not set(waiting(queued)) & set(running)
    ended = float(now.times_s[search.planned.place_of[running[0]]][0])
    assert [one.slow_step_s for one in wanted] == [pytest.approx(1.5 * ended)] * 2
    points = {layout_id(p.experiment): p for p in reader.waiting()}
    assert all(points[layout_id(one.point.experiment)].slow_step_s == one.slow_step_s for one in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("outcome", "state"), [("oom", OOM), ("ok", RUNNING)])
def test_a_point_that_ends_while_the_folder_is_read_is_not_chosen_again(
    outcome: str, state: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read before the queue. A point that ends between has no row in this look, only its outcome."""
    search = searched(tmp_path, *SMALL)
    feed, queued = feeder(search)
    feed.look()
    claim = QueueReader(queued.sweep, "pilot", print).claim_next(lambda found: found)
    assert claim is not None
    place, settings = search.planned.place_of[layout_id(claim.point.experiment)], search.prepared.plan.config.search

    def rows_and_then_an_end(path: Path) -> pa.Table:
        found = read_runs(path)
        if claim.path.exists():
            claim.path.rename(queued.sweep.done / f"{claim.stem}@{outcome}.json")
        return found

    monkeypatch.setattr(rounds, "read_runs", rows_and_then_an_end)
    now = read_round(queued.sweep, search.planned, settings, "measured")
    assert now.session.seen.state[place] == state and not now.session.seen.failures[place]
    assert place not in [one.place for one in next_points(now, settings)]
    # An end without a usable row, which the next look knows, is a failure.
    later = read_round(queued.sweep, search.planned, settings, "measured").session.seen
    assert (later.state[place], later.failures[place]) == ((OOM, 0) if outcome == "oom" else (OTHER, 1))


@pytest.mark.slow
def test_a_budget_covers_what_runs(tmp_path: Path) -> None:
    search = searched(tmp_path, "budget.gpu_hours=1")
    feed, queued = feeder(search)
    look = feed.look()
    reader = QueueReader(queued.sweep, "pilot", print)
    claims = [claim for _ in look.chosen if (claim := reader.claim_next(lambda found: found))]
    costs = {p.experiment.id: p.price.charged_h for p in search.planned.points if p.price is not None}
    assert len(claims) >= 2
    begun = sum(costs[claim.point.experiment.id] for claim in claims)
    SideBySide(search, off).end(queued, claims.pop(0))
    again = feed.look()
    spent = again.round.spent
    running = sum(costs[claim.point.experiment.id] for claim in claims)
    assert spent + running + sum(costs[one.point.experiment.id] for one in again.chosen) <= 1 < begun + 1


@pytest.mark.slow
def test_a_cell_that_is_done_takes_back_what_waits_and_repeats_the_top_elsewhere(tmp_path: Path) -> None:
    search = searched(tmp_path, *SMALL, "search.stop=0.9")
    cluster = SideBySide(search, lambda experiment, predicted_s: 5.0 + 0.001 * experiment.tp)
    seen: list[tuple[bool, tuple[str, ...], float | None]] = []
    inner = cluster.end

    def end(queued: Queued, claim: Claim) -> None:
        point = claim.point
        seen.append(
            (point.experiment.seed != search.planned.points[0].experiment.seed, point.ran_on, point.slow_step_s)
        )
        inner(queued, claim)

    cluster.end = end  # type: ignore[method-assign]
    run_search(search, cluster, lambda line: None)
    repeats = [one for one in seen if one[0]]
    assert repeats and all(ran_on == ("node0",) and slow is None for _, ran_on, slow in repeats)
    first = seen.index(repeats[0])
    assert 0 < first < len(search.planned.points), "what waited was taken back"
