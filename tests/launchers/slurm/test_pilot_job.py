"""What a pilot learns about its own job, with Slurm's commands and in an image without them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.pilot.allocation import STARTED_AT, Allocation
from launchers.slurm.pilot_job import SlurmJob
from launchers.state.pilot_state import requeue_request
from launchers.state.sweep_dir import SweepDir

PLACE = Allocation(pilot_id="slurm-x.0.0", job="7_0", node="node1", is_head=True)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a command on PATH, on which there is no other."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(STARTED_AT, raising=False)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))

    def write(name: str, does: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return write


def test_in_an_image_without_slurm_the_script_is_asked_to_requeue(
    sweep: SweepDir, command: Callable[[str, str], None]
) -> None:
    assert SlurmJob().requeue(sweep, PLACE) is None
    assert requeue_request(sweep, PLACE.pilot_id).exists()
    sweep.pilots.rename(sweep.path / "away")
    assert "squeue or scontrol is missing here" in str(SlurmJob().requeue(sweep, PLACE))


@pytest.mark.parametrize(
    ("state", "scontrol", "why"),
    [
        ("RUNNING", "exit 0", None),
        ("RUNNING", "echo 'Job is not requeuable' >&2; exit 1", "Job is not requeuable"),
        ("COMPLETING", "exit 0", "its state is COMPLETING"),
    ],
)
def test_why_a_job_is_not_requeued(
    sweep: SweepDir, command: Callable[[str, str], None], state: str, scontrol: str, why: str | None
) -> None:
    command("squeue", f"echo {state}")
    command("scontrol", scontrol)
    assert SlurmJob().requeue(sweep, PLACE) == why and not requeue_request(sweep, PLACE.pilot_id).exists()


@pytest.mark.parametrize(
    ("said", "left_s"),
    [
        ("1-02:03:04", 93784.0),
        ("59:30", 3570.0),
        ("0:07", 7.0),
        ("UNLIMITED", math.inf),
        ("INVALID", 0.0),
    ],
)
def test_the_jobs_end_is_what_slurm_says(command: Callable[[str, str], None], said: str, left_s: float) -> None:
    job = SlurmJob()
    command("squeue", f"echo {said}")
    assert job.seconds_left(PLACE) == left_s
    command("squeue", f"echo '{said}|UNLIMITED'")
    assert job.seconds_left(PLACE) == left_s
    command("squeue", "exit 1")
    assert job.seconds_left(PLACE) is None  # the last answer of squeue stays valid: a site may have changed the limit


def test_without_squeue_the_end_at_the_jobs_start_counts(
    command: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SlurmJob().seconds_left(PLACE) == pytest.approx(500.0, abs=2.0)
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert SlurmJob().seconds_left(PLACE) is None


def test_a_clock_that_is_behind_slurms_does_not_make_the_job_longer(
    command: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is 200 s old by this machine's clock, which is an hour behind."""
    monkeypatch.setenv(STARTED_AT, str(time.clock_gettime(time.CLOCK_BOOTTIME) - 200.0))
    command("squeue", "echo '1:06:40|10:00'")
    assert SlurmJob().seconds_left(PLACE) == pytest.approx(400.0, abs=2.0)
    command("squeue", "exit 1")
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(time.time()) + 3600))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600 + 600))
    assert SlurmJob().seconds_left(PLACE) == pytest.approx(400.0, abs=2.0)
