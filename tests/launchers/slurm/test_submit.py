"""Whole runs on a cluster that exists only on PATH; the test itself does the pilots' work."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import demand, pilot_submitter, submit
from launchers.slurm.cancel import cancel
from launchers.slurm.client import Limits
from launchers.slurm.options import SlurmOptions
from launchers.state import queue, submissions
from launchers.state.queue import QueueReader
from launchers.state.submissions import all_submissions, new_submission
from launchers.state.sweep_dir import SweepDir, entry_names
from launchers.status.status import StatusReader
from results.errors import UltrasweepError
from tests.launchers.scripted import cluster, points, settings
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import finish_all, interrupt, meanwhile, run
from tests.launchers.slurm.test_batch_file import parameters


def test_a_dry_run_writes_nothing_and_needs_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    wide = points("ok", dp=32, global_batch_size=32)
    sweep = SweepDir(tmp_path / "sweep")
    texts = submit.dry_run(
        sweep, [*points("ok", "ok"), *wide], settings(num_devices=8, device="cuda", cluster=cluster()), SlurmOptions()
    )
    assert [parameters(text)["nodes"] for text in texts] == ["4", "1"]
    assert all(parameters(text)["gpus-per-node"] == "8" for text in texts)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_splits_arrays_that_the_cluster_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(submit, "default_limits", lambda: Limits(max_array_size=2, max_job_count=1000))
    options = SlurmOptions(time_min=2, signal_delay_s=30)  # a pilot has time for two points
    texts = submit.dry_run(SweepDir(Path("s")), points(*["ok"] * 5), settings(cluster=cluster()), options)
    assert [parameters(text).get("array") for text in texts] == ["0-1%2", None]


def test_paths_in_a_batch_file_are_those_that_the_user_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may reach the target of a link by another path."""
    (tmp_path / "mnt" / "nfs7").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "mnt" / "nfs7")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PWD", str(tmp_path / "home"))
    (text,) = submit.dry_run(SweepDir(Path("results/s")), points("ok"), settings(cluster=cluster()), SlurmOptions())
    assert str(tmp_path / "home" / "results" / "s") in text and "nfs7" not in text
    here = SweepDir.create(Path("results/s"), {})
    submissions.write(here, new_submission(here, nodes=1, count=1, time_min=5))
    everywhere = [SweepDir(tmp_path / name / "results" / "s") for name in ("home", "mnt/nfs7")]
    assert [len(all_submissions(one)) for one in (here, *everywhere)] == [1, 1, 1]
    monkeypatch.setenv("PWD", "/")  # a stale variable
    assert submissions.log_dir(Path("results"), "t") == tmp_path / "mnt" / "nfs7" / "results" / "slurm" / "t"


def test_the_default_limit_of_nodes_is_told_once(
    fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demand, "DEFAULT_NODES", 1)
    assert run(sweep, detach=True, time_min=2, signal_delay_s=30).detached  # a pilot has 60 s, each point takes 30
    assert len(fake.jobs) == 1
    assert capsys.readouterr().out.count("3 points of 1 node: 1 pilot at a time, not 2 (by default ") == 1


@pytest.mark.slow
def test_a_run_from_submission_to_the_last_row(fake: FakeSlurm, sweep: SweepDir) -> None:
    with meanwhile(lambda: bool(fake.jobs), lambda: finish_all(sweep)):
        summary = run(sweep, target_h=1e-4)
    assert (summary.left, summary.exit_code, summary.detached) == (0, 0, False)
    assert [job["state"] for job in fake.jobs] == ["CANCELLED"] * 3  # they would have found nothing


@pytest.mark.slow
def test_a_filesystem_that_fails_for_minutes_is_waited_out(
    fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else submits the pilots that are missing when it works again."""
    reads, marks, read, mark = count(), count(), StatusReader.read, submissions.cancel_mark
    failed: list[int] = []

    def failing_read(reader: StatusReader, *arguments: Any, **options: Any) -> Any:
        if (number := next(reads)) in (3, 4):
            failed.append(number)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(reader, *arguments, **options)

    def failing_mark(of: SweepDir) -> str | None:
        if next(marks) == 3:
            raise submissions.FilesUnreadable("cancelled.json cannot be read: Stale file handle")
        return mark(of)

    monkeypatch.setattr(StatusReader, "read", failing_read)
    monkeypatch.setattr(submissions, "cancel_mark", failing_mark)
    with meanwhile(lambda: failed == [3, 4], lambda: finish_all(sweep)):
        summary = run(sweep)
    assert (summary.left, summary.exit_code) == (0, 0)
    said = capsys.readouterr().out
    assert "Input/output error; trying again" in said and "Stale file handle; trying again" in said


@pytest.mark.slow
def test_a_job_that_outlives_its_pilot_is_named(
    fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm's daemon of the job was killed: the pilot has ended, but Slurm does not know."""

    def end() -> None:
        fake.set(jobs=[{**job, "state": "RUNNING", "nodes": "node3"} for job in fake.jobs])
        finish_all(sweep)

    with meanwhile(lambda: bool(fake.jobs), end):
        summary = run(sweep)
    assert (summary.left, summary.exit_code) == (0, 0)
    said = capsys.readouterr().out
    assert "nodes are still held by job 1 (RUNNING) on node3; scancel 1 releases them" in said


@pytest.mark.slow
def test_a_run_goes_on_while_points_are_added(
    fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    added: list[int] = []

    def feed() -> str:
        if added or len(entry_names(sweep.done)) < 3:
            return ""
        added.append(sweep.add_points(points("ok", "ok", "ok", "ok")[3:]))
        finish_all(sweep)
        return "one more"

    with meanwhile(lambda: bool(fake.jobs), lambda: finish_all(sweep)):
        summary = run(sweep, feed=feed)
    assert added == [1] and summary.left == 0 and len(entry_names(sweep.done)) == 4
    assert "one more" in capsys.readouterr().out


@pytest.mark.slow
def test_detach_returns_at_once(fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(sweep, detach=True)
    assert (summary.detached, summary.exit_code, summary.left) == (True, 0, 3)
    output = capsys.readouterr().out
    for line in ("1 pilot of 1 node submitted: job 1", "python -m sweep watch", "python -m sweep cancel"):
        assert line in output
    assert run(sweep, detach=True).detached and len(fake.jobs) == 1


@pytest.mark.slow
def test_ctrl_c_leaves_the_pilots(fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    with meanwhile(lambda: len(fake.calls("squeue")) > 2, interrupt):
        summary = run(sweep)
    assert (summary.detached, summary.exit_code) == (True, 0)
    assert [job["state"] for job in fake.jobs] == [
        "PENDING"
    ] and "running without this command" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_before_anything_is_submitted(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("squeue", "down")
    submissions.write(sweep, new_submission(sweep, nodes=1, count=1, time_min=5))  # of an earlier run: squeue is asked
    submissions.update(sweep, all_submissions(sweep)[0], stage="ended")
    with meanwhile(lambda: len(fake.calls("squeue")) > 1, interrupt):
        summary = run(sweep)
    assert (summary.interrupted, summary.detached, summary.exit_code) == (True, False, 130)
    assert fake.jobs == []


@pytest.mark.slow
def test_ctrl_c_after_pilots_have_failed(
    fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_submitter, "_PAUSES_S", (0.0, 60.0, 60.0))
    output = ""

    def failed() -> bool:
        nonlocal output
        if fake.jobs and fake.jobs[0]["state"] == "PENDING":
            fake.move("FAILED")
        output += capsys.readouterr().out
        return "trying again in 60 s: job 1: 3 FAILED; its log is empty" in output

    with meanwhile(failed, interrupt):
        summary = run(sweep, target_h=1e-4)
    assert (summary.interrupted, summary.exit_code) == (True, 130)
    said = capsys.readouterr().out
    assert "3 pilots were submitted, and none waits or runs now; the last: job 1: 3 FAILED" in said
    assert "no pilot was submitted" not in said


@pytest.mark.slow
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


def test_a_refused_run_is_one_error(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "refuse")
    with pytest.raises(UltrasweepError, match="Slurm refuses pilots of 1 node: invalid partition specified") as error:
        run(sweep)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_points_that_fit_no_pilot_end_the_run(fake: FakeSlurm, sweep: SweepDir) -> None:
    sweep.add_points(points("ok", dp=8, global_batch_size=8))
    with meanwhile(lambda: bool(fake.jobs), lambda: _finish_narrow(sweep, fake)):
        summary = run(sweep, max_nodes=2)
    assert summary.message == "1 point needs more nodes than launcher.max_nodes=2" and summary.too_wide == 1


@pytest.mark.slow
def test_slurm_comes_back(fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    run(sweep, detach=True)
    fake.mode("squeue", "down")

    def back() -> None:
        fake.mode("squeue")
        time.sleep(0.5)
        finish_all(sweep)

    with meanwhile(lambda: len(fake.calls("squeue")) > 3, back):
        assert run(sweep).left == 0
    output = capsys.readouterr().out
    assert output.count("Slurm does not answer") == 1 and "Slurm answers again" in output
    assert len(fake.calls("sbatch")) == 1


def test_without_slurm_on_path(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UltrasweepError, match="needs sbatch, srun, squeue and scancel, which are not on PATH here"):
        run(sweep)


def test_a_missing_squeue_is_not_waited_for(fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake.folder / "squeue").unlink()
    monkeypatch.setenv("PATH", str(fake.folder))
    with pytest.raises(UltrasweepError, match="launcher=slurm needs squeue, which is not on PATH here"):
        run(sweep)


def _finish_narrow(sweep: SweepDir, fake: FakeSlurm) -> None:
    queue_reader = QueueReader(sweep, "p", lambda line: None)
    while (
        claim := queue_reader.claim_next(lambda some: [one for one in some if one.experiment.world_size == 2])
    ) is not None:
        queue.finish(claim, "ok")
    fake.move("COMPLETED")


@pytest.mark.slow
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
            for act in (lambda: run(sweep), lambda: cancel(sweep)):
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
