"""Idle time between two points, on nodes whose clocks differ."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from launchers.attempt.attempt import Attempt
from launchers.pilot.step_gaps import StepGaps
from tests.launchers.scripted import points
from workloads.contract.protocol import RankResult, Task


class Measured:
    method = "measured"


def attempt_on(*nodes: str) -> Attempt:
    return Attempt(
        attempt_id="a",
        number=1,
        point=points("ok")[0],
        folder=Path("a"),
        task=cast(Task, Measured()),
        started_at=0.0,
        device_ids=None,
        pilot_id="p",
        nodes=nodes,
    )


def results(**begun: float) -> dict[int, RankResult]:
    """Ranks that begin their first step at these times of their nodes' clocks, and need 2 s."""
    return {
        rank: RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={"warmup": at, "teardown": at + 2.0})
        for rank, at in enumerate(begun.values())
    }


def test_each_node_is_timed_by_its_own_clock() -> None:
    """The clock of node b is an hour ahead."""
    gaps = StepGaps()
    both = attempt_on("a", "b")
    assert gaps.gap_s(both, results(a=10.0, b=3610.0), succeeded=True) is None
    assert gaps.gap_s(both, results(a=15.0, b=3616.0), succeeded=True) == pytest.approx(4.0)
    assert gaps.gap_s(attempt_on("b"), results(b=3620.0), succeeded=False) == pytest.approx(2.0)
    assert gaps.gap_s(both, results(a=30.0, b=3630.0), succeeded=True) is None  # the last point on b has failed
    gaps.forget()
    assert gaps.gap_s(both, results(a=40.0, b=3640.0), succeeded=True) is None
