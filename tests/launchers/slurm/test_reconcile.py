"""Cycles of submitting on a cluster that exists only on PATH: no job is lost or submitted twice."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import sbatch, submission_tracker
from launchers.slurm.options import SlurmOptions
from launchers.slurm.pilot_submitter import PilotsEnd
from launchers.slurm.reconcile import Cycle, Reconciler
from launchers.slurm.submitter_lease import only_submitter
from launchers.state import node_exclusions, pilot_state, queue, submissions
from launchers.state.pilot_config import read_pilot_config
from launchers.state.pilot_state import Liveness, PilotState, write_state
from launchers.state.process_identity import own_identity
from launchers.state.queue import QueueReader
from launchers.state.submissions import all_submissions, new_submission
from launchers.state.sweep_dir import SweepDir
from tests.launchers.scripted import attempt_record, points, settings
from tests.launchers.slurm.fakeslurm import FakeSlurm

ATTEMPT = attempt_record(1, "ok")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    """Four points for one node of two devices, then four for two nodes."""
    made = SweepDir.create(tmp_path / "a sweep", {})
    wide = points(*["ok"] * 4, dp=4, global_batch_size=4)
    made.add_points([*points(*["ok"] * 4), *(_moved(point, 4) for point in wide)])
    return made


def _moved(point: Any, by: int) -> Any:
    return dataclasses.replace(point, index=point.index + by)


class Submitter:
    """A `Reconciler` and the lines that it reported."""

    def __init__(self, sweep: SweepDir, **options: Any) -> None:
        self.lines: list[str] = []
        self.reconciler = Reconciler(
            sweep,
            settings(num_devices=2),
            SlurmOptions(**{"time_min": 5, **options}),
            pilot=("python", "-m", "launchers.pilot"),
            command="test",
            report=self.lines.append,
            stopped=lambda: False,
        )

    def cycle(self, attempts: Sequence[Any] = ()) -> Cycle:
        return self.reconciler.cycle(attempts)


def shapes(fake: FakeSlurm) -> list[str]:
    """Job numbers by line of squeue."""
    return [f"{job['id']}_{job['index']}" for job in fake.jobs]


@pytest.mark.slow
def test_one_array_per_shape_and_no_second_submission(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep, target_h=1 / 60)  # 60 s a pilot, 30 s a point
    first = submitter.cycle()
    assert first.submitted == 4 and first.live == {1: 2, 2: 2} and first.missing == 0
    assert shapes(fake) == ["1_0", "1_1", "2_0", "2_1"]
    assert [(one.nodes, one.count, one.stage, one.job_id) for one in all_submissions(sweep)] == [
        (2, 2, "submitted", "1"),
        (1, 2, "submitted", "2"),
    ]
    for _ in range(2):
        assert submitter.cycle().submitted == 0
    assert Submitter(sweep, target_h=1 / 60).cycle().submitted == 0  # the same command once more
    assert submitter.lines == ["2 pilots of 2 nodes submitted: job 1", "2 pilots of 1 node submitted: job 2"]


@pytest.mark.slow
def test_the_pilots_config_is_written_before_the_job(fake: FakeSlurm, sweep: SweepDir) -> None:
    Submitter(sweep, signal_delay_s=60).cycle()
    for one in all_submissions(sweep):
        config = read_pilot_config(pilot_state.config_path(sweep, one.token))
        assert (config.nodes, config.batch_system, config.stop_with_parent) == (one.nodes, "slurm", False)
        assert config.wall_time_s == 5 * 60 - 60 - 30
        assert config.provenance is not None and "git_commit" in config.provenance
    code = list((sweep.path / "code").iterdir())
    assert len(code) == 1 and (code[0] / "launchers" / "pilot" / "pilot.py").is_file()
    out = subprocess.run(
        [sys.executable, "-c", "import launchers.pilot.pilot; print(launchers.pilot.pilot.__file__)"],
        cwd=code[0],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert out.stdout.strip() == str(code[0] / "launchers" / "pilot" / "pilot.py")


@pytest.mark.slow
def test_arrays_stay_within_the_clusters_limit(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.set(max_array=2)
    assert Submitter(sweep, target_h=1e-4).cycle().submitted == 8
    assert [one.count for one in all_submissions(sweep)] == [2, 2, 2, 2]
    assert ["show", "config"] in fake.calls("scontrol")


@pytest.mark.slow
@pytest.mark.parametrize("max_array", [0, 1])
def test_a_cluster_without_arrays(max_array: int, fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.set(max_array=max_array)
    assert Submitter(sweep, target_h=1e-4, max_pilots=2).cycle().submitted == 4
    assert shapes(fake) == ["1_0", "2_0", "3_0", "4_0"] and not any(job["array"] for job in fake.jobs)


@pytest.mark.slow
@pytest.mark.parametrize("known_by", ["comment", "name"])
def test_a_submitter_killed_after_sbatch(known_by: str, fake: FakeSlurm, sweep: SweepDir) -> None:
    """sbatch has submitted the job and its id was never written down: the token finds the job."""
    intent = new_submission(sweep, nodes=2, count=1, time_min=5)
    submissions.write(sweep, intent)
    texts = {"comment": f"ultrasweep:{intent.token}", "name": intent.job_name}
    texts = {"comment": "(null)", "name": "the-sites-own", known_by: texts[known_by]}
    fake.set(jobs=[_job(7, state="RUNNING", **texts)], next=8)
    cycle = Submitter(sweep).cycle()
    assert cycle.live[2] == 1 and cycle.submitted == 1  # only the shape of one node lacked a pilot
    found = all_submissions(sweep)[0]
    assert (found.token, found.stage, found.job_id) == (intent.token, "submitted", "7")


@pytest.mark.slow
def test_really_killed_in_the_middle(fake: FakeSlurm, sweep: SweepDir) -> None:
    """SIGKILL from inside sbatch, after the job is in the queue."""
    code = (
        "import json, os, pathlib, sys\n"
        "from tests.launchers.slurm.fakeslurm import FakeSlurm\n"
        "from tests.launchers.slurm.test_reconcile import Submitter\n"
        "from launchers.state.sweep_dir import SweepDir\n"
        "path = pathlib.Path(sys.argv[1]) / 'state.json'\n"
        "path.write_text(json.dumps(json.loads(path.read_text()) | {'caller': os.getpid()}))\n"
        "Submitter(SweepDir(pathlib.Path(sys.argv[2]))).cycle()\n"
    )
    fake.mode("sbatch", "killed")
    words = [sys.executable, "-c", code, str(fake.folder), str(sweep.path)]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -9
    fake.mode("sbatch")
    assert [one.stage for one in all_submissions(sweep)] == ["intent"] and len(fake.jobs) == 1
    shutil.rmtree(submissions.lease_path(sweep))  # its lease would be stale in half a minute
    Submitter(sweep).cycle()
    assert len(fake.jobs) == 2 and {one.stage for one in all_submissions(sweep)} == {"submitted"}


@pytest.mark.slow
def test_an_intent_whose_job_may_still_come_is_waited_for(
    fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions.write(sweep, new_submission(sweep, nodes=2, count=1, time_min=5))
    submitter = Submitter(sweep)
    cycle = submitter.cycle()
    assert cycle.live[2] == cycle.unsettled[2] == 1
    assert [job["id"] for job in fake.jobs] == [1]  # of the other shape
    monkeypatch.setattr(submission_tracker, "INTENT_LIMIT_S", 0.0)
    assert submitter.cycle().submitted == 1
    assert [one.stage for one in all_submissions(sweep)] == ["failed", "submitted", "submitted"]


@pytest.mark.slow
def test_sbatch_fails_and_has_submitted(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "silent")
    submitter = Submitter(sweep)
    assert submitter.cycle().submitted == 0
    assert "Socket timed out" in submitter.lines[0]
    fake.mode("sbatch")
    submitter.cycle()
    assert len(fake.jobs) == 2 and {one.stage for one in all_submissions(sweep)} == {"submitted"}


@pytest.mark.slow
def test_sbatch_fails_and_has_not(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "lost")
    submitter = Submitter(sweep)
    submitter.cycle()
    assert fake.jobs == [] and all_submissions(sweep)[0].stage == "unsure"
    fake.mode("sbatch")
    submitter.cycle()
    assert len(fake.jobs) == 2
    assert sorted(one.stage for one in all_submissions(sweep)) == ["failed", "failed", "submitted", "submitted"]


@pytest.mark.slow
def test_sbatch_does_not_answer(fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "SBATCH_LIMIT_S", 0.3)
    fake.mode("sbatch", "hang")
    submitter = Submitter(sweep)
    started = time.monotonic()
    cycle = submitter.cycle()
    assert cycle.submitted == 0 and cycle.missing == 2 and time.monotonic() - started < 5
    assert "did not answer within" in submitter.lines[0]


@pytest.mark.slow
def test_slurmctld_is_down(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    fake.mode("squeue", "down")
    for _ in range(3):
        assert submitter.cycle().jobs is None
    assert "Unable to contact" in submitter.reconciler.client.complaint
    fake.mode("squeue")
    assert submitter.cycle().submitted == 0 and {one.stage for one in all_submissions(sweep)} == {"submitted"}


@pytest.mark.slow
def test_a_refusal_is_reported_once_and_not_retried(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "refuse")
    submitter = Submitter(sweep, partition="nope")
    cycle = submitter.cycle()
    assert set(cycle.given_up) == {1, 2} and cycle.runnable == 0
    assert str(cycle.given_up[2]) == (
        "Slurm refuses pilots of 2 nodes: invalid partition specified: nope; "
        "Batch job submission failed: Invalid partition name specified"
    )
    submitter.cycle()
    assert len(fake.calls("sbatch")) == 2


@pytest.mark.slow
def test_a_user_may_have_few_jobs(fake: FakeSlurm, sweep: SweepDir) -> None:
    fake.mode("sbatch", "at most 1")
    assert Submitter(sweep, target_h=1e-4).cycle().submitted == 8
    assert {one.count for one in all_submissions(sweep) if one.stage == "submitted"} == {1}


@pytest.mark.slow
def test_excluded_nodes(fake: FakeSlurm, sweep: SweepDir) -> None:
    node_exclusions.exclude(sweep, "node3", "memory stays", "p")
    node_exclusions.exclude(sweep, "x\n#SBATCH --uid=0", "hostile", "p")
    Submitter(sweep, exclude="node9").cycle()
    text = next(submissions.log_dir(sweep.path, all_submissions(sweep)[0].token).glob("*.sh")).read_text()
    assert "#SBATCH --exclude=node9,node3\n" in text and "uid" not in text
    fake.forget()


@pytest.mark.slow
def test_vanished_pilots_are_submitted_again(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    fake.forget()
    assert submitter.cycle([ATTEMPT]).submitted == 2
    assert [one.stage for one in all_submissions(sweep)] == ["ended", "ended", "submitted", "submitted"]


@pytest.mark.slow
def test_a_reused_job_id_belongs_to_another_user(fake: FakeSlurm, sweep: SweepDir) -> None:
    """slurmctld was killed before it had saved this sweep's jobs; jobs of others have their numbers now."""
    submitter = Submitter(sweep)
    submitter.cycle()
    fake.set(jobs=[_job(1, state="RUNNING", name="someone", comment="else"), _job(2, name="x", comment="a|b:c.d")])
    cycle = submitter.cycle([ATTEMPT])
    assert cycle.jobs == [] and cycle.submitted == 2
    assert not any("1" in call or "2" in call for call in fake.calls("scancel"))


@pytest.mark.slow
def test_a_lost_node_is_followed_by_waiting(fake: FakeSlurm, sweep: SweepDir) -> None:
    """NODE_FAIL, then PENDING under the same number: no pilot is submitted in between."""
    submitter = Submitter(sweep)
    submitter.cycle()
    fake.move("NODE_FAIL")
    assert submitter.cycle().submitted == 0
    fake.move("PENDING", reason="BeginTime")
    cycle = submitter.cycle()
    assert cycle.submitted == 0 and cycle.live == {1: 1, 2: 1}
    fake.move("NODE_FAIL")
    submitter.cycle()
    time.sleep(0.3)  # Slurm does not requeue it this time
    assert submitter.cycle([ATTEMPT]).submitted == 2
    fake.move("RUNNING", of=1)  # it does after all: one more pilot, which counts
    assert submitter.cycle().live[2] == 2


@pytest.mark.slow
def test_claims_of_dead_pilots_count_as_waiting(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    token = next(one.token for one in all_submissions(sweep) if one.nodes == 1)
    fake.move("RUNNING")
    queue_reader = QueueReader(sweep, f"{token}.0.0", lambda line: None)
    while queue_reader.claim_next(lambda waiting: waiting) is not None:
        pass
    cycle = submitter.cycle()
    assert cycle.runnable == 0 and cycle.submitted == 0 and len(queue.claims_of_others(sweep, "")) == 8
    fake.move("PENDING", of=2)  # requeued: points of its last pilot wait
    cycle = submitter.cycle()
    assert cycle.runnable == 8 and cycle.submitted == 0 and not fake.calls("scancel")
    fake.move("FAILED", of=2)
    assert submitter.cycle([ATTEMPT]).submitted == 1


@pytest.mark.slow
def test_a_stalled_pilot_does_not_count(fake: FakeSlurm, sweep: SweepDir) -> None:
    """The pilot's job runs, it holds every narrow point, and it stands still: without a new pilot these would never
    run."""
    submitter = Submitter(sweep)
    submitter.reconciler._liveness = Liveness(sweep, lease_s=0.2)
    submitter.cycle()
    token = next(one.token for one in all_submissions(sweep) if one.nodes == 1)
    fake.move("RUNNING")
    queue_reader = QueueReader(sweep, f"{token}.0.0", lambda line: None)
    while queue_reader.claim_next(lambda waiting: waiting) is not None:
        pass
    state = PilotState(
        pilot_id=f"{token}.0.0", identity=own_identity(), count=7, time=0.0, started_at=0.0, activity="running"
    )
    write_state(sweep, state)
    assert submitter.cycle().submitted == 0
    time.sleep(0.3)
    assert submitter.cycle().submitted == 1
    assert submitter.lines.count(f"pilot {token}.0.0 is stalled; another will run its points") == 1
    assert submitter.cycle().submitted == 0  # the new one is on its way
    write_state(sweep, dataclasses.replace(state, pilot_id=f"{token}.0.1", count=1))  # Slurm starts the job again
    fake.set(jobs=[job for job in fake.jobs if job["id"] != 3])
    assert submitter.cycle([ATTEMPT]).submitted == 0


@pytest.mark.slow
def test_pilots_without_points_are_taken_off_the_queue(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep, target_h=1e-4)
    submitter.cycle()
    for path in sweep.todo.glob("*dp2*"):  # the grid has lost its narrow points
        path.unlink()
    fake.set(jobs=[{**job, "state": "RUNNING"} if job["index"] == 0 else job for job in fake.jobs])
    submitter.cycle()
    left = {(job["id"], job["index"]): job["state"] for job in fake.jobs}
    assert [left[2, index] for index in range(4)] == ["RUNNING", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert [left[1, index] for index in range(4)] == ["RUNNING", "PENDING", "PENDING", "PENDING"]
    assert fake.calls("scancel") == [["--state=PENDING", "2_1", "2_2", "2_3"]]


@pytest.mark.slow
def test_pilots_without_attempts_are_given_up(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep, max_nodes=1)
    for _ in range(3):
        assert submitter.cycle().submitted == 1
        folder = submissions.log_dir(sweep.path, all_submissions(sweep)[-1].token)
        (folder / "1_0_log.out").write_text("starting\nno module named torch\n")
        fake.move("FAILED")
    cycle = submitter.cycle()
    error = cycle.given_up[1]
    assert isinstance(error, PilotsEnd) and cycle.submitted == 0
    assert "ended 3 times in a row without an attempt; the last: job 3: 1 FAILED" in str(error)
    assert str(error).endswith("starting | no module named torch")


@pytest.mark.slow
def test_the_accounting_of_a_job_that_squeue_no_longer_shows(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep, max_nodes=1)
    submitter.cycle()
    name = all_submissions(sweep)[0].job_name
    fake.set(accounted=[{"id": "1", "state": "CANCELLED by 0", "exit": "0:15", "name": name}])
    fake.mode("sacct")
    fake.forget()
    submitter.cycle([ATTEMPT])
    assert all_submissions(sweep)[0].message == "job 1: 1 CANCELLED (exit 0:15)"


@pytest.mark.slow
def test_one_submitter_at_a_time(fake: FakeSlurm, sweep: SweepDir) -> None:
    with only_submitter(sweep, 0) as lease:
        assert lease is not None
        assert Submitter(sweep).cycle().busy
    assert not fake.calls("squeue") and not fake.calls("sbatch")
    assert Submitter(sweep).cycle().submitted == 2


def test_a_damaged_submission_is_still_found(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep, max_nodes=1)
    submitter.cycle()
    path = sweep.path / "submissions" / f"{all_submissions(sweep)[0].token}.json"
    path.write_text('{"token": "rm -rf')
    assert submitter.cycle().submitted == 0 and all_submissions(sweep)[0].job_id == "1"


def _job(number: int, *, name: str, comment: str, state: str = "PENDING") -> dict[str, Any]:
    fields = {"id": number, "index": 0, "array": False, "state": state, "reason": "None", "nodes": ""}
    return {**fields, "name": name, "comment": comment}
