"""``python -m sweep cluster --from-slurm`` asks a real Slurm, and its file plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import cluster_named
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT


def test_the_nodes_of_a_partition_become_a_file_that_plans(plain_lab: Lab, tmp_path: Path) -> None:
    partition = plain_lab.add_partition("half", plain_lab.nodes[:2])
    out = tmp_path / "conf" / "cluster" / "half.yaml"
    sweep = [sys.executable, "-m", "sweep"]
    command = [*sweep, "cluster", "--from-slurm", partition, "--base", "h200", "--out", str(out)]

    def run(command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=CHECKOUT, env=plain_lab.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    plain_lab.drain(plain_lab.nodes[0])
    try:
        said = run(command)
    finally:
        plain_lab.resume(plain_lab.nodes[0])
    assert "nodes: 2, 1 of them down or drained now" in said
    cluster = cluster_named("half", ConfFolders((tmp_path / "conf",)))
    assert (cluster.devices_per_node, cluster.nodes) == (plain_lab.gpus, 2)
    planned = run([*sweep, "plan", "+grid=first_day", "--conf", str(tmp_path / "conf"), "cluster=half"])
    assert "half" in planned
    done = subprocess.run(
        [*sweep, "cluster", "--from-slurm", "nowhere"],
        cwd=tmp_path,
        env={**plain_lab.environment, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no partition nowhere; Slurm has " in done.stderr and "half" in done.stderr
