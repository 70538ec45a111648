"""Slurm accepts no more jobs of this user, or refuses a submission: few retries, and no files left behind."""

from __future__ import annotations

import pytest

from launchers.slurm import job_quota
from launchers.slurm.job_quota import JobQuota
from launchers.state import node_exclusions, pilot_state
from launchers.state.pilot_config import read_pilot_config
from launchers.state.submissions import all_submissions
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from tests.launchers.scripted import points
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import run
from tests.launchers.slurm.test_reconcile import ATTEMPT, Submitter

pytestmark = pytest.mark.slow  # each calls the scripts of the cluster a few times


def left_behind(sweep: SweepDir) -> dict[str, int]:
    """Files and folders of submissions, by place."""
    places = {"submissions": "slurm-*.json", "pilots": "slurm-*.json", "slurm": "*"}
    return {place: len(list((sweep.path / place).glob(pattern))) for place, pattern in places.items()}


@pytest.fixture
def wide(sweep: SweepDir) -> SweepDir:
    """Twenty points of one node."""
    sweep.add_points(points(*["ok"] * 20))
    return sweep


def test_one_refusal_is_remembered_and_reported_once(fake: FakeSlurm, wide: SweepDir) -> None:
    fake.mode("sbatch", "quota 5")
    submitter = Submitter(wide, target_h=1e-4)
    first = submitter.cycle()
    assert (first.submitted, first.missing, first.live) == (5, 0, {1: 5})
    asked = len(fake.calls("sbatch"))
    assert asked <= 7
    for _ in range(5):
        assert submitter.cycle().submitted == 0
    assert len(fake.calls("sbatch")) == asked
    assert sum("no more pilots of this user" in line for line in submitter.lines) == 1
    assert left_behind(wide) == dict.fromkeys(("submissions", "pilots", "slurm"), len(all_submissions(wide)))
    assert {one.stage for one in all_submissions(wide)} == {"submitted"}


def test_room_of_ended_pilots_is_used_at_once(fake: FakeSlurm, wide: SweepDir) -> None:
    fake.mode("sbatch", "quota 5")
    submitter = Submitter(wide, target_h=1e-4)
    submitter.cycle()
    asked = len(fake.calls("sbatch"))
    fake.set(jobs=[{**job, "state": "COMPLETED"} if at < 2 else job for at, job in enumerate(fake.jobs)])
    assert submitter.cycle([ATTEMPT]).submitted == 2 and len(fake.calls("sbatch")) - asked <= 2


def test_a_larger_quota_is_found_by_asking_for_one_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_quota, "_FIRST_PAUSE_S", 10.0)
    quota = JobQuota()
    assert quota.allowed(20, 0, now=0.0) == 20 and not quota.full
    assert quota.refused(4, now=0.0) and quota.full
    assert [quota.allowed(16, 4, now) for now in (1.0, 9.0, 10.0)] == [0, 0, 1]
    assert not quota.refused(4, now=10.0)
    assert [quota.allowed(16, 4, now) for now in (20.0, 30.0)] == [0, 1]
    assert quota.allowed(17, 3, now=21.0) == 1
    quota.accepted(5)
    assert not quota.full and quota.allowed(15, 5, now=31.0) == 15


def test_detach_does_not_wait_for_a_quota(fake: FakeSlurm, wide: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    fake.mode("sbatch", "quota 2")
    assert run(wide, target_h=1e-4, detach=True).detached
    output = capsys.readouterr().out
    assert (
        "accepts no more pilots of this user now" in output and "2 pilots keep running without this command" in output
    )


def test_a_refusal_leaves_no_files(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "refuse")
    with pytest.raises(UltrasweepError, match="Slurm refuses pilots of 1 node"):
        run(sweep)
    assert left_behind(sweep) == {"submissions": 0, "pilots": 0, "slurm": 0}


@pytest.mark.parametrize("words", ["Invalid node name specified", "Requested node configuration is not available"])
def test_pilots_get_excluded_nodes_where_slurm_takes_them_only_so(words: str, fake: FakeSlurm, sweep: SweepDir) -> None:
    node_exclusions.exclude(sweep, "node3", "memory stays", "p")
    fake.mode("sbatch", f"not without: {words}")
    submitter = Submitter(sweep)
    assert submitter.cycle().submitted == 1
    assert (
        f"only if they may use the excluded nodes (node3): Batch job submission failed: {words}" in submitter.lines[0]
    )
    (one,) = all_submissions(sweep)
    assert read_pilot_config(pilot_state.config_path(sweep, one.token)).use_excluded
    assert left_behind(sweep) == {"submissions": 1, "pilots": 1, "slurm": 1}


@pytest.mark.parametrize("mode", ["banner", "two numbers"])
def test_a_sites_own_numbers_are_not_taken_for_the_jobs(mode: str, fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", mode)
    submitter = Submitter(sweep)
    submitter.cycle()
    submitter.cycle()
    (one,) = all_submissions(sweep)
    assert (one.job_id, one.stage, len(fake.jobs)) == ("1", "submitted", 1)
