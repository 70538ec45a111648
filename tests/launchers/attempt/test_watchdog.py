"""Limits of phases and steps, and which rank is blamed for a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from launchers.attempt import watchdog
from launchers.attempt.watchdog import StalledRank
from launchers.node.fork import RankExit
from launchers.node.rank_group import Termination
from tests.launchers.scripted import settings
from workloads.contract.beats import Heartbeat


@pytest.mark.parametrize(
    ("position", "longest_step_s", "expected_step_s", "limit_s"),
    [
        (("build", None), None, None, 600.0),
        (("warmup", 0), None, 100.0, 2000.0),  # 20 predicted steps
        (("step", 2), None, None, 600.0),
        (("step", 2), 0.5, None, 30.0),  # steps of half a second: no need to wait ten minutes
        (("step", 2), 10.0, None, 200.0),
        (("step", 2), 90.0, None, 600.0),
        (("replay", 2), 0.5, None, 30.0),
        (("replay", 2), None, 100.0, 2000.0),
        (("done", None), None, None, 10.0),
    ],
)
def test_limits_follow_the_durations_of_steps(
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
    ranks = {0: rank("replay", 2, 6.0), 1: rank("warmup", 2, 1.0), 2: rank("step", 3, 6.0)}
    assert [stalled.rank for stalled in watchdog._stalled(ranks, {}, strict, None)] == [1], "a step is captured first"
    ranks = {0: rank("step", 4, 4.0), 1: rank("step", 3, 4.0)}
    assert watchdog._stalled(ranks, {}, strict, None) == ()
    # A rank that has finished may wait in teardown while another rank still makes steps.
    ranks = {0: rank("teardown", None, 4.0), 1: rank("step", 3, 4.0)}
    assert watchdog._stalled(ranks, {}, strict, None) == ()
    ranks = {0: rank("teardown", None, 4.0), 1: rank("done", None, 0.0)}
    assert [stalled.rank for stalled in watchdog._stalled(ranks, {}, strict, None)] == [0]


class EndedAndRunning:
    """Two ranks: 0 has ended without a result, 1 runs until it is killed."""

    ranks = (0, 1)
    killed = False

    def exits(self) -> dict[int, RankExit]:
        return {0: RankExit(rank=0, status=1, signal=None, time=0.0, killed_by_us=False)}

    def heartbeats(self) -> dict[int, Heartbeat]:
        return {rank: Heartbeat(rank=rank, phase="step", step=1, time=1.0, pid=1) for rank in self.ranks}

    def lost(self) -> dict[int, str]:
        return {}

    def request_stacks(self, ranks: Iterable[int]) -> None: ...

    def end(self) -> Termination:
        self.killed = True
        return Termination()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stopped", "deadline"])
def test_ranks_are_ended_although_no_answer_comes_about_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The file system's server does not answer."""
    answers, real = threading.Event(), Path.exists

    def exists(self: Path, **options: Any) -> bool:
        return answers.wait() and real(self, **options)  # who waits for it is ended by the time-out of tests

    monkeypatch.setattr(watchdog, "FILES_WAIT_S", 0.1)
    monkeypatch.setattr(Path, "exists", exists)
    group = EndedAndRunning()
    result = watchdog.watch(
        tmp_path,
        group,
        settings(),
        deadline_s=0.5 if end == "deadline" else 60.0,
        expected_step_s=None,
        stop_asked=lambda: end == "stopped",
        on_progress=lambda progress: None,
    )
    answers.set()
    assert result.end == end and group.killed


@pytest.mark.slow
def test_a_rank_without_a_result_has_failed_as_soon_as_the_file_system_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, slow_s = Path.exists, 0.4
    monkeypatch.setattr(Path, "exists", lambda self, **options: time.sleep(slow_s) or real(self, **options))
    monkeypatch.setattr(watchdog, "FILES_WAIT_S", 0.05)
    result = watchdog.watch(
        tmp_path,
        EndedAndRunning(),
        settings(failure_grace_s=0.1),
        deadline_s=60.0,
        expected_step_s=None,
        stop_asked=lambda: False,
        on_progress=lambda progress: None,
    )
    assert result.end == "failed" and result.seconds < 5
