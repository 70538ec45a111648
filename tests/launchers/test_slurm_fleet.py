"""The client of Slurm, and whole runs on a cluster that exists only on PATH; the test itself does the pilots' work."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import submission_tracker as submission_tracker
from launchers.slurm import submit as submit
from launchers.slurm.client import Job, SlurmClient, jobs_of
from launchers.slurm.options import SlurmOptions
from launchers.state import queue, submissions
from launchers.state.queue import QueueReader
from launchers.state.submissions import all_submissions, new_submission
from launchers.state.sweep_dir import SweepDir
from launchers.status.run_summary import RunSummary
from results.errors import UltrasweepError
from tests.launchers.fakeslurm import FakeSlurm
from tests.launchers.scripted import points, settings

TOKEN = "slurm-20260101-120000-abcdef"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(submission_tracker, "GRACE_S", 0.0)
    monkeypatch.setattr(submit, "POLL_S", 0.1)
    monkeypatch.setattr(submit, "SLOWEST_POLL_S", 0.2)
    monkeypatch.setattr(submit, "_LOOK_S", 0.1)
    cluster = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
    return cluster


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    made = SweepDir.create(tmp_path / "it's a sweep", {})
    made.add_points(points("ok", "ok", "ok"))
    return made


def run(sweep: SweepDir, *, detach: bool = False, **options: Any) -> RunSummary:
    chosen = SlurmOptions(**{"time_min": 5, **options})
    return submit.run_slurm(sweep, settings(num_devices=2), chosen, live=False, command="test", detach=detach)


@contextmanager
def meanwhile(ready: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Do ``act`` in a thread as soon as it is ``ready``."""

    def wait() -> None:
        until = time.monotonic() + 20
        while not ready() and time.monotonic() < until:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def finish_all(sweep: SweepDir) -> None:
    queue_reader = QueueReader(sweep, "p", lambda line: None)
    while (claim := queue_reader.claim_next(lambda waiting: waiting)) is not None:
        queue.finish(claim, "ok")


def test_squeue_is_read_line_by_line(fake: FakeSlurm) -> None:
    ours = {"name": f"x.{TOKEN}", "comment": f"ultrasweep:{TOKEN}", "nodes": "node[1-2]", "reason": "None"}
    lines: list[dict[str, Any]] = [
        {"id": 5, "index": 3, "array": True, "state": "RUNNING", **ours},
        {"id": 6, "index": 0, "array": False, "state": "CANCELLED by 0", **ours},
        {"id": 7, "index": 0, "array": False, "state": "RUNNING", **ours, "comment": "a\nb|c|d", "name": "somebody"},
        {"id": 8, "index": 0, "array": False, "state": "RUNNING", **ours, "comment": f"see {TOKEN}x", "name": "x"},
    ]
    fake.set(jobs=lines)
    jobs = SlurmClient().jobs({0})
    assert jobs is not None and [(job.name, job.index, job.state, job.alive) for job in jobs] == [
        ("5_3", 3, "RUNNING", True),
        ("6", 0, "CANCELLED", False),
    ]
    assert fake.calls("squeue")[0][:7] == ["-h", "-a", "-r", "-t", "all", "-u", "0"]


def test_a_call_that_hangs_is_ended(fake: FakeSlurm) -> None:
    fake.mode("squeue", "hang")
    client, started = SlurmClient(call_limit_s=0.3), time.monotonic()
    assert client.jobs({0}) is None and time.monotonic() - started < 5
    assert client.complaint == "squeue did not answer within 0 s"


def test_no_accounting_is_asked_only_once(fake: FakeSlurm, sweep: SweepDir) -> None:
    client, submission = SlurmClient(), new_submission(sweep, nodes=1, count=1, time_min=5)
    assert client.endings([submission]) is None and client.endings([submission]) is None
    assert len(fake.calls("sacct")) == 1
    fake.mode("sacct", "down")  # slurmdbd may come back
    other = SlurmClient()
    assert other.endings([submission]) is None and other.endings([submission]) is None
    assert len(fake.calls("sacct")) == 3
    (fake.folder / "sacct").unlink()
    assert SlurmClient().endings([submission]) is None


def test_jobs_of_a_sweep(fake: FakeSlurm, sweep: SweepDir) -> None:
    assert jobs_of(sweep) == [] and not fake.calls("squeue")
    run(sweep, detach=True)
    jobs = jobs_of(sweep)
    assert jobs is not None and [(job.name, job.state) for job in jobs] == [("1", "PENDING")]
    fake.mode("squeue", "down")
    assert jobs_of(sweep) is None


def test_a_run_from_submission_to_the_last_row(fake: FakeSlurm, sweep: SweepDir) -> None:
    with meanwhile(lambda: bool(fake.jobs), lambda: finish_all(sweep)):
        summary = run(sweep, target_h=1e-4)
    assert (summary.left, summary.exit_code, summary.detached) == (0, 0, False)
    assert [job["state"] for job in fake.jobs] == ["CANCELLED"] * 3  # they would have found nothing


def test_detach_returns_at_once(fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(sweep, detach=True)
    assert (summary.detached, summary.exit_code, summary.left) == (True, 0, 3)
    said = capsys.readouterr().out
    for line in ("1 pilot of 1 node submitted: job 1", "python -m sweep watch", "python -m sweep cancel"):
        assert line in said
    assert run(sweep, detach=True).detached and len(fake.jobs) == 1


def test_ctrl_c_leaves_the_pilots(fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    with meanwhile(lambda: len(fake.calls("squeue")) > 2, interrupt):
        summary = run(sweep)
    assert (summary.detached, summary.exit_code) == (True, 0)
    assert [job["state"] for job in fake.jobs] == ["PENDING"] and "on without this command" in capsys.readouterr().out


def test_ctrl_c_before_anything_is_submitted(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("squeue", "down")
    submissions.write(sweep, new_submission(sweep, nodes=1, count=1, time_min=5))  # of an earlier run: squeue is asked
    submissions.change(sweep, all_submissions(sweep)[0], stage="ended")
    with meanwhile(lambda: len(fake.calls("squeue")) > 1, interrupt):
        summary = run(sweep)
    assert (summary.interrupted, summary.detached, summary.exit_code) == (True, False, 130)
    assert fake.jobs == []


def test_ctrl_c_while_sbatch_works(fake: FakeSlurm, sweep: SweepDir) -> None:
    """The first waits for sbatch; the second does not, and the next run finds the job if there is one."""
    fake.mode("sbatch", "hang")

    def twice() -> None:
        interrupt()
        time.sleep(0.5)
        interrupt()

    with meanwhile(lambda: bool(fake.calls("sbatch")), twice):
        summary = run(sweep)
    assert summary.detached and [one.stage for one in all_submissions(sweep)] == ["intent"]
    assert not submissions.lease_path(sweep).exists()


def test_cancel_ends_the_pilots_and_the_watchers(fake: FakeSlurm, sweep: SweepDir) -> None:
    found: list[int] = []
    with meanwhile(lambda: len(fake.calls("squeue")) > 2, lambda: found.append(submit.cancel(sweep))):
        summary = run(sweep, target_h=1e-4)
    assert found == [3] and "cancelled by another command" in summary.message
    assert summary.exit_code == 1 and [job["state"] for job in fake.jobs] == ["CANCELLED"] * 3
    assert submit.cancel(sweep) == 0
    run(sweep, detach=True)  # a new run is a new wish
    assert sum(job["state"] == "PENDING" for job in fake.jobs) == 1


def test_cancel_without_slurm(fake: FakeSlurm, sweep: SweepDir) -> None:
    assert submit.cancel(sweep) == 0  # nothing was ever submitted
    run(sweep, detach=True)
    fake.mode("squeue", "down")
    with pytest.raises(UltrasweepError, match="nothing was cancelled, the pilots go on: squeue: error: Unable"):
        submit.cancel(sweep)


def test_a_refused_run_is_one_error(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "refuse")
    with pytest.raises(UltrasweepError, match="Slurm refuses pilots of 1 node: invalid partition specified") as error:
        run(sweep)
    assert "\n" not in str(error.value)


def test_points_that_fit_no_pilot_end_the_run(fake: FakeSlurm, sweep: SweepDir) -> None:
    sweep.add_points(points("ok", dp=8, global_batch_size=8))
    with meanwhile(lambda: bool(fake.jobs), lambda: _finish_narrow(sweep, fake)):
        summary = run(sweep, max_nodes=2)
    assert summary.message == "1 point needs more nodes than launcher.max_nodes=2" and summary.too_wide == 1


def test_slurm_comes_back(fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    run(sweep, detach=True)
    fake.mode("squeue", "down")

    def back() -> None:
        fake.mode("squeue")
        time.sleep(0.5)
        finish_all(sweep)

    with meanwhile(lambda: len(fake.calls("squeue")) > 3, back):
        assert run(sweep).left == 0
    said = capsys.readouterr().out
    assert said.count("Slurm does not answer") == 1 and "Slurm answers again" in said
    assert len(fake.calls("sbatch")) == 1


def test_without_slurm_on_path(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UltrasweepError, match="needs sbatch and srun"):
        run(sweep)


@pytest.mark.slow
def test_watch_ends_with_the_last_point_or_the_last_pilot(fake: FakeSlurm, sweep: SweepDir) -> None:
    run(sweep, detach=True)
    with meanwhile(lambda: len(fake.calls("squeue")) > 3, fake.forget):
        summary = submit.watch(sweep, live=False)
    assert "no pilot is there, 3 points left" in summary.message and len(fake.calls("sbatch")) == 1
    with meanwhile(lambda: True, lambda: finish_all(sweep)):
        assert submit.watch(sweep, live=False).left == 0


def _finish_narrow(sweep: SweepDir, fake: FakeSlurm) -> None:
    queue_reader = QueueReader(sweep, "p", lambda line: None)
    while (
        claim := queue_reader.claim_next(lambda some: [one for one in some if one.experiment.world_size == 2])
    ) is not None:
        queue.finish(claim, "ok")
    fake.move("COMPLETED")


def test_jobs_know_whether_they_live() -> None:
    def job(state: str) -> Job:
        return Job(token=TOKEN, index=0, name="1", array_id="1", state=state, reason="", nodes="")

    assert job("A_STATE_OF_A_LATER_SLURM").alive and not job("A_STATE_OF_A_LATER_SLURM").waiting
    assert job("REQUEUED").alive and job("REQUEUED").waiting
    assert not job("NODE_FAIL").alive and not job("TIMEOUT").alive


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_somebody_elses_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folders are closed to others
        Path(name).chmod(0o755)
        fake, sweep = FakeSlurm(Path(name) / "bin"), SweepDir.create(Path(name) / "sweep", {})
        (fake.folder / "calls").touch(0o666)
        (fake.folder / "calls").chmod(0o666)
        monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
        sweep.add_points(points("ok"))
        run(sweep, detach=True)
        os.seteuid(65534)
        try:
            for act in (lambda: run(sweep), lambda: submit.cancel(sweep)):
                with pytest.raises(UltrasweepError, match=r"cannot write in .*: Permission denied"):
                    act()
        finally:
            os.seteuid(0)
        assert [job["state"] for job in fake.jobs] == ["PENDING"]


def test_a_sweep_that_is_removed(fake: FakeSlurm, sweep: SweepDir) -> None:
    with (
        meanwhile(lambda: bool(fake.jobs), lambda: shutil.rmtree(sweep.path, ignore_errors=True)),
        pytest.raises(UltrasweepError, match="was removed while its points ran"),
    ):
        run(sweep)
