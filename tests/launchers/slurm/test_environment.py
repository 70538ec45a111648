"""A user's variables for Slurm's commands do not reach the launcher's calls."""

from __future__ import annotations

import pytest

from launchers.slurm.cancel import cancel
from launchers.slurm.client import jobs_of
from launchers.slurm.environment import command_environment, unset_for_sbatch
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import run

HOSTILE = {
    "SQUEUE_PARTITION": "other",
    "SQUEUE_STATES": "RUNNING",
    "SQUEUE_FORMAT": "%i",
    "SCANCEL_STATE": "RUNNING",
    "SACCT_FORMAT": "JobID",
    "SLURM_TIME_FORMAT": "relative",
    "SRUN_DEBUG": "3",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_EXCLUSIVE": "user",
    "SLURM_JOB_ID": "1",
}


def test_only_variables_that_reach_the_cluster_are_left() -> None:
    plain = {"HOME": "/root", "SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "one", "SLURM_JWT": "x"}
    found = command_environment({**plain, **HOSTILE, "LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr"})
    assert found == {**plain, "LC_ALL": "C"}


def test_sbatch_gets_account_variables_but_none_that_change_a_job() -> None:
    site = {"SBATCH_ACCOUNT": "llm", "SBATCH_PARTITION": "gpu", "SLURM_CONF": "/etc/slurm.conf", "LC_ALL": "de_DE"}
    assert unset_for_sbatch({**site, **HOSTILE}, {"time", "partition"}) == sorted([*HOSTILE, "SBATCH_PARTITION"])


@pytest.mark.slow
def test_a_users_variables_hide_no_job_and_spare_none(
    fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    run(sweep, detach=True)
    assert run(sweep, detach=True).detached and len(fake.jobs) == 1
    assert cancel(sweep) == 1 and [job["state"] for job in fake.jobs] == ["CANCELLED"]


def test_several_clusters_are_refused(fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "a,b")
    with pytest.raises(UltrasweepError, match="SLURM_CLUSTERS=a,b names several clusters"):
        run(sweep, detach=True)
    assert not fake.calls("sbatch")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "later"), [("far", None), ("far", "near"), ("", "near")])
def test_every_call_asks_the_cluster_to_which_the_pilots_were_submitted(
    fake: FakeSlurm,
    sweep: SweepDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first: str,
    later: str | None,
) -> None:
    def choose(cluster: str | None) -> None:
        monkeypatch.setenv("SLURM_CLUSTERS", cluster) if cluster else monkeypatch.delenv("SLURM_CLUSTERS", False)

    choose(first)
    run(sweep, detach=True, target_h=1e-4, max_pilots=2)
    choose(later)
    assert len(jobs_of(sweep) or ()) == 2
    assert run(sweep, detach=True, target_h=1e-4, max_pilots=3).detached
    assert [job["cluster"] for job in fake.jobs] == [first] * 3  # the third beside the two, and none twice
    told = f"SLURM_CLUSTERS={later} takes effect when they have ended" in capsys.readouterr().out
    assert told == (later is not None)
    assert cancel(sweep) == 3 and {job["state"] for job in fake.jobs} == {"CANCELLED"}


@pytest.mark.slow
def test_a_sweep_that_was_cancelled_may_go_on_elsewhere(
    fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in ("far", "near"):
        monkeypatch.setenv("SLURM_CLUSTERS", cluster)
        run(sweep, detach=True)
        assert cancel(sweep) == 1
    assert [job["cluster"] for job in fake.jobs] == ["far", "near"]
