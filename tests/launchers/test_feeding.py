"""Points that are added while a sweep runs, and repeats that prefer other nodes."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from launchers import local
from launchers.local import run_local
from launchers.pilot.scheduling import Scheduler
from launchers.state import queue
from launchers.state.history import HistoryReader
from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import SweepDir, entry_names, read_point
from results.tables import store
from tests.launchers.scripted import points, settings


class OneAfterAnother:
    """Adds the next point when the previous one has ended."""

    def __init__(self, sweep: SweepDir, count: int) -> None:
        self.sweep, self.left = sweep, points(*["ok"] * count)
        self.said = 0

    def __call__(self) -> str:
        if not self.left or len(entry_names(self.sweep.done)) + len(self.left) < 3:
            return ""
        self.sweep.add_points([self.left.pop(0)])
        self.said += 1
        return f"one more, {len(self.left)} left"


@pytest.mark.slow
def test_a_pilot_runs_points_added_while_it_lingers(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-m", "tests.launchers.scripted"))
    feed = OneAfterAnother(sweep, 3)
    feed()
    summary = run_local(sweep, settings(linger_s=8.0), live=False, command="test", feed=feed)
    assert (summary.outcomes, summary.left) == ({"ok": 3}, 0)
    pilots = {row["pilot_id"] for row in store.read_attempts(sweep.path).to_pylist()}
    assert len(pilots) == 1, "one pilot has waited for each"
    assert "one more, 1 left" in capsys.readouterr().out


def test_a_repeat_goes_to_other_nodes_if_it_can(sweep: SweepDir) -> None:
    first, second, third = points("ok", "ok", "ok")
    ran_on_a = [dataclasses.replace(one, ran_on=("a",)) for one in (first, second)]
    sweep.add_points([*ran_on_a, dataclasses.replace(third, ran_on=("b",))])
    launch = settings(num_devices=2)

    def claims(nodes: tuple[str, ...]) -> list[int]:
        scheduler = Scheduler(sweep, "pilot", launch, HistoryReader(sweep), lambda line: None)
        scheduler._breaker.proven.add(1)  # no point has to go first
        found = []
        while (claim := scheduler.claim_next(len(nodes), nodes, None, ())) is not None:
            found.append(claim)
        for claim in found:
            queue.release(claim)
        return [claim.point.index for claim in found]

    assert claims(("a",)) == [2, 0, 1], "what ran here comes last, but it does run"
    assert claims(("b",)) == [0, 1, 2]
    assert claims(("c",)) == [0, 1, 2]
    assert claims(("a", "b")) == [0, 1, 2], "each has a node on which it did not run"


def test_a_points_preferred_nodes_are_kept_in_its_file(sweep: SweepDir) -> None:
    point = dataclasses.replace(points("ok")[0], slow_step_s=1.5, ran_on=("a", "b"))
    sweep.add_points([point])
    (name,) = entry_names(sweep.todo)
    assert read_point(sweep.todo / name) == point
    assert QueueReader(sweep, "p", lambda line: None).waiting() == [point]
