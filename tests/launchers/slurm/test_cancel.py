"""Cancelling the pilots of a sweep."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import submission_tracker
from launchers.slurm.cancel import cancel
from launchers.slurm.client import jobs_of
from launchers.state import submissions
from launchers.state.submissions import Submission, all_submissions, new_submission
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import meanwhile, run
from tests.sampling import sampled


@pytest.mark.slow
def test_cancel_ends_the_pilots_and_the_watchers(fake: FakeSlurm, sweep: SweepDir) -> None:
    found: list[int] = []
    with meanwhile(lambda: len(fake.calls("squeue")) > 2, lambda: found.append(cancel(sweep))):
        summary = run(sweep, target_h=1e-4)
    assert found == [3] and "cancelled by another command" in summary.message
    assert summary.exit_code == 1 and [job["state"] for job in fake.jobs] == ["CANCELLED"] * 3
    assert cancel(sweep) == 0
    run(sweep, detach=True)  # a new run submits again
    assert sum(job["state"] == "PENDING" for job in fake.jobs) == 1


@pytest.mark.slow
def test_cancel_without_slurm(fake: FakeSlurm, sweep: SweepDir) -> None:
    assert cancel(sweep) == 0  # nothing was ever submitted
    run(sweep, detach=True)
    fake.mode("squeue", "down")
    with pytest.raises(UltrasweepError, match="nothing was cancelled, the pilots keep running: squeue: error: Unable"):
        cancel(sweep)
    assert submissions.cancel_mark(sweep) is None  # commands that watch the sweep go on


@pytest.mark.slow
def test_what_a_cancel_has_changed_is_said_although_slurm_refuses_it(fake: FakeSlurm, sweep: SweepDir) -> None:
    run(sweep, detach=True)
    fake.mode("scancel", "down")
    with pytest.raises(UltrasweepError, match=r"no pilot cancelled, others may .* watch this sweep submit no more"):
        cancel(sweep)
    assert submissions.cancel_mark(sweep) is not None


ODD: tuple[Any, ...] = (
    [1],
    {"created_at": "yesterday"},
    {"created_at": float("nan")},
    {"uid": 10**30},
    {"folder": "a\0b"},
    {"cluster": 3},
    {"stage": "nothing"},
    {"nodes": 0},
    {"token": "another"},
)
"""Contents of records, or fields changed in a good one, which make it unreadable."""


def plant(sweep: SweepDir, good: Submission, number: int, content: Any) -> None:
    """Write the file of another submission of the same folder."""
    token = f"slurm-20260101-000000-{number:06x}-{good.token[-8:]}"
    fields = {**dataclasses.asdict(good), "token": token, **content} if isinstance(content, dict) else content
    (sweep.path / "submissions" / f"{token}.json").write_text(json.dumps(fields))


def test_odd_records_do_not_stop_a_cancel(
    fake: FakeSlurm, sweep: SweepDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers.slurm.cancel.SBATCH_LIMIT_S", 0.0)  # those without a job are not waited for
    good = submissions.new_submission(sweep, nodes=1, count=1, time_min=10, cluster="")
    submissions.write(sweep, good)
    for number, content in enumerate(ODD):
        plant(sweep, good, number, content)
    # Readable, but not to be believed: a submission from the future, and one of a user whom Slurm does not know.
    plant(sweep, good, 100, {"created_at": 9e9})
    plant(sweep, good, 101, {"uid": 2**32 - 7})
    os.mkfifo(sweep.path / "submissions" / "slurm-20260101-000000-abcdef.json")
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(dataclasses.asdict(good)))
    (sweep.path / "submissions" / "slurm-20260101-000000-abcde0.json").symlink_to(elsewhere)
    job = {"id": 7, "index": 0, "array": False, "state": "PENDING", "reason": "None", "nodes": "", "cluster": ""}
    fake.set(jobs=[{**job, "name": good.job_name, "comment": f"ultrasweep:{good.token}"}])
    lines: list[str] = []
    assert cancel(sweep, lines.append) == 1
    assert [job["state"] for job in fake.jobs] == ["CANCELLED"]
    (line,) = lines
    assert line.startswith(f"{len(ODD) + 2} records of submissions cannot be read (submissions/slurm-20260101-")
    assert line.isprintable()
    assert str(2**32 - 7) not in " ".join(fake.calls("squeue")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shown", "how"),
    sampled(
        [(shown, how) for shown in ("COMPLETING", "CANCELLED", "") for how in ("cancel", "scancel")],
        3,
        seconds=1.5,
        kinds=lambda case: case,
    ),
)
def test_a_run_right_after_a_cancel_submits_again(
    how: str, shown: str, fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows a cancelled job as completing for a while, then as cancelled, then no more."""
    monkeypatch.setattr(submission_tracker, "GRACE_S", 1.0)
    monkeypatch.setattr(submission_tracker, "REQUEUE_GRACE_S", 1.0)
    run(sweep, detach=True)
    fake.move("RUNNING")
    if how == "cancel":
        assert cancel(sweep) == 1
    if shown:
        fake.move(shown)
    else:
        fake.forget()
    assert run(sweep, detach=True).detached
    assert [job["state"] for job in fake.jobs if job["id"] == 2] == ["PENDING"]


@pytest.mark.slow
def test_a_job_that_slurm_requeues_is_not_replaced(
    fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted job is shown as completing before it waits again under the same number."""
    monkeypatch.setattr(submission_tracker, "REQUEUE_GRACE_S", 20.0)
    run(sweep, detach=True)
    fake.move("COMPLETING")
    with meanwhile(lambda: len(fake.calls("squeue")) > 3, lambda: fake.move("PENDING", reason="BeginTime")):
        assert run(sweep, detach=True).detached
    assert len(fake.jobs) == 1


@pytest.mark.slow
def test_a_copied_folder_leaves_the_originals_pilots_alone(fake: FakeSlurm, sweep: SweepDir, tmp_path: Path) -> None:
    run(sweep, detach=True)
    copy = SweepDir(tmp_path / "a copy")
    shutil.copytree(sweep.path, copy.path)
    assert jobs_of(copy) == []
    with pytest.raises(UltrasweepError, match=r"a copy is a copy of .*it's a sweep: .* nothing was cancelled"):
        cancel(copy)
    assert [job["state"] for job in fake.jobs] == ["PENDING"]
    run(copy, detach=True)  # it gets pilots of its own
    assert cancel(copy) == 1
    assert [job["state"] for job in fake.jobs] == ["PENDING", "CANCELLED"]
    assert cancel(sweep) == 1


@pytest.mark.slow
def test_a_copied_damaged_submission_is_no_ones_but_the_originals(
    fake: FakeSlurm, sweep: SweepDir, tmp_path: Path
) -> None:
    run(sweep, detach=True)
    copy = SweepDir(tmp_path / "a copy")
    shutil.copytree(sweep.path, copy.path)
    for one in (sweep, copy):
        (one.path / "submissions" / f"{all_submissions(sweep)[0].token}.json").write_text("{")
    with pytest.raises(UltrasweepError, match="is a copy of another folder"):
        cancel(copy)
    assert cancel(sweep) == 1


@pytest.mark.slow
def test_a_moved_folder_keeps_its_pilots_and_replaces_those_that_wait(
    fake: FakeSlurm, sweep: SweepDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting pilots would look for the old path."""
    run(sweep, detach=True)
    sweep.path.rename(tmp_path / "moved")
    moved = SweepDir(tmp_path / "moved")
    run(moved, detach=True)
    assert [job["state"] for job in fake.jobs] == ["CANCELLED", "PENDING"]
    assert f"this folder was {sweep.path} when they were submitted" in capsys.readouterr().out
    moved.path.rename(tmp_path / "moved again")
    assert cancel(SweepDir(tmp_path / "moved again")) == 1


@pytest.mark.slow
def test_another_way_to_the_same_folder_is_the_same_folder(fake: FakeSlurm, sweep: SweepDir, tmp_path: Path) -> None:
    run(sweep, detach=True)
    (tmp_path / "link").symlink_to(sweep.path)
    assert cancel(SweepDir(tmp_path / "link")) == 1


def test_an_intent_is_as_old_as_its_file(sweep: SweepDir) -> None:
    """The clocks of the login nodes differ by hours."""
    for skew_s in (-7200.0, 7200.0):
        one = dataclasses.replace(new_submission(sweep, nodes=1, count=1, time_min=5), created_at=time.time() + skew_s)
        submissions.write(sweep, one)
        assert submissions.intent_age_s(sweep, one) == pytest.approx(0.0, abs=5.0)
        path = sweep.path / "submissions" / f"{one.token}.json"
        os.utime(path, (path.stat().st_mtime - 90.0,) * 2)
        assert submissions.intent_age_s(sweep, one) == pytest.approx(90.0, abs=5.0)


def test_what_was_cancelled_is_known_by_name_not_by_time(sweep: SweepDir) -> None:
    before, after = (
        dataclasses.replace(new_submission(sweep, nodes=1, count=1, time_min=5), created_at=time.time() + skew_s)
        for skew_s in (7200.0, -7200.0)
    )
    submissions.write(sweep, before)
    submissions.mark_cancelled(sweep)
    submissions.write(sweep, after)
    assert submissions.cancelled_among(sweep, all_submissions(sweep)) == {before.token}
    mark = sweep.path / "submissions" / "cancelled.json"
    mark.write_text(json.dumps({"id": "1", "at": time.time()}))  # of version 0.3.0
    assert submissions.cancelled_among(sweep, all_submissions(sweep)) == {after.token}
    mark.write_text("[]")
    assert submissions.cancelled_among(sweep, all_submissions(sweep)) == set()
