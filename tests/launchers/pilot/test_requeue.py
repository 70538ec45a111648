"""A pilot that Slurm ends while points wait has its job requeued, but not for ever."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from launchers.pilot.allocation import Allocation
from launchers.pilot.batch_system import BatchSystem
from launchers.pilot.node_pool import NodePool, NoNodes
from launchers.pilot.pilot import STOPPED, TROUBLE, Pilot
from launchers.pilot.requeue import FRUITLESS_RESTARTS
from launchers.state.pilot_config import PilotConfig
from launchers.state.sweep_dir import SweepDir
from tests.launchers.scripted import points, settings


def ended_pilot(
    tmp_path: Path,
    asked: list[str],
    *,
    restarts: int,
    reason: Any = "preempted",
    left: int = 1,
    refused: str | None = None,
) -> Pilot:
    sweep = SweepDir.create(tmp_path / "sweep", {})
    sweep.add_points(points(*["ok"] * left))
    config = PilotConfig(
        settings=settings(), command=None, wall_time_s=60.0, stop_with_parent=False, batch_system="slurm"
    )
    place = Allocation(pilot_id=f"p.0.{restarts}", job="7_0", node="n0", is_head=True, restarts=restarts)

    class Batch:
        def requeue(self, _sweep: SweepDir, allocation: Allocation) -> str | None:
            asked.append(str(allocation.job))
            return refused

    one = Pilot(sweep, place, config, cast(NodePool, None), threading.Event(), {}, cast(BatchSystem, Batch()))
    one._stop.reason = reason
    return one


def requeue(one: Pilot) -> None:
    """What a pilot does at its end."""
    one._requeue.ask_if_needed(one.stop_reason(), one._state.finished)


@pytest.mark.parametrize(
    ("restarts", "finished", "again"),
    [
        (0, {}, True),
        (FRUITLESS_RESTARTS - 1, {"preempted": 2}, True),
        (FRUITLESS_RESTARTS, {}, False),
        (FRUITLESS_RESTARTS, {"preempted": 2}, False),
        (FRUITLESS_RESTARTS + 5, {"preempted": 2, "ok": 1}, True),
    ],
)
def test_it_comes_back_while_that_leads_anywhere(
    tmp_path: Path, restarts: int, finished: dict[str, int], again: bool
) -> None:
    asked: list[str] = []
    one = ended_pilot(tmp_path, asked, restarts=restarts)
    one._state.finished.update(finished)
    requeue(one)
    assert asked == (["7_0"] if again else [])


@pytest.mark.parametrize(("reason", "left"), [("cancelled", 1), ("preempted", 0)])
def test_it_stays_away_when_cancelled_or_done(tmp_path: Path, reason: str, left: int) -> None:
    asked: list[str] = []
    requeue(ended_pilot(tmp_path, asked, restarts=0, reason=reason, left=left))
    assert asked == []


def test_a_refusal_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requeue(ended_pilot(tmp_path, [], restarts=0, refused="scontrol: Access denied"))
    assert "job 7_0 is not requeued, points are left: scontrol: Access denied" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reason", "status", "again"), [("preempted", STOPPED, True), ("cancelled", STOPPED, False), (None, TROUBLE, False)]
)
def test_a_pilot_that_is_ended_while_its_agents_start_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Any, status: int, again: bool
) -> None:
    class NoAgents:
        """A pool whose wait for agents is interrupted, or finds none."""

        names = ()

        def wait_for_agents(self, meanwhile: object) -> list[str]:
            one._stop.reason = reason
            raise NoNodes("no agent has connected")

    asked: list[str] = []
    one = ended_pilot(tmp_path, asked, restarts=0, reason=None)
    one._pool = one._state._pool = cast(NodePool, NoAgents())
    monkeypatch.setattr(one._stop, "listen", lambda: None)
    assert one.run() == status
    assert asked == (["7_0"] if again else [])


@pytest.mark.parametrize(("needed_s", "again"), [(50.0, True), (70.0, False), (None, False)])
def test_it_comes_back_for_points_that_fit_a_whole_job_and_not_the_rest_of_this_one(
    tmp_path: Path, needed_s: float | None, again: bool
) -> None:
    asked: list[str] = []
    one = ended_pilot(tmp_path, asked, restarts=0, reason=None)
    if needed_s is not None:
        (point,) = points("ok")
        one._scheduler._choose([replace(point, deadline_s=needed_s)], 1, ["n0"], 10.0, [])
    requeue(one)
    assert asked == (["7_0"] if again else [])
