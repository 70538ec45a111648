"""The user's commands on a real Slurm with real GPUs, and what they survive: ``python -m tests.slurm.two_nodes``.

One machine with two or more GPUs becomes a cluster of two nodes (`tests.slurm.lab`), each with half of the GPUs. The
nodes have host names of their own, so that NCCL takes them for two hosts and sends between them over sockets. Needs
root, and Slurm's programs (``tests/slurm/lab/packages``, or ``unpack`` where nothing can be installed).

    python -m tests.slurm.two_nodes up                 # start the cluster
    python -m tests.slurm.two_nodes probe              # python -m sweep probe --nodes 2 through Slurm
    python -m tests.slurm.two_nodes plan               # predictions of the grid with that probe, before it runs
    python -m tests.slurm.two_nodes run [--minutes 9]  # the grids, while faults are injected; again: goes on
    python -m tests.slurm.two_nodes run --undisturbed  # only the points over two nodes, without faults: to grade times
    python -m tests.slurm.two_nodes check              # every point has one final row; prints what the rows say
    python -m tests.slurm.two_nodes down

``run`` gives the command twice: first with the grid ``two_nodes_packed``, whose points of one node run side by side in
a pilot of both nodes, undisturbed; then under the same name with all grids, and with faults.

Everything is written below ``--folder``; ``faults.jsonl`` says what was broken, and when. With ``--standin`` (on every
step) the nodes are virtual and points sleep instead of training (`tests.slurm.standin`): it tries this program.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
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
from tests.slurm.standin import ONE_PROCESS, SECONDS
from tests.slurm.sweeps import brief, marked

CONF = CHECKOUT / "tests" / "slurm" / "lab" / "conf"
GRIDS = {
    1: ("two_nodes_of_one_packed", "two_nodes_of_one", "two_nodes_of_one_experts"),
    2: ("two_nodes_packed", "two_nodes", "two_nodes_experts"),
}
"""Grids by the devices of a node; the first is run first, undisturbed."""
NAME = "slurm_two_nodes"
LEASE_S = 25
"""Shorter than the default, so that a killed pilot costs less of a rented machine's time."""


class TwoNodes:
    """The cluster, the sweep on it, and the faults."""

    def __init__(self, folder: Path, gpus: int, *, standin: bool = False, undisturbed: bool = False) -> None:
        self.folder = folder
        self.undisturbed = undisturbed
        self.standin = standin
        folder.mkdir(parents=True, exist_ok=True)
        state = Path("/tmp/two-nodes-standin" if standin else "/tmp/two-nodes")
        self.lab = Lab(
            nodes=2,
            gpus=gpus,
            accounting="none",
            port_base=19100 if standin else 19000,
            real_gpus=not standin,
            state=state,
        )
        self.sweep = SweepDir(folder / NAME)
        self.gpus = gpus
        first, *_ = grids = GRIDS[min(gpus, max(GRIDS))]
        self.first, self.grids = f"+grid={first}", f"+grid=[{','.join(grids)}]"
        self.cluster = f"lab_{'h200' if 'H200' in _gpu_name() else 'h100'}"
        self.faults = folder / "faults.jsonl"

    def words(self, verb: str, *more: str) -> list[str]:
        """The user's command."""
        program = "tests.slurm.submit" if self.standin else "sweep"
        words = [sys.executable, "-m", program, verb, "--conf", str(CONF), f"cluster={self.cluster}"]
        words.append(f"cluster.devices_per_node={self.gpus}")
        return [*words, f"results_dir={self.folder}", "launcher=slurm", *more]

    def call(self, verb: str, *more: str, limit_s: float) -> None:
        """Run a command to its end; its output is shown."""
        words = [*self.words(verb), *more]
        print("$", " ".join(words[1:]), flush=True)
        subprocess.run(
            words, cwd=CHECKOUT, env=self.lab.environment, stdin=subprocess.DEVNULL, timeout=limit_s, check=False
        )

    def start(self, grids: str) -> subprocess.Popen[bytes]:
        """Start ``run`` as a user does; its output goes to a file of its own."""
        # Two pilots of one node as soon as points of one node wait: many pilots are wanted, on at most two nodes.
        limits = ["launcher.target_h=0.02", "launcher.max_nodes=2"]
        limits += [f"launcher.lease_s={LEASE_S}", "launcher.time_min=60"]
        limits += ["launcher.signal_delay_s=60", "measure=quick", f"name={NAME}", "--plain"]
        if self.undisturbed:
            limits += ["+grid.where.over_both_nodes='nodes > 1'"]
        if self.standin:
            limits += [f"launcher.setup=['export {SECONDS}=4 {ONE_PROCESS}=1']"]
        number = len(list(self.folder.glob("run-*.log")))
        with (self.folder / f"run-{number}.log").open("wb") as output:
            return subprocess.Popen(
                self.words("run", grids, *limits),
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

    def notes(self) -> list[dict[str, Any]]:
        """All faults so far, from the first one on."""
        lines = self.faults.read_text().splitlines() if self.faults.exists() else []
        return [json.loads(line) for line in lines]

    def noted(self, what: str) -> bool:
        return any(line["fault"] == what for line in self.notes())

    # Faults: each returns whether it could be injected now

    def kill_rank(self) -> bool:
        """SIGKILL to one rank on the second node of a point of both nodes."""
        if (found := self.running(2)) is None:
            return False
        _, point = found
        programs = ("standin",) if self.standin else ("pilot_job", "agent")
        agents = [pid for program in programs for pid in self.lab.processes(program, node=point.nodes[1])]
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
        """Give the drained node back once a pilot of one node works on the other."""
        if self.running(1) is None:
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
        if self.undisturbed:
            self._run_grids(self.grids, [], end)
            return
        if not self.noted("first grid ended, without faults"):
            if not self._run_grids(self.first, [], end):
                return
            self.note("first grid ended, without faults")
        first = next(line["done"] for line in self.notes() if line["fault"].startswith("first grid ended"))
        plan: Sequence[tuple[str, int, Callable[[], bool]]] = (
            ("rank killed", first + 2, self.kill_rank),
            ("node drained", first + 5, self.drain),
            ("pilot killed", first + 5, self.kill_pilot),  # its job starts again when it has both nodes
            ("node resumed", first + 8, self.resume),
            ("time limit cut to a minute", first + 13, self.cut_time),
            ("time limit raised", first + 13, self.raise_time),
            ("cancel", first + 17, self.cancel),
        )
        self._run_grids(self.grids, [step for step in plan if not self.noted(step[0])], end)

    def _run_grids(self, grids: str, waiting: list[tuple[str, int, Callable[[], bool]]], end: float) -> bool:
        """Give the command for these grids, again whenever it ends, and inject the faults that wait. Returns whether
        all points are done before ``end``."""
        process = self.start(grids)
        resumed_by = None
        while time.monotonic() < end:
            if process.poll() is not None:
                if process.returncode in (0, 1) and self.left() == 0:
                    return True
                process = self.start(grids)  # the same command again
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
        return False

    def check(self) -> None:
        """Print what the rows say. Raises `AssertionError` unless every point has exactly one final row and points of
        one node ran side by side."""
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
        if not self.undisturbed:
            self.check_packing(rows)

    def check_packing(self, rows: Sequence[dict[str, Any]]) -> None:
        """Print which points of one node ran at the same time. Raises `AssertionError` unless two pairs of them did,
        on different nodes, before a node was drained."""
        drained = min((fault["at"] for fault in self.notes() if fault["fault"] == "node drained"), default=float("inf"))
        pairs = side_by_side(rows)
        begin = min(row["started_at"] for row in rows)
        print("points of one node that ran side by side (seconds since the first point started):")
        for one, other in pairs:
            since = [(row[at] - begin).total_seconds() for row in (one, other) for at in ("started_at", "ended_at")]
            pilots = "in one pilot" if one["pilot_id"] == other["pilot_id"] else "in two pilots"
            print(
                f"  {one['experiment_id']} on {one['nodes'][0]} {since[0]:.1f} to {since[1]:.1f}, "
                f"{other['experiment_id']} on {other['nodes'][0]} {since[2]:.1f} to {since[3]:.1f}: {pilots}"
            )
        before = [pair for pair in pairs if max(row["started_at"].timestamp() for row in pair) < drained]
        packed = sum(one["pilot_id"] == other["pilot_id"] for one, other in before)
        print(f"{len(pairs)} pairs, {len(before)} of them before a node was drained ({packed} in one pilot)")
        assert len(before) >= 2, "points of one node did not run side by side before a node was drained"


def side_by_side(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of attempts that ended well, each on one node, the two on different nodes, that ran at the same time for at
    least half of the shorter one."""
    ran = [row for row in rows if row["outcome"] == "ok" and len(row["nodes"] or ()) == 1]
    return [
        (one, other)
        for one, other in itertools.combinations(ran, 2)
        if one["nodes"] != other["nodes"]
        and 2 * _shared_s(one, other)
        >= min((row["ended_at"] - row["started_at"]).total_seconds() for row in (one, other))
    ]


def _shared_s(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Seconds in which both attempts ran; negative if one ended before the other began."""
    shared = min(one["ended_at"], other["ended_at"]) - max(one["started_at"], other["started_at"])
    return float(shared.total_seconds())


def _gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
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
    parser.add_argument("--undisturbed", action="store_true", help="points over two nodes alone, without faults")
    parser.add_argument("--standin", action="store_true", help="points that sleep, on virtual nodes")
    options = parser.parse_args()
    gpus = 2 if options.standin else len(re.findall(r"^GPU \d", _gpu_name(), re.MULTILINE)) // 2
    if gpus < 1:
        parser.error(f"{2 * gpus} GPUs here; two nodes need at least two")
    cluster = TwoNodes(options.folder, gpus, standin=options.standin, undisturbed=options.undisturbed)
    if options.step == "probe":
        cluster.call("probe", "model=llama_lab", "--nodes", "2", "--plain", limit_s=420)
    elif options.step == "plan":
        predicted = str(options.folder / "predicted.parquet")
        more = ["measure=quick", f"name={NAME}", "--top", "50", "--out", predicted]
        cluster.call("plan", cluster.grids, *more, limit_s=120)
    elif options.step == "run":
        cluster.run(60 * options.minutes)
    elif options.step == "check":
        cluster.check()
    elif options.step == "down":
        cluster.lab.down(keep=True)


if __name__ == "__main__":
    main()
