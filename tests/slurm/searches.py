"""``search`` over cells of the study's table through a real Slurm of 64 virtual nodes: ``python -m tests.slurm.searches
--table bench_final2_mfu2.csv`` (as root).

Points are stand-ins whose step times are those of the table (see `cells`); everything else is the ordinary command.
Meanwhile pilots are killed, a node crashes, and the command itself is killed and repeated. Prints the command's output
and the cost of the search.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.state import pilot_state
from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables.store import read_attempts, read_ledger
from sweep.planning.summary import layout
from tests.slurm.cells import AXES, Layout, answers_of, fastest, grid_of, read_cells
from tests.slurm.conftest import free_ports
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT
from workloads.spec.experiment import Experiment, from_dict

NODES = 64
CELLS = (("llama3.57b", 64), ("llama8.86b", 64))
"""Cells of eight nodes per point: eight pilots fill the cluster."""
BATCH = 4
KILLS = (4, 9, 14)
"""Numbers of rows at which a pilot is killed."""
CRASH = 7
"""Number of rows at which a node crashes for good."""
GIVEN_AGAIN = 11
"""Number of rows at which the command itself is killed. It is repeated while the pilots that it left still run."""
IN_STEPS_S = 2.0
"""Seconds after which a running point has begun its steps, with a step or more left. Phases cannot show this: only the
first rank of a node has a heartbeat here."""
WORDS = (
    *("launcher=slurm", "launcher.max_nodes=64", "launcher.lease_s=30", "launcher.signal_delay_s=60"),
    *("+launcher.environment.STANDIN_ONE_PROCESS=1", "plan.run_predicted_oom=true", f"search.batch={BATCH}"),
)


@dataclass(slots=True)
class SearchRun:
    """One search, from its first command to its rows."""

    lab: Lab
    folder: Path
    layouts: Sequence[Layout]
    words: tuple[str, ...] = ()
    killed: list[str] = field(default_factory=list)
    """Pilots that were killed, including those of the crashed node."""
    crashed: str | None = None
    """The node that crashed."""
    given: int = 0
    """How often the command was started."""
    seconds: float = 0.0
    """Seconds from the first command to the end of the last."""

    @property
    def dir(self) -> SweepDir:
        return SweepDir(self.folder / "search")

    @property
    def output(self) -> str:
        """Output of the commands."""
        return (self.folder / "command.log").read_text()

    def run(self, limit_s: float) -> None:
        """Run the command, kill it once, and let pilots die meanwhile. Raises `AssertionError` when it fails or takes
        too long."""
        conf, answers = self.folder / "conf" / "grid", self.folder / "answers.json"
        conf.mkdir(parents=True)
        (conf / "cells.yaml").write_text(grid_of(self.layouts))
        answers.write_text(json.dumps(answers_of(self.layouts)))
        command = [sys.executable, "-m", "tests.slurm.submit", "search", "--plain", "--conf", str(conf.parent)]
        command += ["+grid=cells", f"results_dir={self.folder}", "name=search", *WORDS, *self.words]
        command += [f"+launcher.environment.STANDIN_ANSWERS={answers}"]
        started = time.monotonic()
        process = self._give(command)
        try:
            while process.poll() is None:
                assert time.monotonic() - started < limit_s, f"not done after {limit_s:.0f} s: {self.output[-3000:]}"
                self._disturb()
                if self.given == 1 and self._rows() >= GIVEN_AGAIN:
                    process.kill()
                    process.wait()
                    process = self._give(command)
                time.sleep(0.1)
        finally:
            process.kill()
        self.seconds = time.monotonic() - started
        assert process.returncode == 0, self.output[-3000:]

    def _give(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.given += 1
        with (self.folder / "command.log").open("a") as log:
            return subprocess.Popen(
                command, cwd=CHECKOUT, env=self.lab.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def _rows(self) -> int:
        return len(entry_names(self.dir.done)) if self.dir.done.is_dir() else 0

    def _disturb(self) -> None:
        """Kill a pilot or crash its node when that is due and a pilot runs a point."""
        done = self._rows()
        kills = len(self.killed) - (self.crashed is not None)
        crash = self.crashed is None and done >= CRASH
        if not crash and (kills >= len(KILLS) or done < KILLS[kills]):
            return
        for state in pilot_state.all_states(self.dir):
            alive = state.activity != "ended" and state.pilot_id not in self.killed
            if alive and any(time.time() - one.started_at > IN_STEPS_S for one in state.running):
                self.killed.append(state.pilot_id)
                if crash:
                    self.crashed = state.nodes[-1]
                    self.lab.crash_node(self.crashed)
                else:
                    self.lab.kill_in_node(state.nodes[0], state.identity.pid)
                return

    # Results

    def attempts(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_attempts(self.dir.path).to_pylist()
        return rows

    def candidates(self) -> int:
        """Points of the whole plan that can run."""
        return sum(row["verdict"] in ("run", "cached") for row in read_ledger(self.dir.path).to_pylist())

    def named(self, model: str, world_size: int) -> list[str]:
        """The layouts that the command prints as the fastest of a cell, fastest first."""
        lines = self.output.splitlines()
        (at,) = [n for n, line in enumerate(lines) if line.startswith(f"{model} on {world_size}, ")]
        after = lines[at + 1 :]
        count = next((n for n, line in enumerate(after) if not line.startswith("  ")), len(after))
        return [line.strip().rpartition(":")[0] for line in after[:count] if " s a step, " in line]

    def summary(self) -> str:
        """Short summary of the search."""
        rows = self.attempts()
        last = Counter(row["outcome"] for row in rows if not row["will_retry"])
        lost = Counter(row["outcome"] for row in rows if row["will_retry"])
        lines = [
            f"{self.candidates()} layouts on {len(self.lab.nodes)} nodes; {self.seconds:.0f} s",
            f"{sum(last.values())} runs: {dict(last)}; lost: {dict(lost)}",
            f"{len(set(map(layout_of, rows)))} layouts ran; {len(self.killed)} pilots died, one with {self.crashed}; "
            f"the command was given {self.given} times",
        ]
        for model, gpus in dict.fromkeys((one.model, one.world_size) for one in self.layouts):
            best = fastest(self.layouts, model, gpus)
            lines.append(f"{model} on {gpus}: {self.named(model, gpus)[0]}; the table: {best.key}, {best.step_time_s}")
        return "\n".join(lines)


def layout_of(row: dict[str, Any]) -> str:
    """The key of an attempt's layout, whatever its seed (`Layout.key`)."""
    experiment = experiment_of(row)
    values = {axis: getattr(experiment, axis) for axis in AXES if axis != "model"}
    return Layout(model=experiment.model.name, step_time_s=None, **values).key


def experiment_of(row: dict[str, Any]) -> Experiment:
    return from_dict(json.loads(row["config_json"]))


def printed(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Keys of layouts, by model and the printed form of the layout."""
    return {(row["model"], layout(experiment_of(row))): layout_of(row) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.searches", description="search on a virtual Slurm")
    parser.add_argument("--table", type=Path, required=True, help="raw table of the study (CSV)")
    parser.add_argument("words", nargs="*", help="more words for the command line")
    options = parser.parse_intermixed_args()
    with Lab(nodes=NODES, port_base=free_ports(NODES + 2)) as lab:
        folder = Path(tempfile.mkdtemp(prefix="search-", dir=lab.state))
        search = SearchRun(lab, folder, read_cells(options.table, CELLS), words=tuple(options.words))
        search.run(limit_s=900)
        print(search.output)
        print(search.summary())


if __name__ == "__main__":
    main()
