"""Outcomes from the files and exits of an attempt, without processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from launchers.attempt import outcome
from launchers.attempt.outcome import Outcome, check_target_memory, classify, classify_abandoned, disk_trouble, where
from launchers.attempt.watchdog import StalledRank, WatchResult
from launchers.node.fork import RankExit
from workloads.contract import protocol
from workloads.contract.beats import Heartbeat
from workloads.contract.protocol import RankError, RankResult, StepRecord


def exit_of(
    rank: int, *, status: int | None = None, by: int | None = None, at: float = 1.0, ours: bool = False
) -> RankExit:
    return RankExit(rank=rank, status=status, signal=by, time=at, killed_by_us=ours)


def watched(*exits: RankExit, end: Any = "failed", **changes: Any) -> WatchResult:
    heartbeats = {
        exit_.rank: Heartbeat(rank=exit_.rank, phase="step", step=3 + exit_.rank, time=1.0, pid=1) for exit_ in exits
    }
    return WatchResult(
        **{"end": end, "exits": {e.rank: e for e in exits}, "heartbeats": heartbeats, "seconds": 9.0, **changes}
    )


def fail(folder: Path, rank: int, kind: Any, message: str, at: float) -> None:
    error = RankError(rank=rank, phase="warmup", step=0, kind=kind, message=message, traceback="")
    protocol.write_json(protocol.error_path(folder, rank), error)
    os.utime(protocol.error_path(folder, rank), (at, at))


def result(rank: int, loss: float = 2.0) -> RankResult:
    step = StepRecord(step=0, is_warmup=False, step_time_s=1.0, loss=loss)
    return RankResult(rank=rank, coordinates={}, steps=[step], phase_started_at={})


def test_the_first_cause_wins_over_later_ones(tmp_path: Path) -> None:
    fail(tmp_path, 0, "crash", "AttributeError: x", at=20.0)
    fail(tmp_path, 1, "oom", "out of memory", at=10.0)
    verdict = classify(tmp_path, [0, 1], watched(exit_of(0, status=1), exit_of(1, status=1)), {}, None)
    assert (verdict.outcome, verdict.failed_rank, verdict.phase, verdict.phase_step) == ("oom", 1, "warmup", 0)
    assert verdict.evidence == "rank 1 in warmup step 0 (then rank 0 failed too): out of memory"
    assert not verdict.infrastructure


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:123",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "DistNetworkError: The client socket has failed to connect: Connection reset by peer",
        "RuntimeError: Broken pipe",
    ],
)
def test_a_lost_connection_is_a_consequence_even_if_it_is_first(tmp_path: Path, message: str) -> None:
    fail(tmp_path, 0, "nccl_error", message, at=1.0)
    seen = watched(exit_of(0, status=1, at=1.0), exit_of(1, by=signal.SIGSEGV, at=5.0))
    verdict = classify(tmp_path, [0, 1], seen, {}, None)
    assert (verdict.outcome, verdict.failed_rank, verdict.phase, verdict.phase_step) == ("crash", 1, "step", 4)
    assert verdict.evidence == "rank 1 killed by SIGSEGV in step 4 (then rank 0 failed too)"


def test_only_lost_connections_are_the_networks_fault(tmp_path: Path) -> None:
    for rank in (0, 1):
        fail(tmp_path, rank, "nccl_error", "Connection reset by peer", at=1.0 + rank)
    verdict = classify(tmp_path, [0, 1], watched(exit_of(0, status=1), exit_of(1, status=1)), {}, None)
    assert (verdict.outcome, verdict.infrastructure) == ("nccl_error", True)


def test_nccls_watchdog_aborting_its_process_is_a_hang(tmp_path: Path) -> None:
    line = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)"
    for rank in (0, 1):
        protocol.log_path(tmp_path, rank).write_text(f"loading\n{line}\nterminate called\n")
    seen = watched(exit_of(0, by=signal.SIGABRT), exit_of(1, by=signal.SIGABRT))
    verdict = classify(tmp_path, [0, 1], seen, {}, None)
    assert (verdict.outcome, verdict.failed_rank) == ("hang", 0)  # rank 0 stood at step 3, rank 1 at step 4
    assert verdict.evidence is not None and "OpType=ALLREDUCE" in verdict.evidence


def test_the_kernels_oom_killer_is_distinguished_from_other_kills(tmp_path: Path) -> None:
    exits = (exit_of(0, status=None, by=9), exit_of(1, by=9, ours=True))
    assert classify(tmp_path, [0, 1], watched(*exits), {}, None).outcome == "crash"
    verdict = classify(tmp_path, [0, 1], watched(*exits, host_oom_kills=1), {}, None)
    assert verdict.outcome == "oom"
    assert (
        verdict.evidence is not None and "host memory ran out, which the kernel counted 1 time in" in verdict.evidence
    )


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("DistNetworkError: EADDRINUSE", True),
        ("OSError: [Errno 107] Transport endpoint is not connected: '/lustre/results/x'", True),
        ("OSError: [Errno 121] Remote I/O error", True),
        ("KeyError: 'x'", False),
    ],
)
def test_infrastructure_failures_are_distinguished_from_the_points_own(
    tmp_path: Path, message: str, again: bool
) -> None:
    fail(tmp_path, 0, "crash", message, at=1.0)
    verdict = classify(tmp_path, [0], watched(exit_of(0, status=1)), {}, None)
    assert (verdict.outcome, verdict.infrastructure) == ("crash", again)


def test_a_hang_names_the_ranks_and_where_they_stand(tmp_path: Path) -> None:
    stack = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/t/threading.py", line 1 in wait\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/torch/distributed/distributed_c10d.py", line 2810 in all_reduce\n'
        '  File "/x/engine/optimizer.py", line 60 in finish_gradients\n'
    )
    protocol.log_path(tmp_path, 1).write_text(stack)
    still = (StalledRank(rank=1, phase="step", step=2, age_s=31.0),)
    exits = [exit_of(rank, by=9, ours=True) for rank in (0, 1)]
    verdict = classify(tmp_path, [0, 1], watched(*exits, end="hang", stalled=still), {}, None)
    assert (verdict.outcome, verdict.failed_rank, verdict.phase, verdict.phase_step) == ("hang", 1, "step", 2)
    assert verdict.evidence == (
        "no progress: rank 1 in step 2 for 31 s; rank 1 in all_reduce (distributed_c10d.py:2810)"
        " < finish_gradients (optimizer.py:60)"
    )


def test_a_place_is_named_in_words() -> None:
    words = [where(phase, 4) for phase in ("warmup", "replay", "step", "build")]
    assert words == ["in warmup step 4", "in the replay of step 4", "in step 4", "in build"]


def test_a_full_measurement_counts_despite_later_failures(tmp_path: Path) -> None:
    results = {0: result(0), 1: result(1)}
    killed = watched(exit_of(0, status=0), exit_of(1, by=9, ours=True), end="teardown")
    verdict = classify(tmp_path, [0, 1], killed, results, None)
    assert (verdict.outcome, verdict.teardown_hung, verdict.failed_rank) == ("ok", True, 1)
    crashed = watched(exit_of(0, status=0), exit_of(1, by=signal.SIGSEGV), end="ended")
    verdict = classify(tmp_path, [0, 1], crashed, results, None)
    assert (verdict.outcome, verdict.teardown_hung) == ("ok", False)
    assert verdict.evidence == "measured in full; then rank 1 killed by SIGSEGV"
    assert classify(tmp_path, [0, 1], crashed, results, "cancelled").outcome == "ok"


def test_a_loss_that_is_not_finite_has_diverged_unless_it_was_rehearsed(tmp_path: Path) -> None:
    results = {0: result(0, float("nan"))}
    seen = watched(exit_of(0, status=0), end="ended")
    assert classify(tmp_path, [0], seen, results, None).outcome == "diverged"
    assert classify(tmp_path, [0], seen, results, None, measured=False).outcome == "ok"


def test_a_stop_is_no_failure_of_the_point(tmp_path: Path) -> None:
    seen = watched(exit_of(0, by=9, ours=True), end="stopped")
    assert classify(tmp_path, [0], seen, {}, "cancelled").outcome == "cancelled"
    assert classify(tmp_path, [0], seen, {}, "preempted").outcome == "preempted"


def test_a_killed_command_is_not_a_cancel_by_the_user(tmp_path: Path) -> None:
    seen = watched(exit_of(0, by=9, ours=True), end="stopped")
    verdict = classify(tmp_path, [0], seen, {}, "abandoned")
    assert verdict.outcome == "cancelled"
    assert (
        verdict.evidence
        == "the command that ran the sweep had gone (killed, or its terminal closed): stopped after 9.0 s"
    )
    by_user = classify(tmp_path, [0], seen, {}, "cancelled")
    assert by_user.evidence == "stopped by the user after 9.0 s"  # whether it waits is a matter of the queue


def test_a_full_disk_is_distinguished_from_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_trouble(tmp_path) is None
    assert disk_trouble(tmp_path / "gone") == "is not there any more"
    verdict = classify(tmp_path / "gone", [0], watched(exit_of(0, status=1)), {}, None)
    assert verdict.evidence == f"rank 0 in step 3 could not write its files: {tmp_path}/gone is not there any more"
    monkeypatch.setattr(outcome, "LEAST_FREE_BYTES", 2**80)
    assert disk_trouble(tmp_path) == "is on a full disk"
    monkeypatch.setattr(os, "statvfs", lambda folder: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    assert disk_trouble(tmp_path) == "cannot be used (Stale file handle)"


def test_an_abandoned_attempt_is_ok_only_when_all_of_it_was_measured() -> None:
    both = {0: result(0), 1: result(1)}
    assert classify_abandoned([0, 1], both, "the pilot died", "step", 3).outcome == "ok"
    verdict = classify_abandoned([0, 1], {0: result(0)}, "the pilot died", "build", None)
    assert (verdict.outcome, verdict.phase, verdict.infrastructure) == ("node_failure", "build", True)


def test_a_rehearsal_over_the_targets_memory_is_oom() -> None:
    ok = Outcome(outcome="ok", phase="done")
    gib = 2**30
    assert check_target_memory(ok, 70 * gib, 78 * gib, "h100") is ok
    assert check_target_memory(ok, None, 78 * gib, "h100") is ok
    checked = check_target_memory(ok, 95 * gib, 78 * gib, "h100")
    assert checked.outcome == "oom"
    assert checked.evidence is not None and "95.00 GiB is over the 78.00 GiB" in checked.evidence
