"""The doctor's job on a cluster that does not run it: what is said, and that no job is left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.doctor import slurm_job
from launchers.doctor.on_node import CLOCK, MARK, REQUEST
from launchers.doctor.slurm_job import Asked, ask_nodes, job_of
from launchers.slurm.options import SlurmOptions
from results.errors import UltrasweepError
from tests.launchers.scripted import settings
from tests.launchers.slurm.fakeslurm import FakeSlurm

OPTIONS = SlurmOptions(partition="gpu", time_min=240, signal_delay_s=600, setup=("true",))


def ask(folder: Path, wait_s: float = 1.0, nodes: int = 1, then: Callable[[], None] = lambda: None) -> Asked:
    """``then`` is called after the submission."""
    return ask_nodes(folder, settings(num_devices=2), OPTIONS, nodes, wait_s, lambda line: then())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(slurm_job, "LATE_S", 0.2)
    return tmp_path / "results" / "doctor" / "one"


def test_the_job_has_the_options_of_pilots_and_a_short_limit(tmp_path: Path) -> None:
    job, options = job_of(tmp_path, settings(num_devices=2), OPTIONS, 3)
    assert (job.nodes, job.count) == (3, 1)
    assert (options.partition, options.time_min, options.requeue) == ("gpu", slurm_job.TIME_MIN, False)
    assert options.setup[0] == "true" and options.usable_s > 0
    assert job.stdin is not None and job.stdin.is_relative_to(job.code_dir)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_that_waits_says_why_and_is_cancelled(fake: FakeSlurm, folder: Path) -> None:
    fake.set(default_reason="Priority")
    asked = ask(folder)
    assert asked.answers == ()
    assert asked.trouble == "job 1 still waits after 1 s; Slurm says Priority"
    assert "--wait SECONDS" in asked.remedy
    assert [job["state"] for job in fake.jobs] == ["CANCELLED"]


@pytest.mark.slow
def test_a_job_that_will_never_start_is_not_waited_for(fake: FakeSlurm, folder: Path) -> None:
    fake.set(default_reason="PartitionTimeLimit")
    asked = ask(folder, wait_s=600)
    assert asked.trouble == "Slurm will never start job 1: PartitionTimeLimit"
    assert [job["state"] for job in fake.jobs] == ["CANCELLED"]


@pytest.mark.slow
def test_a_slurm_that_does_not_answer_is_said(fake: FakeSlurm, folder: Path) -> None:
    asked = ask(folder, then=lambda: fake.mode("squeue", "down"))
    assert asked.trouble.startswith("squeue does not show job 1 after 1 s: ")
    assert "Unable to contact slurm controller" in asked.trouble


@pytest.mark.slow
def test_a_job_that_ends_without_a_log_points_at_the_folder(fake: FakeSlurm, folder: Path) -> None:
    asked = ask(folder, wait_s=600, then=lambda: fake.move("FAILED"))
    assert "job 1 ended" in asked.trouble and "the node does not see this folder" in asked.trouble
    assert "results_dir=DIR" in asked.remedy


@pytest.mark.slow
def test_an_answer_in_the_log_is_read_once_the_job_runs(fake: FakeSlurm, folder: Path) -> None:
    def answer() -> None:
        token = (folder / REQUEST).read_text()
        (folder / "answer-0").write_text(token)
        facts = {"token": token, "node": "n1", "shared": {"written": "answer-0"}}
        log = folder / "slurm" / token / "1_0_log.out"
        lines = ["module says hello", f"{MARK}-outside scontrol=/usr/bin/scontrol", f"{MARK} {json.dumps(facts)}"]
        log.write_text("\n".join(lines) + "\n")

    asked = ask(folder, wait_s=60, then=answer)
    assert asked.trouble == "" and asked.job_id == "1"
    (one,) = asked.answers
    assert (one.node, one.file_seen, one.scontrol_outside) == ("n1", True, "/usr/bin/scontrol")
    assert float((folder / CLOCK).read_text()) <= one.read_at
    assert fake.calls("scancel") == []
    (batch,) = (folder / "slurm").rglob("*.sh")
    assert re.search(r"^srun .* - \S+ slurm-\S+ < \S+/launchers/doctor/on_node\.py$", batch.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_a_node_that_does_not_answer_beside_one_that_does_is_said(fake: FakeSlurm, folder: Path) -> None:
    def answer() -> None:
        token = (folder / REQUEST).read_text()
        facts = {"token": token, "node": "n1", "shared": {"written": None}}
        (folder / "slurm" / token / "1_0_log.out").write_text(f"{MARK} {json.dumps(facts)}\n")
        fake.move("FAILED")

    asked = ask(folder, wait_s=600, nodes=2, then=answer)
    assert [one.node for one in asked.answers] == ["n1"]
    assert "job 1 ended" in asked.trouble and "only n1 answered" in asked.trouble


def test_what_cannot_be_submitted_is_one_line(fake: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.mode("sbatch", "refuse")
    with pytest.raises(UltrasweepError, match="Invalid partition name specified"):
        ask(folder)
    monkeypatch.setenv("SLURM_CLUSTERS", "a,b")
    with pytest.raises(UltrasweepError, match="names several clusters"):
        ask(folder.with_name("two"))
    monkeypatch.delenv("SLURM_CLUSTERS")
    monkeypatch.setenv("PATH", "/bin-of-nobody")
    with pytest.raises(UltrasweepError, match="launcher=slurm needs sbatch, srun, squeue and scancel"):
        ask(folder.with_name("three"))
