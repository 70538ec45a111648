"""What a sweep of many points costs on a login node and in a pilot: ``python -m tests.launchers.many_points [POINTS]``.

The commands of a user run one after another on a cluster that exists only on PATH (`tests.launchers.slurm.fakeslurm`):
``run --detach`` of new points, the same words again, and ``status``. Last, a pilot looks at the queue for the first
time. Each is a process of its own, whose CPU time without that of Slurm's commands is measured, and the files that it
opens in the sweep's folder. Needs no torch and no GPU; 20,000 points take a minute on an idle machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launchers.slurm.fakeslurm import FakeSlurm

POINTS = 20_000
_GRID = """
description: Points of one to eight nodes that all fit
cluster: h200
axes:
  model: [llama1b, llama3b]
  nodes: [1, 2, 4, 8]
  tp: [1, 2, 4, 8]
  pp: [1, 2, 4]
  zero_stage: [0, 1, 2, 3]
  recompute: [none, selective, full]
  micro_batch_size: [1, 2, 4]
  seq_len: [1024, 2048]
  precision: [bf16, fp16]
  attention: [auto, flash]
  global_batch_size: 256
derive:
  dp: 8 * nodes / (tp * pp)
where:
  zero_needs_shards: zero_stage == 0 or dp > 1
subsample: {{count: {count}, seed: 0}}
"""
_MEASURED = """
import json, os, resource, runpy, sys
folder, out, module, *sys.argv[1:] = sys.argv[1:]
opened = 0
def hook(event, arguments):
    global opened
    if event == "open" and isinstance(arguments[0], (str, bytes)) and os.fsdecode(arguments[0]).startswith(folder):
        opened += 1
sys.addaudithook(hook)
try:
    runpy.run_module(module, run_name="__main__")
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(out, "w") as file:
        json.dump([used.ru_utime + used.ru_stime, opened, used.ru_maxrss / 1024], file)
"""
_LOOK = "tests.launchers.first_look"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    cpu_s: float
    opens: int
    """Files opened in the sweep's folder, each as often as it was opened."""
    peak_mib: float
    output: str

    def line(self, what: str) -> str:
        return f"{what:<42}{self.cpu_s:8.1f} s{self.opens:10,} opens{self.peak_mib:8.0f} MiB"


@dataclass(frozen=True, slots=True)
class ManyPoints:
    """A folder with a grid of many points and a cluster on PATH."""

    folder: Path
    count: int

    def __post_init__(self) -> None:
        grids = self.folder / "conf" / "grid"
        grids.mkdir(parents=True)
        (grids / "many.yaml").write_text(_GRID.format(count=self.count))
        FakeSlurm(self.folder / "bin")

    @property
    def sweep(self) -> Path:
        return self.folder / "results" / "many"

    def run(self, *words: str) -> Cost:
        """``run`` of all points with further ``words``; it returns when the pilots are submitted."""
        conf, results = str(self.folder / "conf"), f"results_dir={self.folder / 'results'}"
        return self.measured("sweep", "run", "+grid=many", "--conf", conf, "launcher=slurm", results, *words)

    def measured(self, module: str, *words: str) -> Cost:
        """The cost of ``python -m MODULE WORDS``."""
        out = self.folder / "cost.json"
        command = [sys.executable, "-c", _MEASURED, str(self.sweep), str(out), module, *words]
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        # Compiled modules are kept beside their sources, as on a user's machine, whatever this process does.
        environment["PYTHONDONTWRITEBYTECODE"] = ""
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        cpu_s, opens, peak_mib = json.loads(out.read_text())
        return Cost(cpu_s=cpu_s, opens=opens, peak_mib=peak_mib, output=done.stdout)

    def inodes(self) -> int:
        """Files and folders of the sweep."""
        return 1 + sum(len(folders) + len(names) for _, folders, names in os.walk(self.sweep))


def jobs(output: str) -> int:
    """Number of pilots that a command has submitted or would submit."""
    found = re.findall(r"^(?:# .*: )?([\d,]+) pilots? of (?:\d+ nodes? submitted|at most)", output, re.MULTILINE)
    return sum(int(count.replace(",", "")) for count in found)


def main(words: Sequence[str]) -> int:
    count = int(words[0].replace(",", "")) if words else POINTS
    with tempfile.TemporaryDirectory(prefix="many_points-") as name:
        many = ManyPoints(Path(name), count)
        print(f"{count:,} points")
        without = jobs(many.run("launcher.dry=true", "launcher.max_nodes=1000000").output)
        first = many.run("--detach")
        print(first.line("run --detach of new points"), flush=True)
        print(many.run("--detach").line("run --detach again"), flush=True)
        print(many.measured("sweep", "status", str(many.sweep)).line("status"), flush=True)
        print(many.measured(_LOOK, str(many.sweep)).line("first look of a pilot at the queue"))
        print(f"{jobs(first.output):,} jobs submitted, {without:,} without the limit of nodes")
        print(f"{many.inodes():,} files and folders, {many.inodes() / count:.2f} a point")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
