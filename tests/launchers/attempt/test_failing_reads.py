"""Files of ranks that cannot be read temporarily, or need not be read, do not change the outcome of an attempt."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from launchers.attempt import execute, watchdog
from launchers.attempt.attempt import Attempt, new_attempt_id, start_attempt
from launchers.attempt.outcome import Outcome
from launchers.attempt.watchdog import Progress, WatchResult
from launchers.node.rank_group import RankGroup
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem import patience
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import points, settings
from workloads.contract import protocol
from workloads.contract.beats import Heartbeat
from workloads.contract.protocol import Breakdown, RankError, RankResult


def new_attempt(sweep: SweepDir, method: str = "measured") -> Attempt:
    """An attempt of two ranks that nobody runs."""
    sweep.add_points(points("ok", method=method))
    claim = queue_reader(sweep, "p").claim_next(everything)
    assert claim is not None
    name = new_attempt_id(claim.point, 1)
    return start_attempt(claim, name, 1, settings(), host="h", port=1, device_ids=None, nodes=("n",))


def control(on_progress: Callable[[Progress], None] = lambda progress: None) -> execute.Control:
    """Callbacks of a pilot that starts nothing."""
    nothing = cast(RankGroup, None)
    return execute.Control(
        start=lambda ranks: nothing, stop_reason=lambda: None, on_progress=on_progress, wait_until_free=lambda: None
    )


def judge(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, failing: str) -> Any:
    """The outcome when the first three calls of ``protocol.<failing>`` fail with ESTALE."""
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 1e-4)
    real, left = getattr(protocol, failing), [1, 2, 3]

    def fails(*arguments: Any) -> Any:
        if left:
            left.pop()
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*arguments)

    monkeypatch.setattr(protocol, failing, fails)
    watched = WatchResult(end="ended", exits={}, heartbeats={}, seconds=1.0)
    control = cast(execute.Control, SimpleNamespace(stop_reason=lambda: None))
    return execute._judge(attempt, [0, 1], watched, control)[1]


def test_results_that_cannot_be_read_now_are_waited_for(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = new_attempt(sweep)
    for rank in (0, 1):
        result = RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={})
        protocol.write_json(protocol.result_path(attempt.folder, rank), result)
    assert judge(attempt, monkeypatch, "read_result").outcome == "ok"


def test_an_error_that_cannot_be_read_now_is_not_taken_for_a_crash(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt(sweep)
    for rank in (0, 1):
        error = RankError(rank=rank, phase="step", step=1, kind="oom", message="out of memory", traceback="")
        protocol.write_json(protocol.error_path(attempt.folder, rank), error)
    outcome = judge(attempt, monkeypatch, "read_error")
    assert (outcome.outcome, outcome.phase_step) == ("oom", 1)


@pytest.mark.parametrize("method", ["measured", "rehearsed"])
@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), RuntimeError("odd")])
def test_processes_that_live_on_are_known_although_no_result_can_be_read(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(execute, "FILES_LIMIT_S", 0.0)
    monkeypatch.setattr(protocol, "read_result", fails)
    watched = WatchResult(end="stopped", exits={}, heartbeats={}, seconds=1.0, survivors=("4242 on node7",))
    monkeypatch.setattr(execute, "_watch", lambda *_: watched)
    done = execute.execute(new_attempt(sweep, method), settings(), control(), sweep.stages)
    assert done.survivors == ("4242 on node7",)
    assert done.outcome.outcome == "crash" and str(error) in (done.outcome.evidence or "")


def test_a_rehearsal_says_which_of_its_stages_runs(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = new_attempt(sweep, "rehearsed")
    experiment = attempt.point.experiment.replace(pp=2, pp_schedule="1f1b", dp_replicate=1)
    attempt = dataclasses.replace(attempt, point=dataclasses.replace(attempt.point, experiment=experiment))
    attempt = dataclasses.replace(attempt, task=dataclasses.replace(attempt.task, experiment=experiment))
    seen: list[Progress] = []

    def run(attempt: object, ranks: Sequence[int], settings: object, control: execute.Control) -> execute.Execution:
        control.on_progress(Progress(phase="build", step=None))
        results = {rank: RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={}) for rank in ranks}
        return execute.Execution(outcome=Outcome(outcome="ok"), results=results)

    monkeypatch.setattr(execute, "_run", run)
    with pytest.raises(KeyError):  # the ranks were not run, so there are no results to put together
        execute.execute(attempt, settings(), control(seen.append), sweep.stages)
    assert [progress.part for progress in seen] == ["stage 1 of 2", "stage 2 of 2"]


@pytest.mark.parametrize(
    ("asked", "device", "profiled", "reused"),
    [
        (False, "cuda", False, True),
        (False, "cuda", True, True),
        (True, "cuda", False, False),
        (True, "cuda", True, True),
        (True, "cpu", False, True),  # where nothing is profiled
    ],
)
def test_a_stage_without_the_requested_profile_is_rerun(
    sweep: SweepDir, tmp_path: Path, asked: bool, device: Literal["cuda", "cpu"], profiled: bool, reused: bool
) -> None:
    attempt = new_attempt(sweep, "rehearsed")
    measure = dataclasses.replace(attempt.task.measure, profile=asked)
    attempt = dataclasses.replace(attempt, task=dataclasses.replace(attempt.task, measure=measure, device=device))
    times = dict.fromkeys((one.name for one in dataclasses.fields(Breakdown) if one.name != "comm_by_axis"), 0.5)
    breakdown = Breakdown(**times, comm_by_axis=[]) if profiled else None
    cached = tmp_path / "stage.json"
    protocol.write_json(cached, RankResult(rank=1, coordinates={}, steps=[], phase_started_at={}, breakdown=breakdown))
    assert execute._reuse_stage(cached, attempt, 0) is reused
    rank_result = protocol.read_result(attempt.folder, 0)
    assert (rank_result is not None) is reused
    assert rank_result is None or (rank_result.rank, rank_result.breakdown) == (0, breakdown)


def test_an_error_of_the_filesystem_is_no_fault_of_the_point() -> None:
    assert execute.internal_error(OSError(errno.EIO, "Input/output error")).outcome.infrastructure
    assert not execute.internal_error(TypeError("odd")).outcome.infrastructure


def test_the_disk_is_asked_once_and_only_of_ranks_that_ended_before_their_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = protocol.result_path

    def path(folder: Path, rank: int) -> Path:
        asked.append(rank)
        return real(folder, rank)

    monkeypatch.setattr(protocol, "result_path", path)
    beat = {"step": 1, "time": 1.0, "pid": 1}
    states = {
        0: watchdog._Rank(heartbeat=Heartbeat(rank=0, phase="teardown", **beat)),  # type: ignore[arg-type]
        1: watchdog._Rank(heartbeat=Heartbeat(rank=1, phase="step", **beat)),  # type: ignore[arg-type]
        2: watchdog._Rank(),
    }
    files = watchdog._ResultFiles(tmp_path)
    for _ in range(50):
        watchdog._note_results(files, dict.fromkeys(states), states)  # type: ignore[arg-type]
        assert [state.has_result for state in states.values()] == [True, False, False]
    assert asked == [1, 2]


@pytest.mark.parametrize(("phase", "failed"), [("step", True), ("teardown", False)])
def test_a_rank_that_reports_a_failure_has_failed_unless_it_was_measured(phase: Any, failed: bool) -> None:
    heartbeat = Heartbeat(rank=0, phase=phase, step=None, time=1.0, pid=1, failed=True)
    assert watchdog._reported_error(watchdog._Rank(heartbeat=heartbeat)) is failed
