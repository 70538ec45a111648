"""A pilot that Slurm ends with points left queues itself again, but not for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from launchers import pilot
from launchers.allocation import Allocation
from launchers.crew import Crew
from launchers.payload import Payload
from launchers.pilot import FRUITLESS_RESTARTS, Pilot
from launchers.sweepdir import SweepDir
from tests.launchers.scripted import points, settings


class Asked:
    """Which jobs Slurm was asked to queue again."""

    jobs: list[str]

    def __init__(self) -> None:
        self.jobs = []

    def requeue(self, job: str) -> bool:
        self.jobs.append(job)
        return True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    slurm = Asked()
    monkeypatch.setattr(pilot, "SlurmClient", lambda: slurm)
    return slurm


def ended_pilot(tmp_path: Path, *, restarts: int, reason: Any = "preempted", left: int = 1) -> Pilot:
    sweep = SweepDir.create(tmp_path / "sweep", {})
    sweep.add_points(points(*["ok"] * left))
    payload = Payload(settings=settings(), command=None, wall_time_s=60.0, tethered=False, scheduler="slurm")
    place = Allocation(pilot_id=f"p.0.{restarts}", job="7_0", node="n0", is_head=True, restarts=restarts)
    one = Pilot(sweep, place, payload, cast(Crew, None), threading.Event(), {})
    one._stop = reason
    return one


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
    tmp_path: Path, asked: Asked, restarts: int, finished: dict[str, int], again: bool
) -> None:
    one = ended_pilot(tmp_path, restarts=restarts)
    one._finished.update(finished)
    one._come_back()
    assert asked.jobs == (["7_0"] if again else [])


@pytest.mark.parametrize(("reason", "left"), [("cancelled", 1), ("preempted", 0)])
def test_it_stays_away_when_cancelled_or_done(tmp_path: Path, asked: Asked, reason: str, left: int) -> None:
    ended_pilot(tmp_path, restarts=0, reason=reason, left=left)._come_back()
    assert asked.jobs == []
