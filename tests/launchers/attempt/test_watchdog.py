"""Limits of phases and steps, and which rank is blamed for a hang."""

from __future__ import annotations

import time
from typing import Any

import pytest

from launchers.attempt import watchdog
from launchers.attempt.watchdog import StalledRank
from tests.launchers.scripted import settings
from workloads.beats import Heartbeat


@pytest.mark.parametrize(
    ("position", "longest_step_s", "expected_step_s", "limit_s"),
    [
        (("build", None), None, None, 600.0),
        (("warmup", 0), None, 100.0, 2000.0),  # 20 predicted steps
        (("step", 2), None, None, 600.0),
        (("step", 2), 0.5, None, 30.0),  # steps of half a second: no need to wait ten minutes
        (("step", 2), 10.0, None, 200.0),
        (("step", 2), 90.0, None, 600.0),
        (("done", None), None, None, 10.0),
    ],
)
def test_limits_follow_what_steps_take(
    position: tuple[str, int | None], longest_step_s: float | None, expected_step_s: float | None, limit_s: float
) -> None:
    state = watchdog._Rank(longest_step_s=longest_step_s)
    phase, step = position
    rank = StalledRank(rank=0, phase=phase, step=step, age_s=0.0)
    assert watchdog._limit_s(rank, state, settings(phase_limits_s={}), expected_step_s) == limit_s


def test_the_rank_furthest_behind_is_blamed_not_those_that_wait_for_it() -> None:
    now = time.monotonic()

    def rank(phase: Any, step: int | None, age_s: float) -> Any:
        heartbeat = Heartbeat(rank=0, phase=phase, step=step, time=0.0, pid=1)
        return watchdog._Rank(heartbeat=heartbeat, since=now - age_s)

    strict = settings(phase_limits_s={"step": 5.0, "teardown": 1.0})
    ranks = {0: rank("step", 4, 6.0), 1: rank("step", 3, 6.0), 2: rank("step", 4, 6.0)}
    assert [stalled.rank for stalled in watchdog._stalled(ranks, {}, strict, None)] == [1]
    ranks = {0: rank("step", 4, 4.0), 1: rank("step", 3, 4.0)}
    assert watchdog._stalled(ranks, {}, strict, None) == ()
    # Who has finished may wait in teardown as long as somebody still steps.
    ranks = {0: rank("teardown", None, 4.0), 1: rank("step", 3, 4.0)}
    assert watchdog._stalled(ranks, {}, strict, None) == ()
    ranks = {0: rank("teardown", None, 4.0), 1: rank("done", None, 0.0)}
    assert [stalled.rank for stalled in watchdog._stalled(ranks, {}, strict, None)] == [0]
