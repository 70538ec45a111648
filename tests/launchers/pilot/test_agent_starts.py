"""Pilots with nodes whose agents never start. srun's messages about them are in the pilot's log."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.node.connection import NodeLost
from launchers.pilot import command
from launchers.pilot.allocation import Allocation
from launchers.pilot.batch_system import EndedTask, is_environment_fault
from launchers.slurm.srun_log import MARK, log_path
from launchers.state import node_exclusions, pilot_state
from launchers.state.node_exclusions import EXPIRES_AFTER_S, LOST_FOR_S
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.submissions import new_submission
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import sweep_status
from tests.launchers.scripted import points, settings
from workloads.contract.protocol import write_json

pytestmark = pytest.mark.drawn(one_in=2)

PILOT = (
    "import sys\nfrom launchers.pilot import node_pool\nfrom launchers.slurm import pilot_job\n"
    "from tests.launchers.scripted import run_rank\nnode_pool.AGENTS_LIMIT_S = float(sys.argv.pop())\n"
    "sys.exit(pilot_job.main(run_rank=run_rank))"
)
SCONTROL = "#!/bin/sh\nfor number in 0 1 2 3; do echo node$number; done\n"
Start = Callable[..., list[int]]


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "sweep", {})


@pytest.fixture
def start(sweep: SweepDir, tmp_path: Path) -> Iterator[Start]:
    """Start the tasks of one job of four nodes; the other tasks have ended according to srun. Returns exit statuses.

    Unless ``limit_s`` is given, a pilot would wait longer for an agent than this fixture waits for the pilot's end.
    """
    processes: list[subprocess.Popen[bytes]] = []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)

    def run(*tasks: int, said: str, use_excluded: bool = False, token: str = "", limit_s: float = 1000.0) -> list[int]:
        token = token or new_submission(sweep, nodes=4, count=1, time_min=5).token
        config = PilotConfig(
            settings=settings(),
            command=None,
            wall_time_s=None,
            stop_with_parent=False,
            nodes=4,
            batch_system="slurm",
            provenance={},
            use_excluded=use_excluded,
        )
        write_json(pilot_state.config_path(sweep, token), pilot_config_to_dict(config))
        log = log_path(sweep, token, "7")
        log.parent.mkdir(parents=True)
        log.write_text(f"{MARK} {token}.0.0\n{said}")
        for task in tasks:
            variables = {
                "SLURM_PROCID": str(task),
                "SLURMD_NODENAME": f"node{task}",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "node[0-3]",
                "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            }
            environment = pilot_environment() | variables
            command = [sys.executable, "-c", PILOT, str(sweep.path), token, str(limit_s)]
            processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        return [process.wait(150) for process in processes[-len(tasks) :]]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def words(*tasks: int) -> str:
    return "".join(f"srun: error: node{task}: task {task}: Exited with exit code 127\n" for task in tasks)


@pytest.mark.slow
def test_a_node_whose_agent_never_starts_is_excluded_at_once(sweep: SweepDir, start: Start) -> None:
    sweep.add_points(points("ok", "ok"))
    statuses = start(0, 1, 3, said=words(2))
    assert statuses == [0, 0, 0]
    assert sweep_status(sweep).done == {"ok": 2}
    (found,) = node_exclusions.excluded(sweep).values()
    assert found.node == "node2" and "Exited with exit code 127" in found.reason
    assert found.until - found.since == EXPIRES_AFTER_S


@pytest.mark.slow
def test_a_node_whose_agent_hangs_at_its_start_is_waited_for_once(sweep: SweepDir, start: Start) -> None:
    """A hanging mount: the process neither ends, so srun prints no message, nor connects."""
    sweep.add_points(points("ok", "ok"))
    statuses = start(0, 1, 3, said="", limit_s=8.0)
    assert statuses == [0, 0, 0]
    assert sweep_status(sweep).done == {"ok": 2}
    (found,) = node_exclusions.excluded(sweep).values()
    assert (found.node, found.reason) == ("node2", "its agent did not start within 8 s")
    assert found.until - found.since == LOST_FOR_S


@pytest.mark.slow
def test_a_pilot_that_is_too_narrow_makes_room_for_another(sweep: SweepDir, start: Start) -> None:
    """While the pilot lives, no pilot would be submitted for the points that need all four nodes."""
    sweep.add_points(points("ok", dp=8, global_batch_size=8))
    statuses = start(0, 1, 3, said=words(2))
    assert statuses[0] == 4
    assert sweep_status(sweep).todo == 1 and set(node_exclusions.excluded(sweep)) == {"node2"}
    (state,) = pilot_state.all_states(sweep)
    assert state.message.startswith("only 3 of 4 nodes can be used, and wider points wait: its process ended while")


@pytest.mark.slow
def test_when_all_others_fail_no_node_is_excluded(
    sweep: SweepDir, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep.add_points(points("ok", dp=8, global_batch_size=8))
    statuses = start(0, said=words(1, 2, 3))
    assert statuses == [4]
    assert not node_exclusions.excluded(sweep)
    assert "the agents of 3 of 4 nodes did not start, so no node is excluded" in capfd.readouterr().out


@pytest.mark.slow
def test_agents_whose_pilot_never_starts_end_and_exclude_its_node(sweep: SweepDir, start: Start) -> None:
    statuses = start(1, 2, 3, said=words(0))
    assert statuses == [2, 2, 2]
    assert set(node_exclusions.excluded(sweep)) == {"node0"}


@pytest.mark.slow
def test_a_pilot_can_be_set_to_use_excluded_nodes(sweep: SweepDir, start: Start) -> None:
    sweep.add_points(points("ok", dp=8, global_batch_size=8))
    node_exclusions.exclude(sweep, "node1", "it failed before", "p")
    statuses = start(0, 1, 2, 3, said="", use_excluded=True)
    assert statuses[0] == 0 and sweep_status(sweep).done == {"ok": 1}


def test_when_the_environment_is_to_blame() -> None:
    assert not is_environment_fault(1, 2) and not is_environment_fault(2, 4) and not is_environment_fault(5, 64)
    assert is_environment_fault(2, 3) and is_environment_fault(3, 4) and is_environment_fault(33, 64)


class PilotHasEnded:
    """A batch system that reports, for a job of four nodes, that the pilot's own process has ended on the first."""

    def nodes(self) -> list[str]:
        return [f"node{number}" for number in range(4)]

    def ended_tasks(self, sweep: SweepDir, place: Allocation) -> list[EndedTask]:
        return [EndedTask("node0", 0, "Exited with exit code 1")]

    def requeue(self, job: str) -> bool:
        return False


@pytest.mark.parametrize(("state", "blamed"), [("none", True), ("written", False), ("unreadable", False)])
def test_a_late_agent_does_not_blame_a_node_on_which_its_pilot_had_started(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, state: str, blamed: bool
) -> None:
    monkeypatch.setattr(command, "_HEAD_LOOK_S", 0.01)
    place = Allocation(pilot_id="slurm-x.0.0", job="7", node="node1", is_head=False)
    path = pilot_state.state_path(sweep, place.pilot_id)
    if state == "written":
        path.write_text("{}")
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self == path and state == "unreadable":
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(NodeLost, match="node node1: the pilot on node0 could not start: Exited with exit code 1"):
        command._wait_for_head(sweep, place, sweep.pilots / "slurm-x.0.0.head.json", PilotHasEnded())
    assert set(node_exclusions.excluded(sweep)) == ({"node0"} if blamed else set())
