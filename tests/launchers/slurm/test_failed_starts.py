"""srun's messages about tasks that ended while they started, and the nodes excluded because of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.slurm.failed_starts import lacks_program
from launchers.slurm.pilot_submitter import PilotsEnd
from launchers.slurm.srun_log import MARK, ended_tasks, log_path
from launchers.state import node_exclusions
from launchers.state.pilot_state import PilotState, write_state
from launchers.state.process_identity import own_identity
from launchers.state.submissions import all_submissions, new_submission
from launchers.state.sweep_dir import SweepDir
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.test_reconcile import Submitter

pytestmark = pytest.mark.slow  # each calls the scripts of the cluster a few times


def write_log(sweep: SweepDir, token: str, job: str, text: str, task: int = 0) -> None:
    path = log_path(sweep, token, job, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def started(sweep: SweepDir, pilot_id: str, *nodes: str) -> None:
    """A pilot has written its state."""
    state = PilotState(
        pilot_id=pilot_id,
        identity=own_identity(),
        count=1,
        time=0.0,
        started_at=0.0,
        activity="running",
        nodes=nodes,
    )
    write_state(sweep, state)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: node3: task 2: Exited with exit code 127", {"node3": 2}),
        ("srun: error: node[03-04,7]: tasks 2-4: Exited with exit code 1", {"node03": 2, "node04": 3, "node7": 4}),
        ("srun: error: node3: task 2: Segmentation fault (core dumped)", {"node3": 2}),
        ("srun: error: Task launch for StepId=7.0 failed on node node3: Slurmd could not execve job", {"node3": None}),
        ("srun: error: Node failure on node3", {"node3": None}),
        ("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", {}),
        ("12:00:00 srun: error: node3: task 2: said by a rank", {}),
    ],
)
def test_ended_tasks_in_srun_messages(
    fake: FakeSlurm, sweep: SweepDir, line: str, expected: dict[str, int | None]
) -> None:
    token = new_submission(sweep, nodes=4, count=1, time_min=5).token
    write_log(sweep, token, "7_1", f"{MARK} {token}.1.0\nstarting\n{line}\n")
    found = ended_tasks(sweep, f"{token}.1.0", "7_1")
    assert {one.node: one.task for one in found} == expected


def test_only_the_last_start_of_a_job_counts(fake: FakeSlurm, sweep: SweepDir) -> None:
    """Slurm restarts a job under the same number, and with the same log."""
    token = new_submission(sweep, nodes=2, count=1, time_min=5).token
    first = f"{MARK} {token}.0.0\nsrun: error: node3: task 1: Exited with exit code 1\n"
    write_log(sweep, token, "7", f"{first}{MARK} {token}.0.1\n")
    write_log(sweep, token, "7", "execve(): /no/python: No such file or directory\n", task=1)
    assert ended_tasks(sweep, f"{token}.0.1", "7") == []
    (one,) = ended_tasks(sweep, f"{token}.0.0", "7")
    assert one.reason == (
        "its process ended while it started: Exited with exit code 1 (execve(): /no/python: No such file or directory)"
    )
    assert ended_tasks(sweep, f"{token}.0.0", "8") == []  # no such log


def fail_to_start(fake: FakeSlurm, sweep: SweepDir, number: int, node: str, status: int = 1) -> None:
    """End the job with a log in which the pilot's own task ended at once."""
    token = next(job["name"].rpartition(".")[2] for job in fake.jobs if job["id"] == number)
    said = f"srun: error: {node}: task 0: Exited with exit code {status}"
    write_log(sweep, token, str(number), f"{MARK} {token}.0.0\n{said}\n")
    jobs = [{**job, "state": "FAILED", "nodes": node} if job["id"] == number else job for job in fake.jobs]
    fake.set(jobs=jobs)


def test_a_node_on_which_only_its_pilots_cannot_start_is_excluded(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    started(sweep, "slurm-x.0.0", "node1")
    fail_to_start(fake, sweep, 1, "node2")
    submitter.cycle()
    (found,) = node_exclusions.excluded(sweep).values()
    assert found.node == "node2" and "Exited with exit code 1" in found.reason
    assert "node node2 is excluded for 30 min: a pilot could not start" in submitter.lines[1]
    text = next(log_path(sweep, all_submissions(sweep)[-1].token, "").parent.glob("*.sh")).read_text()
    assert "--exclude=node2\n" in text


def test_a_node_is_excluded_as_soon_as_a_pilot_starts_elsewhere(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    fail_to_start(fake, sweep, 1, "node2")
    submitter.cycle()
    assert not node_exclusions.excluded(sweep)
    started(sweep, "slurm-x.0.0", "node1")
    submitter.cycle()
    assert set(node_exclusions.excluded(sweep)) == {"node2"}


def test_an_environment_that_is_broken_everywhere_excludes_no_node(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    for number in (1, 2, 3):
        submitter.cycle()
        fail_to_start(fake, sweep, number, f"node{number}")
    cycle = submitter.cycle()
    assert isinstance(cycle.given_up[1], PilotsEnd) and not node_exclusions.excluded(sweep)
    assert "task 0: Exited with exit code 1" in str(cycle.given_up[1])
    # The first report names the reason.
    assert "trying again: job 1: 1 FAILED" in submitter.lines[1] and "node1: task 0: Exited" in submitter.lines[1]
    assert "pilots fail to start on 3 nodes (node1, node2, node3), so no node is excluded" in submitter.lines[-1]


def test_a_missing_program_is_named_after_the_first_pilot(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    fail_to_start(fake, sweep, 1, "node1", status=127)
    cycle = submitter.cycle()
    assert "cannot start, because their program is missing there (launcher.python" in str(cycle.given_up[1])
    assert "node1: task 0: Exited with exit code 127" in str(cycle.given_up[1])
    assert len(fake.calls("sbatch")) == 1


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (
            "slurmstepd: error: execve(): nosuch-program: No such file or directory\nsrun: error: n1: task 0: Exited",
            True,
        ),
        ("slurmstepd: error: execve(): /opt/python: Permission denied", True),
        ("srun: error: n1: task 0: Exited with exit code 126", True),
        ("srun: error: n[1-4]: tasks 0-3: Exited with exit code 127", True),
        ("srun: error: n2: task 2: Exited with exit code 127", False),
        ("ModuleNotFoundError: No module named 'torch'\nsrun: error: n1: task 0: Exited with exit code 1", False),
    ],
)
def test_what_shows_that_a_program_is_missing(sweep: SweepDir, text: str, missing: bool) -> None:
    token = new_submission(sweep, nodes=1, count=1, time_min=5).token
    assert not lacks_program(sweep, token)
    write_log(sweep, token, "7", f"{MARK} {token}.0.0\n{text}\n")
    assert lacks_program(sweep, token) == missing
    started(sweep, "slurm-x.0.0", "node1")
    assert not lacks_program(sweep, token)


def test_pilots_that_cannot_start_are_given_up_while_others_work(fake: FakeSlurm, sweep: SweepDir) -> None:
    """The environment breaks while a pilot runs: the other pilots are not submitted for ever."""
    submitter = Submitter(sweep, target_h=1e-4, max_pilots=2)
    submitter.cycle()
    fake.set(jobs=[{**job, "state": "FAILED" if job["index"] else "RUNNING"} for job in fake.jobs])
    for _ in range(8):
        submitter.cycle()
        fake.set(jobs=[{**j, "state": "FAILED" if j["state"] == "PENDING" else j["state"]} for j in fake.jobs])
    assert len(fake.calls("sbatch")) <= 4 and not Path(sweep.path / "nodes").exists()


def test_nodes_that_are_excluded_already_count_when_more_fail(fake: FakeSlurm, sweep: SweepDir) -> None:
    """Nodes fail one after the other: after the second failure the nodes are not to blame, although no two fail
    together."""
    submitter = Submitter(sweep)
    submitter.cycle()
    started(sweep, "slurm-x.0.0", "node1")
    for number in (1, 2, 3):
        fail_to_start(fake, sweep, number, f"node{number + 1}")
        submitter.cycle()
    assert set(node_exclusions.excluded(sweep)) == {"node2", "node3"}
    assert any("on 3 nodes (node4, node" in line and "so no other node is" in line for line in submitter.lines)
