"""The study's layouts through a real Slurm of virtual nodes: ``python -m tests.slurm.study`` (as root).

Points are stand-ins, one process per node for all its ranks; everything else is the ordinary command. Prints the number
of Slurm jobs, how long the submission took, the throughput, the load of slurmctld (sdiag) and how many points have
exactly one last row.

    python -m tests.slurm.study                         # the playbook grid, 64 nodes: every layout that its rules allow
    python -m tests.slurm.study --table bench.csv       # the 4,078 layouts of the study's raw table with its batch
    python -m tests.slurm.study --points 120 --nodes 8  # a cut of the grid, as in the tests
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables.store import read_attempts, read_ledger
from tests.slurm.conftest import free_ports
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT

MODELS = {
    "1.34G": "llama1.34b",
    "3.57G": "llama3.57b",
    "8.86G": "llama8.86b",
    "80G": "llama80b",
    "469G": "llama469b",
}
AXES = ("model", "nodes", "tp", "pp", "dp", "micro_batch_size", "zero_stage", "seed")
GRID = """
cluster: h100_efa
zip:
  rows: {rows}
axes: {{cp: 1, global_batch_size: 256, seq_len: 4096, pp_schedule: 1f1b}}
where: {{as_wide_as_its_nodes: dp * tp * pp == 8 * nodes}}
"""
WORDS = (
    *("launcher=slurm", "+launcher.environment.STANDIN_ONE_PROCESS=1", "plan.run_predicted_oom=true"),
    # Some layouts of the largest model would need days per step: a stand-in's steps take no time.
    *("measure.warmup_steps=1", "measure.timed_steps=2", "launcher.point_deadline_s=600"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one study's run. Times in seconds."""

    points: int
    one_last_row: int
    """Points with exactly one row that no other attempt followed."""
    attempts: int
    outcomes: dict[str, int]
    slurm_jobs: int
    """Submitted Slurm jobs: each task of an array counts."""
    slurm_jobs_started: int
    """Slurm jobs that started. The others were cancelled when no point was left for them."""
    submission_s: float
    """Time from the command (planning included) to the last submission."""
    run_s: float
    """Time from the first attempt's start to the last one's end."""
    points_per_min: float
    command_cpu_s: float
    """Processor time of the command that submitted and watched."""
    slurmctld_cpu_s: float
    slurmctld_max_cycle_ms: float
    requests: int
    """Remote calls that slurmctld answered."""

    def __str__(self) -> str:
        return "\n".join(f"{f.name:<24}{_show(getattr(self, f.name))}" for f in fields(self))


def study_grid(table: Path) -> str:
    """A grid of exactly the rows of the study's raw table with its batch of 256 sequences. A layout that it ran twice
    is two points, of different seeds."""
    seen: Counter[tuple[Any, ...]] = Counter()
    columns: dict[str, list[Any]] = {axis: [] for axis in AXES}
    with table.open(newline="") as lines:
        for row in csv.DictReader(lines):
            number = {name: int(float(row[name])) for name in ("nodes", "dp", "tp", "pp", "mbs", "batch_accum")}
            if number["dp"] * number["mbs"] * number["batch_accum"] != 256:
                continue
            zero = int(float(row["zero_stage"])) if number["dp"] > 1 else 0
            model = MODELS[row["name"].split("_")[0]]
            key = (model, *(number[name] for name in ("nodes", "tp", "pp", "dp", "mbs")), zero)
            seen[key] += 1
            for axis, value in zip(AXES, (*key, seen[key]), strict=True):
                columns[axis].append(value)
    return GRID.format(rows=columns)


def run_study(
    lab: Lab, folder: Path, *, words: tuple[str, ...] = (), table: Path | None = None, limit_s: float = 7200
) -> Measured:
    """Submit the grid by the ordinary command, wait for its end, and measure the run."""
    conf = folder / "conf" / "grid"
    conf.mkdir(parents=True)
    grid = "playbook"
    if table is not None:
        (conf / "study.yaml").write_text(study_grid(table))
        grid = "study"
    lab.run("sdiag", "--reset")
    ctld = int((lab.state / "run" / "slurmctld.pid").read_text())
    busy, before = _cpu_s(ctld), resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.time()
    command = [sys.executable, "-m", "tests.slurm.submit", "run", "--plain", "--conf", str(folder / "conf")]
    command += [f"+grid={grid}", f"results_dir={folder}", "name=study", *WORDS, *words]
    log = folder / "command.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=lab.environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(limit_s)
        finally:
            process.kill()
    assert status == 0, log.read_text()[-3000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _measure(
        lab,
        SweepDir(folder / "study"),
        started=started,
        command_cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        slurmctld_cpu_s=_cpu_s(ctld) - busy,
    )


def _measure(lab: Lab, sweep: SweepDir, *, started: float, command_cpu_s: float, slurmctld_cpu_s: float) -> Measured:
    rows = read_attempts(sweep.path).to_pylist()
    last = Counter(row["experiment_id"] for row in rows if not row["will_retry"])
    planned = {row["experiment_id"] for row in read_ledger(sweep.path).to_pylist() if row["verdict"] == "run"}
    assert not entry_names(sweep.todo) and not entry_names(sweep.claimed)
    assert set(last) == planned, f"{len(planned - set(last))} points have no row"
    submitted = [json.loads(path.read_text()) for path in (sweep.path / "submissions").glob("*.json")]
    accounted = lab.run("sacct", "-X", "-n", "-P", "-S", "now-1day", "-o", "Start,JobName").splitlines()
    started_jobs = [line for line in accounted if line.startswith("20") and line.partition("|")[2].startswith("study.")]
    begun = min(row["started_at"].timestamp() for row in rows)
    seconds = max(row["ended_at"].timestamp() for row in rows) - begun
    diag = lab.sdiag()
    return Measured(
        points=len(planned),
        one_last_row=sum(count == 1 for count in last.values()),
        attempts=len(rows),
        outcomes=dict(Counter(row["outcome"] for row in rows if not row["will_retry"])),
        slurm_jobs=sum(one["count"] for one in submitted),
        slurm_jobs_started=len(started_jobs),
        submission_s=max(one["created_at"] for one in submitted) - started,
        run_s=seconds,
        points_per_min=60 * len(planned) / seconds,
        command_cpu_s=command_cpu_s,
        slurmctld_cpu_s=slurmctld_cpu_s,
        slurmctld_max_cycle_ms=diag.get("Max cycle", 0) / 1000,
        requests=_requests(lab),
    )


def _requests(lab: Lab) -> int:
    """Remote calls since the last reset, from sdiag's table by type."""
    text = lab.run("sdiag").partition("by message type")[2].partition("by user")[0]
    counts = [line.split("count:")[1].split()[0] for line in text.splitlines() if "count:" in line]
    return sum(map(int, counts))


def _cpu_s(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _show(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.study", description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--points", type=int, help="a random part of the playbook grid, of about so many layouts")
    parser.add_argument("--table", type=Path, help="raw table of the study (CSV)")
    parser.add_argument("words", nargs="*", help="more words for the command line")
    options = parser.parse_intermixed_args()
    words = tuple(options.words)
    if options.points is not None:
        words += (f"+grid.subsample.count={options.points}",)
    if options.nodes < 64:
        words += (f"launcher.max_nodes={options.nodes}", f"grid.axes.nodes={_powers(options.nodes)}")
    with Lab(nodes=options.nodes, port_base=free_ports(options.nodes + 2)) as lab:
        folder = Path(tempfile.mkdtemp(prefix="study-", dir=lab.state))
        print(run_study(lab, folder, words=words, table=options.table))


def _powers(limit: int) -> str:
    return str([n for n in (1, 2, 4, 8, 16, 32, 64) if n <= limit]).replace(" ", "")


if __name__ == "__main__":
    main()
