"""The user's commands on a real Slurm with real GPUs, and what they survive: ``python -m tests.slurm.two_nodes``.

One machine with two or more GPUs becomes a cluster of two nodes (`tests.slurm.lab`), each with half of the GPUs. The
nodes have host names of their own, so that NCCL takes them for two hosts and sends between them over sockets. Needs
root, and Slurm's programs (``tests/slurm/lab/packages``, or ``unpack`` where nothing can be installed).

    python -m tests.slurm.two_nodes up                 # start the cluster
    python -m tests.slurm.two_nodes probe              # python -m sweep probe --nodes 2 through Slurm
    python -m tests.slurm.two_nodes plan               # predictions of the grid with that probe, before it runs
    python -m tests.slurm.two_nodes run [--minutes 9]  # the grid, while faults are injected; again: goes on
    python -m tests.slurm.two_nodes check              # every point has one final row; prints what the rows say
    python -m tests.slurm.two_nodes down

Everything is written below ``--folder``; ``faults.jsonl`` says what was broken, and when.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launchers.state import pilot_state
from launchers.state.pilot_state import PilotState, Running
from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables.store import read_attempts
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT
from tests.slurm.sweeps import brief, marked

CONF = CHECKOUT / "tests" / "slurm" / "lab" / "conf"
GRIDS = "+grid=[two_nodes,two_nodes_experts]"
NAME = "slurm_two_nodes"
LEASE_S = 25
"""Shorter than the default, so that a killed pilot costs less of a rented machine's time."""


class TwoNodes:
    """The cluster, the sweep on it, and the faults."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lab = Lab(
            nodes=2, gpus=gpus, accounting="none", port_base=19000, real_gpus=True, state=Path("/tmp/two-nodes")
        )
        self.sweep = SweepDir(folder / NAME)
        self.cluster = f"lab_{'h200' if 'H200' in _gpu_name() else 'h100'}"
        self.faults = folder / "faults.jsonl"

    def words(self, verb: str, *more: str) -> list[str]:
        """The user's command."""
        words = [sys.executable, "-m", "sweep", verb, "--conf", str(CONF), f"cluster={self.cluster}"]
        return [*words, f"results_dir={self.folder}", "launcher=slurm", *more]

    def call(self, verb: str, *more: str, limit_s: float) -> None:
        """Run a command to its end; its output is shown."""
        words = [*self.words(verb), *more]
        print("$", " ".join(words[1:]), flush=True)
        subprocess.run(
            words, cwd=CHECKOUT, env=self.lab.environment, stdin=subprocess.DEVNULL, timeout=limit_s, check=False
        )

    def start(self) -> subprocess.Popen[bytes]:
        """Start ``run`` as a user does; its output goes to a file of its own."""
        limits = [f"launcher.lease_s={LEASE_S}", "launcher.time_min=60", "launcher.max_pilots=2"]
        limits += ["launcher.signal_delay_s=60", "measure=quick", f"name={NAME}", "--plain"]
        number = len(list(self.folder.glob("run-*.log")))
        with (self.folder / f"run-{number}.log").open("wb") as output:
            return subprocess.Popen(
                self.words("run", GRIDS, *limits),
                cwd=CHECKOUT,
                env=self.lab.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def done(self) -> int:
        """Number of points with their final row."""
        return len(entry_names(self.sweep.done)) if self.sweep.done.is_dir() else 0

    def left(self) -> int:
        return len(entry_names(self.sweep.todo)) + len(entry_names(self.sweep.claimed))

    def running(self, nodes: int) -> tuple[PilotState, Running] | None:
        """A point of so many nodes that is in its steps now, and its pilot."""
        jobs = {job.id for job in self.lab.jobs() if job.state == "RUNNING"}
        for state in pilot_state.all_states(self.sweep):
            for one in state.running if {state.job, (state.job or "") + "_0"} & jobs else ():
                if state.activity == "running" and len(one.nodes) == nodes and one.phase in ("warmup", "step"):
                    return state, one
        return None

    def note(self, what: str, **more: Any) -> None:
        """Write one line about a fault."""
        line = {"at": time.time(), "done": self.done(), "fault": what, **more}
        print(json.dumps(line), flush=True)
        with self.faults.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def noted(self, what: str) -> bool:
        return self.faults.exists() and f'"fault": "{what}"' in self.faults.read_text()

    # Faults: each returns whether it could be injected now

    def kill_rank(self) -> bool:
        """SIGKILL to one rank on the second node of a point of both nodes."""
        if (found := self.running(2)) is None:
            return False
        _, point = found
        agents = self.lab.processes("pilot_job", node=point.nodes[1]) + self.lab.processes("agent", node=point.nodes[1])
        ranks = [pid for pid in set(agents) if _leads_session(pid) and _parent(pid) in agents]
        if not ranks:
            return False
        os.kill(max(ranks), signal.SIGKILL)
        self.note("rank killed", point=point.experiment_id, node=point.nodes[1], phase=point.phase)
        return True

    def kill_pilot(self) -> bool:
        """SIGKILL to the pilot while a point of both nodes trains."""
        if (found := self.running(2)) is None:
            return False
        state, point = found
        self.lab.kill_in_node(state.nodes[0], state.identity.pid)
        self.note("pilot killed", point=point.experiment_id, job=state.job)
        return True

    def drain(self) -> bool:
        """Drain the second node while a pilot works on both."""
        if self.running(2) is None:
            return False
        self.lab.drain(self.lab.nodes[1])
        self.note("node drained", node=self.lab.nodes[1])
        return True

    def cut_time(self) -> bool:
        """Cut the time limit of the pilot of both nodes to what it has used: it is warned, and ended by Slurm."""
        if (found := self.running(2)) is None:
            return False
        state, point = found
        self.lab.run("scontrol", "update", f"jobid={state.job}", "TimeLimit=1", check=False)
        self.note("time limit cut to a minute", point=point.experiment_id, job=state.job)
        return True

    def raise_time(self) -> bool:
        """Give the requeued job its hour back before it starts again."""
        waiting = [job.id for job in self.lab.jobs() if job.state == "PENDING"]
        for job in waiting:
            self.lab.run("scontrol", "update", f"jobid={job}", "TimeLimit=60", check=False)
        if waiting:
            self.note("time limit raised", jobs=waiting)
        return bool(waiting)

    def resume(self) -> bool:
        """Give the drained node back once a pilot of one node has worked on the other."""
        if not any(len(state.nodes) == 1 for state in pilot_state.all_states(self.sweep)):
            return False
        self.lab.resume(self.lab.nodes[1])
        for job in self.lab.jobs():
            self.lab.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=60", check=False)  # requeued with a minute
        self.note("node resumed", node=self.lab.nodes[1])
        return True

    def cancel(self) -> bool:
        """The user's ``cancel`` in the middle."""
        if self.running(2) is None and self.running(1) is None:
            return False
        self.note("cancel")
        words = [sys.executable, "-m", "sweep", "cancel", str(self.sweep.path)]
        subprocess.run(words, cwd=CHECKOUT, env=self.lab.environment, timeout=120, check=False)
        return True

    def run(self, limit_s: float) -> None:
        """The sweep with its faults, in order; returns when all points are done or the time is over."""
        end = time.monotonic() + limit_s
        plan: Sequence[tuple[str, int, Callable[[], bool]]] = (
            ("rank killed", 2, self.kill_rank),
            ("pilot killed", 5, self.kill_pilot),
            ("node drained", 9, self.drain),
            ("node resumed", 12, self.resume),
            ("time limit cut to a minute", 16, self.cut_time),
            ("time limit raised", 16, self.raise_time),
            ("cancel", 22, self.cancel),
        )
        waiting = [step for step in plan if not self.noted(step[0])]
        process = self.start()
        resumed_by = None
        while time.monotonic() < end:
            if process.poll() is not None:
                if self.left() == 0:
                    return
                process = self.start()  # the same command again
            if waiting:
                name, after, inject = waiting[0]
                late = name == "node resumed" and resumed_by is not None and time.monotonic() > resumed_by
                if self.done() >= after or late:
                    if inject():
                        waiting.pop(0)
                        resumed_by = time.monotonic() + 75
                    elif late:
                        self.lab.resume(self.lab.nodes[1])
                        self.note("node resumed", node=self.lab.nodes[1], late=True)
                        waiting.pop(0)
            time.sleep(0.25)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)

    def check(self) -> None:
        """Print what the rows say. Raises `AssertionError` unless every point has exactly one final row."""
        rows = sorted(read_attempts(self.sweep.path).to_pylist(), key=lambda row: row["started_at"])
        by_point: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_point.setdefault(row["experiment_id"], []).append(row)
        print(f"{len(by_point)} points with rows, {len(rows)} rows, {self.left()} points left")
        print("final:", dict(Counter(row["outcome"] for row in rows if not row["will_retry"])))
        print("followed by another attempt:", dict(Counter(row["outcome"] for row in rows if row["will_retry"])))
        for row in rows:
            gap = f"{row['gap_s']:5.1f}" if row["gap_s"] is not None else "    -"
            step, low = row["step_time_s"], row["predicted_step_time_s"]
            times = f"{step:8.3f} predicted {low:8.3f} ({low / step - 1:+6.1%})" if step and low else ""
            nodes = ",".join(row["nodes"] or [])
            print(
                f"{row['experiment_id']:64} {row['outcome']:12} {nodes:16} gap {gap} {times} {row['nccl_transports']}"
            )
        for point, attempts in by_point.items():
            final = [row for row in attempts if not row["will_retry"]]
            unmarked = [row for row in final if not marked(row)]
            assert final and (len(final) == 1 or len(unmarked) == 1), f"{point}: {brief(attempts)}"
        assert self.left() == 0, f"{self.left()} points left"
        print(f"every one of {self.done()} points has exactly one final row")


def _gpu_name() -> str:
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _leads_session(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return int(_stat(pid)[3]) == pid
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(_stat(pid)[1])
    return 0


def main() -> None:
    """Read the command line and do one step."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.two_nodes", description=__doc__)
    parser.add_argument("step", choices=("up", "probe", "plan", "run", "check", "down"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/two-nodes-results"))
    parser.add_argument("--minutes", type=float, default=60.0, help="longest time of run")
    options = parser.parse_args()
    gpus = len(re.findall(r"^GPU \d", _gpu_name(), re.MULTILINE)) // 2
    if gpus < 1:
        parser.error(f"{2 * gpus} GPUs here; two nodes need at least two")
    cluster = TwoNodes(options.folder, gpus)
    if options.step == "probe":
        cluster.call("probe", "model=llama_lab", "--nodes", "2", "--plain", limit_s=420)
    elif options.step == "plan":
        predicted = str(options.folder / "predicted.parquet")
        cluster.call("plan", GRIDS, "measure=quick", f"name={NAME}", "--top", "30", "--out", predicted, limit_s=120)
    elif options.step == "run":
        cluster.run(60 * options.minutes)
    elif options.step == "check":
        cluster.check()
    elif options.step == "down":
        cluster.lab.down(keep=True)


if __name__ == "__main__":
    main()
