"""A sweep of stand-in points on a `Lab`, run by the ordinary command, and the assertions that must hold after every
fault."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.state import pilot_state
from launchers.state.pilot_state import PilotState
from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables.store import read_attempts, read_ledger
from tests.slurm.lab import Job, Lab
from tests.slurm.lab.lab import CHECKOUT, wait_until

DEVICES_PER_NODE = 2
"""Ranks of a stand-in point on each of its nodes."""
STEP_LIMIT_S = 4
LEASE_S = 10
CLUSTER = f"""
defaults: [/device@device: h100_80gb, _self_]
name: lab
backend: cuda
devices_per_node: {DEVICES_PER_NODE}
intra_node: {{bandwidth: 360.0e9, latency_s: 4.0e-6, source: a test}}
inter_node: {{bandwidth: 50.0e9, latency_s: 5.0e-6, source: a test}}
matmul_efficiency: null
"""
MODEL = """
name: {name}
num_layers: 4
hidden_size: 128
num_heads: 4
num_kv_heads: 2
head_dim: 32
ffn_hidden_size: 384
vocab_size: 1024
tie_embeddings: false
"""
GRID = """
cluster: lab
zip:
  points: {{model: {models}, nodes: {nodes}, seed: {seeds}}}
axes: {{tp: 1, pp: 1, micro_batch_size: 1, seq_len: 128}}
derive: {{dp: nodes * {devices}, global_batch_size: nodes * {devices}}}
"""


def _given_once(words: Sequence[str]) -> list[str]:
    """The words without overrides that a later word replaces."""
    last = {option: place for place, word in enumerate(words) if (option := _option(word)) is not None}
    return [word for place, word in enumerate(words) if last.get(_option(word) or "", place) == place]


def _option(word: str) -> str | None:
    """The name of the option that an override sets; None for another word."""
    match = re.fullmatch(r"\+*([a-z][\w.]*)=.*", word, re.DOTALL)
    return match[1] if match else None


@dataclass(slots=True)
class StandinSweep:
    """A sweep whose points are ``(behaviour, nodes)``; the behaviours are those of `standin`."""

    lab: Lab
    root: Path
    name: str
    points: Sequence[tuple[str, int]]
    partition: str
    words: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    as_other_user: bool = False
    submitters: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.points]
        lists = {"models": names, "nodes": [nodes for _, nodes in self.points], "seeds": [*range(len(names))]}
        files = {"cluster/lab.yaml": CLUSTER, "grid/points.yaml": GRID.format(**lists, devices=DEVICES_PER_NODE)}
        files |= {f"model/{name}.yaml": MODEL.format(name=name) for name in names}
        for where, text in files.items():
            path = self.root / "conf" / where
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    @property
    def path(self) -> Path:
        return self.root / "results" / self.name

    @property
    def dir(self) -> SweepDir:
        return SweepDir(self.path)

    def command(self, *more: str) -> list[str]:
        """The ordinary ``run`` of this sweep, with limits that a test can wait for."""
        limits = {"step": STEP_LIMIT_S, "warmup": 20, "teardown": 5}
        command = [
            *(sys.executable, "-m", "tests.slurm.submit", "run", "--plain", "--conf", str(self.root / "conf")),
            *("+grid=points", f"results_dir={self.root / 'results'}", f"name={self.name}", "measure=quick"),
            *("launcher=slurm", f"launcher.partition={self.partition}", f"launcher.lease_s={LEASE_S}"),
            *("launcher.time_min=5", "launcher.signal_delay_s=60"),
            *(f"+launcher.phase_limits_s.{phase}={limit_s}" for phase, limit_s in limits.items()),
            "launcher.point_deadline_s=90",
        ]
        command = _given_once([*command, *self.words, *more])
        return self.lab.as_other_user(command, login=self._login()) if self.as_other_user else command

    def start(self, *more: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command and return; its output goes to a file (see `output`)."""
        log = self.root / f"submitter-{len(self.submitters)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(*more),
                cwd=CHECKOUT,
                env={**(environment or self.environment or self.lab.environment), "PYTHONPATH": str(CHECKOUT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.submitters.append(process)
        return process

    def tell(self, verb: str, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run another command (``cancel`` ...) for this sweep, or for the folder ``path``, and wait for its end."""
        return subprocess.run(
            [sys.executable, "-m", "tests.slurm.submit", verb, str(path or self.path)],
            cwd=CHECKOUT,
            env={**(self.environment or self.lab.environment), "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def output(self, number: int = -1) -> str:
        """Output of a submitter."""
        which = number % len(self.submitters)
        return (self.root / f"submitter-{which}.log").read_text(errors="replace")

    def finish(self, limit_s: float = 240.0) -> None:
        """Wait until the last submitter reports that the sweep is done. If it gives up, start the command once more, as
        a user would."""
        for again in (True, False):
            try:
                status = self.submitters[-1].wait(limit_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not finished within {limit_s:.0f} s: {self.diagnosis()}") from None
            if status == 0 and not self.left():
                return
            assert again, f"the submitter ended with {status}: {self.diagnosis()}"
            self.start()

    def diagnosis(self) -> str:
        """Information to find out why a scenario failed."""
        logs = sorted(self.dir.pilots.glob("*.log")) + sorted(self.dir.pilots.glob("*.out"))
        tails = "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs[-4:])
        jobs = self.lab.jobs(partition=self.partition, every=True)
        return f"\n{shlex.join(self.command())}\n{self.output()[-3000:]}\njobs: {jobs}{tails}"

    # State of the sweep while it runs

    def states(self) -> list[PilotState]:
        return pilot_state.all_states(self.dir)

    def running(self, behaviour: str | None) -> PilotState | None:
        """The pilot that runs a point of this behaviour (None: any) in its steps, if one does."""
        name = behaviour.replace("_", "") if behaviour is not None else None
        for state in self.states():
            for one in state.running:
                fits = name is None or one.experiment_id.partition("-")[0] == name
                if fits and one.phase in ("warmup", "step") and state.activity != "ended":
                    return state
        return None

    def wait_running(self, behaviour: str | None = None, limit_s: float = 60.0) -> PilotState:
        """Wait for `running`."""
        found: list[PilotState] = []

        def look() -> bool:
            state = self.running(behaviour)
            found.extend([state] if state is not None else [])
            assert found or not self.submitters[-1].poll(), "the submitter gave up"
            return bool(found)

        try:
            wait_until(look, limit_s, f"a pilot that runs {behaviour or 'a point'}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.diagnosis()}") from None
        return found[0]

    def left(self) -> int:
        """Number of points without their last row."""
        return len(entry_names(self.dir.todo)) + len(entry_names(self.dir.claimed))

    def done(self) -> int:
        """Points that have their last row."""
        return len(list(self.dir.done.glob("*.json")))

    def jobs(self, *, every: bool = False) -> list[Job]:
        return self.lab.jobs(partition=self.partition, every=every)

    # Assertions at the end

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_attempts(self.path).to_pylist()
        return sorted(rows, key=lambda row: (row["experiment_id"], row["attempt_number"], row["started_at"]))

    def check(self, *, end_jobs: bool = True) -> dict[str, list[dict[str, Any]]]:
        """Assert the state that every scenario must leave behind. Returns the rows by behaviour of the point.

        Every point has exactly one last row, and every row before it is marked as followed by another. Where a point
        ran twice, all but one of its last rows are marked. No process and no job is left.
        """
        assert self.left() == 0
        done = entry_names(self.dir.done)
        assert len(done) == len(self.points), done
        rows = self.rows()
        by_point: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_point.setdefault(row["experiment_id"], []).append(row)
        assert len(by_point) == len(self.points), sorted(by_point)
        for point, attempts in by_point.items():
            final = [row for row in attempts if not row["will_retry"]]
            unmarked = [row for row in final if not marked(row)]
            assert final and (len(final) == 1 or len(unmarked) == 1), f"{point}: {brief(attempts)}"
            assert len({row["attempt_id"] for row in attempts}) == len(attempts)
        ledger = read_ledger(self.path).to_pylist()
        assert {row["experiment_id"] for row in ledger} == set(by_point)
        if end_jobs:
            wait_until(lambda: not self.jobs(), 60, f"the end of the jobs {self.jobs()}")
            wait_until(lambda: not self.lab.processes(str(self.path)), 30, "the end of every process of the sweep")
        by_behaviour: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_behaviour.setdefault(row["model"], []).append(row)
        return by_behaviour

    def summary(self) -> str:
        """Rows by outcome; those followed by another attempt are counted separately."""
        rows = self.rows()
        last = Counter(row["outcome"] for row in rows if not row["will_retry"])
        before = Counter(row["outcome"] for row in rows if row["will_retry"])
        parts = [f"{count} {outcome}" for outcome, count in sorted(last.items())]
        parts += [f"{count} of them marked as run twice"] if (count := sum(map(marked, rows))) else []
        parts += [f"{count} {outcome}, tried again" for outcome, count in sorted(before.items())]
        return "; ".join(parts)

    def _login(self) -> str:
        return self.lab.nodes[-1]


def marked(row: Mapping[str, Any]) -> bool:
    """Whether a row is marked as of a point that may have run twice."""
    return "may have run twice" in (row["evidence"] or "")


def brief(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("attempt_id", "attempt_number", "outcome", "phase", "will_retry", "evidence")
    return json.dumps([{name: row[name] for name in names} for row in rows], default=str, indent=1)
