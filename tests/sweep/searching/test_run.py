"""``search`` on a planned grid, with a launcher whose runs take no time and whose truth is known."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launchers.state.queue import Claim, QueueReader
from launchers.status.run_summary import RunSummary
from results.tables.compaction import compact
from results.tables.schema import MEASUREMENT_VERSION, SCHEMA_VERSION
from results.tables.store import read_attempts, write_attempt
from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.running.run import Queued
from sweep.searching.search_run import Search, SearchOutcome, prepare_search, print_search, run_search
from workloads.spec.experiment import Experiment, layout_id
from workloads.spec.record import config_columns

pytestmark = pytest.mark.drawn(one_in=2)

NEEDED = ("+grid=llama8b_8gpu", "launcher=slurm")
MERGED_AT = 8
"""Runs between two merges of their rows, as pilots merge them: each look at the sweep reads every part."""


class Cluster:
    """Runs every point that waits, at once. ``most``: points before it is interrupted. ``at_once``: points that end
    before the search looks at their rows."""

    def __init__(
        self,
        search: Search,
        truth: Callable[[Experiment, float], float | None],
        most: int | None = None,
        at_once: int = 1,
    ):
        self.predicted = {
            layout_id(point.experiment): point.time.step_time_s for point in search.planned.points if point.time
        }
        self.truth, self.most, self.at_once = truth, most, at_once
        self.crashes: Callable[[Experiment], bool] = lambda experiment: False
        self.ran: list[str] = []
        self.rounds: list[int] = []
        self.at = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self, queued: Queued, feed: Callable[[], str]) -> RunSummary:
        reader = QueueReader(queued.sweep, "pilot", lambda line: None)
        count = 0
        while (self.most is None or len(self.ran) < self.most) and (claim := reader.claim_next(lambda found: found)):
            count += 1
            self.end(queued, claim)
            if count % MERGED_AT == 0:
                compact(queued.sweep.path)
            if count % self.at_once == 0 or not reader.waiting():
                feed()
        self.rounds.append(count)
        left = len(reader.waiting())
        return RunSummary(outcomes={}, attempts=count, left=left, too_wide=0, interrupted=left > 0)

    def end(self, queued: Queued, claim: Claim) -> None:
        """Write the row of a point that was claimed, and move it."""
        self.at += timedelta(seconds=60)
        experiment = claim.point.experiment
        time_s = self.truth(experiment, self.predicted[layout_id(experiment)])
        outcome = "ok" if time_s is not None else "oom"
        if self.crashes(experiment):
            time_s, outcome = None, "crash"
        self.ran.append(experiment.id)
        row: dict[str, Any] = {
            "attempt_id": f"{experiment.id}.{len(self.ran)}", "schema_version": SCHEMA_VERSION,
            "measurement_version": MEASUREMENT_VERSION, "sweep": queued.sweep.name, "method": "measured",
            "outcome": outcome, "started_at": self.at, "duration_s": 60.0, "step_time_s": time_s,
            "cluster": "h200", "nodes": ["node0"], **config_columns(experiment),
        }  # fmt: skip
        write_attempt(queued.sweep.path, row, [])
        claim.path.rename(queued.sweep.done / f"{claim.stem}@{outcome}.json")


def off(experiment: Experiment, predicted_s: float) -> float:
    """Slower than predicted by something smooth."""
    e = experiment
    return predicted_s * math.exp(0.3 + 0.1 * math.log2(e.tp) - 0.08 * (e.recompute == "full") + 0.02 * e.zero_stage)


def searched(tmp_path: Path, *words: str, name: str = "s") -> Search:
    return prepare_search([*NEEDED, f"results_dir={tmp_path}", f"name={name}", *words], ConfFolders(), ())


def said(search: Search, found: SearchOutcome) -> str:
    text = io.StringIO()
    print_search(search, found, Console(file=text, width=400))
    return text.getvalue()


def best_s(search: Search, truth: Callable[[Experiment, float], float]) -> float:
    return min(truth(p.experiment, p.time.step_time_s) for p in search.planned.points if p.time is not None)


@pytest.mark.slow(seconds=20)
def test_the_fastest_of_six_hundred_layouts_in_few_runs(tmp_path: Path) -> None:
    search = searched(tmp_path)
    cluster = Cluster(search, off, at_once=4)
    found = run_search(search, cluster, lambda line: None)
    assert len(search.planned.points) > 600
    assert len(cluster.ran) <= 90 and len(set(cluster.ran)) == len(cluster.ran), "repeats have other seeds"
    (cell,) = search.planned.names
    assert found.probabilities[cell] <= 0.2, "at most 0.1 for layouts that ran, and as much for the others"
    best = found.round.session.best(cell)
    assert best is not None
    reached = math.exp(found.round.session.seen.log_time[best])
    assert reached <= best_s(search, off) * 1.01
    text = said(search, found)
    assert "a better layout is improbable" in text and "not tried" in text


SMALL = ("grid.axes.tp=[1,2]", "grid.axes.pp=[1]", "grid.axes.micro_batch_size=[1,2]")


@pytest.mark.slow
def test_a_finished_search_has_nothing_left_to_run_and_is_known_to_the_next(tmp_path: Path) -> None:
    search = searched(tmp_path, *SMALL)
    cluster = Cluster(search, off, at_once=4)
    text = said(search, run_search(search, cluster, lambda line: None))
    # The same command again: nothing is left to run, and it says the same.
    again = searched(tmp_path, *SMALL)
    repeated = run_search(again, Cluster(again, off), lambda line: None)
    assert repeated.summary is None
    assert said(again, repeated) == text
    # Another sweep of the same cluster knows what these rows have shown.
    other = searched(tmp_path, *SMALL, name="other")
    assert len(other.planned.known) == len(cluster.ran)
    fewer = Cluster(other, off, at_once=4)
    run_search(other, fewer, lambda line: None)
    assert len(fewer.ran) <= len(cluster.ran)


@pytest.mark.slow
def test_a_layout_that_crashed_runs_again_with_another_seed(tmp_path: Path) -> None:
    search = searched(tmp_path, *SMALL, "search.repeats=0")
    best = min(
        (p for p in search.planned.points if p.time is not None),
        key=lambda p: off(p.experiment, p.time.step_time_s if p.time is not None else math.inf),
    ).experiment
    cluster = Cluster(search, off)
    cluster.crashes = lambda experiment: experiment.id == best.id
    found = run_search(search, cluster, lambda line: None)
    (cell,) = search.planned.names
    place = found.round.session.best(cell)
    assert place is not None and search.planned.points[place].experiment == best
    again = dataclasses.replace(best, seed=best.seed + 1).id
    assert [one for one in cluster.ran if one in (best.id, again)] == [best.id, again]
    assert search.most_points == len(search.planned.points) >= len(cluster.ran) - 1


@pytest.mark.slow
def test_an_interrupted_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = searched(tmp_path, *SMALL, name="whole")
    at_once = Cluster(whole, off)
    run_search(whole, at_once, lambda line: None)
    first = searched(tmp_path / "else", *SMALL, name="parts")
    begun = Cluster(first, off, most=6)
    found = run_search(first, begun, lambda line: None)
    assert found.summary is not None and found.summary.interrupted and len(begun.ran) == 6
    count = len(first.planned.points)
    assert f"6 runs, 0.8 GPU-hours; {count - 6} of {count} layouts not tried" in said(first, found)
    second = searched(tmp_path / "else", *SMALL, name="parts")
    rest = Cluster(second, off)
    run_search(second, rest, lambda line: None)
    assert not set(begun.ran) & set(rest.ran)
    assert [*begun.ran, *rest.ran] == at_once.ran, "as if it had not stopped"


@pytest.mark.slow
def test_a_budget_is_kept(tmp_path: Path) -> None:
    search = searched(tmp_path, "budget.gpu_hours=1")
    cluster = Cluster(search, off)
    found = run_search(search, cluster, lambda line: None)
    assert found.over_budget and cluster.ran
    spent = sum(row["duration_s"] * 8 / 3600 for row in read_attempts(tmp_path / "s").to_pylist())
    assert spent <= 1
    text = said(search, found)
    assert "the budget of 1 GPU-hours covers no further run" in text and "not settled" in text


@pytest.mark.exhaustive(seconds=40)
def test_what_runs_out_of_memory_is_learned_from(tmp_path: Path) -> None:
    search = searched(tmp_path, "plan.run_predicted_oom=true")
    (name,) = set(search.planned.names)
    peak = {layout_id(p.experiment): p.peak_bytes or 0 for p in search.planned.points}

    def truth(experiment: Experiment, predicted_s: float) -> float | None:
        return None if peak[layout_id(experiment)] > 90e9 else off(experiment, predicted_s)

    cluster = Cluster(search, truth)
    found = run_search(search, cluster, lambda line: None)
    best = found.round.session.best(name)
    assert best is not None
    fitting = [p for p in search.planned.points if p.time is not None and (p.peak_bytes or 0) <= 90e9]
    goal = min(off(p.experiment, p.time.step_time_s) for p in fitting if p.time is not None)
    assert math.exp(found.round.session.seen.log_time[best]) <= goal * 1.02
    assert len(cluster.ran) <= 85, "of more than 600"


@pytest.mark.exhaustive(seconds=45)
def test_close_ones_run_again_with_other_seeds(tmp_path: Path) -> None:
    search = searched(tmp_path, "grid.axes.tp=[1,2]", "grid.axes.pp=[1]")

    def flat(experiment: Experiment, predicted_s: float) -> float:
        return 5.0 + 0.001 * experiment.tp

    cluster = Cluster(search, flat)
    found = run_search(search, cluster, lambda line: None)
    (cell,) = search.planned.names
    times = [len(times) for times in found.round.times_s.values()]
    assert 2 <= sum(times) - len(times) <= search.prepared.plan.config.search.repeats
    assert len(set(cluster.ran)) == len(cluster.ran)
    assert found.round.runs[cell] == len(cluster.ran)
    seeds = {row["seed"] for row in read_attempts(tmp_path / "s").to_pylist()}
    assert len(seeds) == max(times) > 1
    again = searched(tmp_path, "grid.axes.tp=[1,2]", "grid.axes.pp=[1]")
    assert run_search(again, Cluster(again, flat), lambda line: None).summary is None


@pytest.mark.exhaustive(seconds=70)
def test_a_search_without_predictions_takes_its_scale_from_the_first_run(tmp_path: Path) -> None:
    search = searched(tmp_path, "grid.axes.tp=[1,2]")
    points = tuple(dataclasses.replace(point, time=None) for point in search.prepared.plan.points)
    from sweep.searching.planned import planned_space

    plan = dataclasses.replace(search.prepared.plan, points=points)
    blind = dataclasses.replace(search, planned=planned_space(plan))
    cluster = Cluster(search, off)
    found = run_search(blind, cluster, lambda line: None)
    (cell,) = blind.planned.names
    best = found.round.session.best(cell)
    assert best is not None
    assert math.exp(found.round.session.seen.log_time[best]) <= best_s(search, off) * 1.05
    assert len(cluster.ran) < len(blind.planned.points) / 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no grid given"),
        ([*NEEDED, "--out", "x.csv"], "--out needs --replay"),
        ([*NEEDED, "search.repeats=-1"], "search.repeats=-1"),
    ],
)
def test_mistakes_are_one_line(
    words: Sequence[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1
