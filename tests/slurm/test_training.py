"""Real training steps over two nodes of a real Slurm: the same losses as on one machine."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launchers.state.submissions import all_submissions, log_dir
from launchers.state.sweep_dir import SweepDir
from results.tables.probes import load_probe
from results.tables.store import read_attempts
from tests.sampling import SEED, SHARE
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT

CLUSTER = """
defaults: [/device@device: cpu, _self_]
name: {name}
backend: cpu
devices_per_node: {devices}
intra_node: {{bandwidth: 1.0e9, latency_s: 50.0e-6, source: a test}}
inter_node: {{bandwidth: 1.0e9, latency_s: 50.0e-6, source: a test}}
matmul_efficiency: null
"""
# Like tiny, with as many key-value heads as query heads: tp=4 spans both nodes.
MODEL = """
name: tiny4
num_layers: 4
hidden_size: 128
num_heads: 4
num_kv_heads: 4
head_dim: 32
ffn_hidden_size: 384
vocab_size: 1024
tie_embeddings: false
"""
# Two processes per node: each layout's last split axis, or its only one, spans both nodes.
LAYOUTS = {"tp": [4, 2, 2, 1, 1], "pp": [1, 2, 1, 2, 1], "zero_stage": [0, 0, 1, 2, 3]}
GRID = """
cluster: two_a_node
axes: {{model: tiny4, world_size: 4, micro_batch_size: 1, global_batch_size: 4, seq_len: 64, precision: fp32}}
zip: {{layouts: {layouts}}}
derive: {{dp: world_size / (tp * pp)}}
"""


DRAWN = sorted(random.Random(SEED).sample(range(5), math.ceil(3 * SHARE)))
"""Numbers of the layouts that every run has."""


@pytest.fixture
def layouts(request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """Those layouts whose numbers are the test's parameter; without one, all."""
    numbers: Sequence[int] = getattr(request, "param", range(5))
    return {axis: [values[number] for number in numbers] for axis, values in LAYOUTS.items()}


@pytest.fixture
def conf(tmp_path: Path, layouts: dict[str, list[int]]) -> Path:
    files = {
        "cluster/two_a_node.yaml": CLUSTER.format(name="two_a_node", devices=2),
        "cluster/four_a_node.yaml": CLUSTER.format(name="four_a_node", devices=4),
        "model/tiny4.yaml": MODEL,
        "grid/layouts.yaml": GRID.format(layouts=layouts),
    }
    for where, text in files.items():
        path = tmp_path / "conf" / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "conf"


def run(lab: Lab, conf: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """The rows of an ordinary run of the grid, in the order of the layouts.

    A layout with a rank that a signal killed runs once more, with a warning: gloo has crashed by a fault of its own
    where two processors served many processes. A fault of this code would happen twice.
    """
    command = [sys.executable, "-m", "sweep", "run", "--plain", "--conf", str(conf), "+grid=layouts", "measure=quick"]
    command += [f"results_dir={conf.parent}", f"name={name}", *words]
    rows = _rows_of(lab, conf.parent / name, command)
    if killed := [row["evidence"] for row in rows if "killed by SIG" in str(row["evidence"])]:
        warnings.warn(f"layouts whose ranks were killed run once more: {killed}", stacklevel=2)
        retry = [sys.executable, "-m", "sweep", "retry", str(conf.parent / name), "crash"]
        subprocess.run(retry, cwd=CHECKOUT, env=lab.environment, check=True, timeout=60)
        rows = _rows_of(lab, conf.parent / name, command)
    assert rows and {row["outcome"] for row in rows} == {"ok"}, [row["evidence"] for row in rows]
    return sorted(rows, key=lambda row: str(row["experiment_id"]))


def _rows_of(lab: Lab, folder: Path, command: list[str]) -> list[dict[str, Any]]:
    """Each layout's last row after the command."""
    done = subprocess.run(
        command, cwd=CHECKOUT, env=lab.environment, capture_output=True, text=True, timeout=400, check=False
    )
    logs = "".join(path.read_text()[-2000:] for path in folder.rglob("*.out"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    rows = sorted(read_attempts(folder).to_pylist(), key=lambda row: row["started_at"])
    return list({row["experiment_id"]: row for row in rows}.values())


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layouts", [DRAWN, pytest.param(range(5), marks=pytest.mark.exhaustive(seconds=60))], ids=str, indirect=True
)
def test_layouts_over_two_nodes_compute_what_they_compute_on_one(
    lab: Lab, conf: Path, layouts: dict[str, list[int]]
) -> None:
    submitits_names = ["launcher.timeout_min=30", "launcher.slurm_array_parallelism=1", "launcher.slurm_mail_type=NONE"]
    over_nodes = run(lab, conf, "over nodes", "launcher=slurm", *submitits_names)
    here = run(lab, conf, "here", "launcher=local", "cluster=four_a_node")
    assert len(over_nodes) == len(layouts["tp"])
    assert all(len(row["hosts"]) == 2 for row in over_nodes), [row["hosts"] for row in over_nodes]
    for far, near in zip(over_nodes, here, strict=True):
        assert far["experiment_id"] == near["experiment_id"]
        assert len(far["losses"]) == far["warmup_steps"] + far["timed_steps"]
        assert far["losses"] == pytest.approx(near["losses"], rel=1e-6), far["experiment_id"]
        assert far["grad_norms"] == pytest.approx(near["grad_norms"], rel=1e-5), far["experiment_id"]
    [submission] = all_submissions(SweepDir(conf.parent / "over nodes"))
    [seen] = seen_by_submitit(lab, str(log_dir(conf.parent / "over nodes", submission.token)), submission.job_id)
    assert seen["state"] == "COMPLETED" and "srun starts pilot" in seen["log"]
    assert "#SBATCH --mail-type=NONE" in seen["file"] and "#SBATCH --time=30" in seen["file"]


def seen_by_submitit(lab: Lab, folder: str, *ids: str | None) -> list[dict[str, str]]:
    """What submitit's handle of a pilot's job says, asked as a user may ask."""
    code = """
import json, submitit, sys
jobs = [submitit.SlurmJob(sys.argv[1], id) for id in sys.argv[2:]]
print(json.dumps([
    {"state": job.state, "log": job.stdout(), "file": job.paths.submission_file.read_text()} for job in jobs
]))
"""
    command = [sys.executable, "-c", code, folder, *map(str, ids)]
    told = subprocess.run(command, env=lab.environment, capture_output=True, text=True, timeout=60, check=True).stdout
    return list(json.loads(told))


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.exhaustive(seconds=90)
def test_two_nodes_are_probed_and_checked(lab: Lab, conf: Path) -> None:
    words = ["cluster=two_a_node", "launcher=slurm", "launcher.time_min=30", f"results_dir={conf.parent}"]
    command = [sys.executable, "-m", "sweep", "probe", "--plain", "--conf", str(conf), "--nodes", "2", *words]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=lab.environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    probe = load_probe("two_a_node", conf.parent)
    assert probe is not None
    groups = {(row["placement"], row["group_size"]) for row in probe.select("collective", "all_reduce")}
    assert groups == {("inside_node", 2), ("between_nodes", 2), ("mixed", 4)}
    assert len({row["node"] for row in probe.select("copy")}) == 2
    assert {(row["dp"], row["tp"]) for row in probe.select("step")} == {(4, 1), (2, 2)}
    rows = run(lab, conf, "checked", *words[:3], "launcher.max_pilots=1", "launcher.node_check=true")
    for row in rows:
        for name in ("matmul_flops", "all_reduce_inside_node_bytes_per_s", "all_reduce_between_nodes_bytes_per_s"):
            assert row[f"check_{name}"] > 0
