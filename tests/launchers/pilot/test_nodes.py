"""Pilots of several nodes on this machine: each node is a process with Slurm's variables of that node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.rows.load import last_attempts, load
from launchers.settings import LaunchSettings
from launchers.state import node_exclusions, pilot_state
from launchers.state.circuit_breaker import paused_kinds, resume
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import sweep_status
from results.tables import store
from tests.launchers.local_runs import SCRIPTED, phase_of, until
from tests.launchers.processes import rank_pids
from tests.launchers.scripted import points, settings
from workloads.contract.protocol import write_json

pytestmark = pytest.mark.drawn(one_in=2)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "sweep", {})


class Job:
    """The processes that ``srun`` starts in one allocation."""

    def __init__(self, sweep: SweepDir, launch: LaunchSettings, nodes: int, name: str = "slurm-x", **env: str) -> None:
        self.sweep = sweep
        config = PilotConfig(
            settings=launch,
            command=None,
            wall_time_s=None,
            stop_with_parent=False,
            nodes=nodes,
            batch_system="slurm",
            provenance={},
        )
        write_json(pilot_state.config_path(sweep, name), pilot_config_to_dict(config))
        self.tasks = [
            subprocess.Popen(
                [*SCRIPTED, str(sweep.path), name],
                env=pilot_environment()
                | {"SLURM_PROCID": str(task), "SLURMD_NODENAME": f"node{task}", "SLURM_JOB_ID": "7"}
                | env,
                stdin=subprocess.DEVNULL,
            )
            for task in range(nodes)
        ]

    def wait(self, seconds: float = 40.0) -> list[int]:
        return [task.wait(seconds) for task in self.tasks]

    def agent(self) -> int:
        """Pid of the agent on the first node, a child of the pilot."""
        pid = self.tasks[0].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.fixture
def job(sweep: SweepDir) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(launch: LaunchSettings, nodes: int, **more: str) -> Job:
        jobs.append(Job(sweep, launch, nodes, **more))
        return jobs[-1]

    yield start
    for one in jobs:
        for task in one.tasks:
            task.kill()
            task.wait()


def rows_of(sweep: SweepDir) -> list[dict[str, Any]]:
    return sorted(store.read_attempts(sweep.path).to_pylist(), key=lambda row: row["started_at"])


def history(sweep: SweepDir) -> list[Any]:
    return list(sweep_status(sweep).attempts)


@pytest.mark.slow
def test_a_wide_point_runs_over_all_nodes_and_narrow_ones_side_by_side(sweep: SweepDir, job: Any) -> None:
    sweep.add_points([*points("ok", dp=4), *(p.__class__(index=i + 1, grid="", experiment=p.experiment, deadline_s=30.0)
                      for i, p in enumerate(points("ok", "slowish", *["ok"] * 4)))])  # fmt: skip
    assert job(settings(), 2).wait() == [0, 0]
    assert sweep_status(sweep).done == {"ok": 7}
    wide, *narrow = rows_of(sweep)
    assert wide["world_size"] == 4
    by_nodes = {tuple(record.nodes) for record in history(sweep)}
    assert by_nodes == {("node0", "node1"), ("node0",), ("node1",)}
    slowish = next(row for row in narrow if row["model"] == "slowish")
    beside = [r for r in narrow if slowish["started_at"] < r["started_at"] < slowish["ended_at"]]
    assert len(beside) >= 2, "nothing ran beside the slow point"


@pytest.mark.slow
def test_a_lost_node_fails_its_point_as_node_failure_and_the_rest_goes_on(sweep: SweepDir, job: Any) -> None:
    sweep.add_points(points("slow", dp=4, deadline_s=60.0))
    started = job(settings(phase_limits_s={}, point_deadline_s=4.0), 2)
    until(lambda: len(rank_pids(sweep.attempts)) == 4 and phase_of(sweep) == "warmup")
    pids = [pid for rank, pid in rank_pids(sweep.attempts).items() if rank in (2, 3)]
    started.tasks[1].kill()
    assert started.wait()[0] == 0
    row = rows_of(sweep)[0]
    assert (row["outcome"], row["failed_rank"], row["will_retry"]) == ("node_failure", 2, True)
    assert "node node1 was lost: its agent's connection closed, with ranks 2-3" in row["evidence"]
    assert set(node_exclusions.excluded(sweep)) == {"node1"}
    assert sweep_status(sweep).todo == 1  # it needs two nodes, and one is left
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)


@pytest.mark.slow
def test_an_excluded_node_is_not_used_by_the_next_pilot(sweep: SweepDir, job: Any) -> None:
    sweep.add_points(points(*["ok"] * 3))
    node_exclusions.exclude(sweep, "node1", "its fan is broken", "p")
    assert job(settings(), 2).wait()[0] == 0
    assert {tuple(record.nodes) for record in history(sweep)} == {("node0",)}
    sweep.add_points(
        [
            p.__class__(index=9, grid="", experiment=p.experiment, deadline_s=9.0)
            for p in points("ok", global_batch_size=8)
        ]
    )
    node_exclusions.exclude(sweep, "node0", "so is this one's", "p")
    assert job(settings(), 2, name="slurm-y").wait()[0] == 4
    message = pilot_state.read_state(sweep, "slurm-y.0.0").message  # type: ignore[union-attr]
    assert "its fan is broken" in message and "so is this one's" in message
    assert sweep_status(sweep).todo == 1


@pytest.mark.slow
def test_the_first_point_of_a_shape_goes_alone(sweep: SweepDir, job: Any) -> None:
    sweep.add_points(points(*["ok"] * 6))
    assert job(settings(), 3).wait()[0] == 0
    rows = rows_of(sweep)
    assert all(row["started_at"] >= rows[0]["ended_at"] for row in rows[1:])
    assert len({tuple(record.nodes) for record in history(sweep)}) == 3


@pytest.mark.slow
def test_points_that_fail_alike_are_paused_and_reported(sweep: SweepDir, job: Any) -> None:
    sweep.add_points([*points(*["raises"] * 6), *(
        p.__class__(index=i + 10, grid="", experiment=p.experiment, deadline_s=30.0) for i, p in enumerate(points("ok"))
    )])  # fmt: skip
    assert job(settings(breaker_failures=3), 1).wait() == [0]
    status = sweep_status(sweep)
    assert status.done == {"crash": 3, "ok": 1} and status.todo == 3
    paused = paused_kinds(sweep, status.attempts, 3)
    assert list(paused) == ["raises, 1 node, ZeRO 0"]
    assert "3 points failed alike: crash in step: rank 1 in step 1" in paused["raises, 1 node, ZeRO 0"]
    message = pilot_state.read_state(sweep, "slurm-x.0.0").message  # type: ignore[union-attr]
    assert message.startswith("3 points of a kind that keeps failing are paused (raises, 1 node, ZeRO 0: 3 points")
    resume(sweep)
    time.sleep(0.01)
    assert job(settings(breaker_failures=3), 1, name="slurm-y").wait() == [0]
    assert sweep_status(sweep).done == {"crash": 6, "ok": 1}


@pytest.mark.slow
def test_a_killed_pilot_takes_its_agents_and_ranks_with_it(sweep: SweepDir, job: Any) -> None:
    sweep.add_points(points("slow", dp=4, deadline_s=60.0))
    first = job(settings(phase_limits_s={}), 2)
    until(lambda: len(rank_pids(sweep.attempts)) == 4 and phase_of(sweep) == "warmup")
    pids = [*rank_pids(sweep.attempts).values()]
    pids.append(first.agent())
    first.tasks[0].kill()
    assert first.wait(10)[0] == -9
    until(lambda: not any(_runs(pid) for pid in pids), 8)
    again = job(settings(phase_limits_s={}, point_deadline_s=0.5), 2, SLURM_RESTART_COUNT="1")
    assert again.wait()[0] == 0
    assert [row["outcome"] for row in rows_of(sweep)] == ["node_failure", "timeout"]
    assert {record.pilot_id for record in history(sweep)} == {"slurm-x.0.1"}


@pytest.mark.slow
def test_a_connection_without_the_secret_is_no_agent(sweep: SweepDir, job: Any) -> None:
    """A connection without the secret, or with another protocol, changes nothing."""
    import socket

    sweep.add_points(points("ok", dp=4))
    head_address = sweep.pilots / "slurm-x.0.0.head.json"
    started = job(settings(), 2)
    until(head_address.exists)
    assert head_address.stat().st_mode & 0o077 == 0
    place = json.loads(head_address.read_text())
    for word in (b"GET / HTTP/1.1\r\n\r\n", b'{"secret": "guess", "name": "node1"}\n{"hello": {}}\n'):
        with socket.create_connection(("127.0.0.1", place["port"])) as stranger:
            stranger.sendall(word)
    assert started.wait() == [0, 0]
    assert sweep_status(sweep).done == {"ok": 1}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_a_point_that_ran_twice_counts_once_and_is_marked(sweep: SweepDir, job: Any) -> None:
    """A stalled pilot is taken for dead. When it goes on later, its row is marked."""
    sweep.add_points(points("slowish", deadline_s=60.0))
    first = job(settings(phase_limits_s={}), 1)
    until(lambda: len(rank_pids(sweep.attempts)) == 2 and phase_of(sweep) == "warmup")
    frozen = [first.tasks[0].pid, first.agent()]
    frozen += rank_pids(sweep.attempts).values()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    assert job(settings(phase_limits_s={}), 1, name="slurm-y").wait() == [0]
    assert [row["outcome"] for row in rows_of(sweep)] == ["node_failure", "ok"]
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    assert first.wait() == [0]
    late, good = rows_of(sweep)
    assert (late["outcome"], late["repeat_of"]) == ("ok", good["attempt_id"])
    assert good["repeat_of"] is None
    assert "it may have run twice" in late["evidence"]
    assert last_attempts(load(sweep.path).attempts)["attempt_id"].tolist() == [good["attempt_id"]]
    assert sweep_status(sweep).done == {"ok": 1}
