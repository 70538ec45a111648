"""The client of Slurm, on a cluster that exists only on PATH."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from launchers.slurm.client import Job, SlurmClient, jobs_of
from launchers.state.submissions import new_submission
from launchers.state.sweep_dir import SweepDir
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import run

TOKEN = "slurm-20260101-120000-abcdef"


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_jobs_of_a_sweep(fake: FakeSlurm, sweep: SweepDir) -> None:
    assert jobs_of(sweep) == [] and not fake.calls("squeue")
    run(sweep, detach=True)
    jobs = jobs_of(sweep)
    assert jobs is not None and [(job.name, job.state) for job in jobs] == [("1", "PENDING")]
    fake.mode("squeue", "down")
    assert jobs_of(sweep) is None


def test_jobs_know_whether_they_live() -> None:
    def job(state: str) -> Job:
        return Job(token=TOKEN, index=0, name="1", array_id="1", state=state, reason="", nodes="")

    assert job("A_STATE_OF_A_LATER_SLURM").alive and not job("A_STATE_OF_A_LATER_SLURM").waiting
    assert job("REQUEUED").alive and job("REQUEUED").waiting
    assert not job("NODE_FAIL").alive and not job("TIMEOUT").alive


@pytest.mark.parametrize(
    ("reason", "held"),
    [
        ("launch_failed_requeued_held", True),
        ("launch failure limit exceeded requeued held", True),
        ("job_requeued_in_held_state", False),  # scontrol requeuehold
        ("JobHeldUser", False),
        ("JobHeldAdmin", False),
        ("Withheld until requeued jobs end", False),
    ],
)
def test_only_a_job_that_slurm_itself_holds_is_released(reason: str, held: bool) -> None:
    job = Job(token=TOKEN, index=0, name="1", array_id="1", state="PENDING", reason=reason, nodes="")
    assert job.held_by_slurm is held


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("PartitionTimeLimit", True),
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocMaxNodePerJobLimit", True),
        ("QOSMaxGRESPerJob", True),
        ("Priority", False),
        ("Resources", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpGRES", False),
        ("JobHeldUser", False),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
    ],
)
def test_reasons_that_do_not_pass_by_themselves(reason: str, never: bool) -> None:
    job = Job(token=TOKEN, index=0, name="1", array_id="1", state="PENDING", reason=reason, nodes="")
    assert job.never_starts is never
    assert not dataclasses.replace(job, state="RUNNING").never_starts
