"""A rank of torchtitan that runs out of memory, hangs or raises: each is its own outcome, and the next point runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launchers import local
from launchers.local import run_local
from launchers.state.sweep_dir import Point, SweepDir
from results.tables import store
from tests.launchers.scripted import settings
from tests.workloads.adapters.faulty import FAULTS
from tests.workloads.adapters.test_torchtitan import pytestmark as needs_torchtitan
from tests.workloads.test_worker import MODEL
from workloads.spec.experiment import ENGINES, Experiment

pytestmark = needs_torchtitan


@pytest.mark.exhaustive(seconds=35)
def test_faults_of_its_step_become_rows_and_the_points_after_them_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-m", "tests.workloads.adapters.faulty"))
    sweep = SweepDir.create(tmp_path / "sweep", {})
    of = {"model": MODEL, "seq_len": 32, "global_batch_size": 4, "precision": "fp32", "engine": "torchtitan"}
    sweep.add_points(
        [
            Point(index=at, grid="faults", deadline_s=200.0, experiment=Experiment.canonical(**of, dp=2, seed=seed))
            for at, seed in enumerate(FAULTS)
        ]
    )
    limits = {"spawn": 90.0, "rendezvous": 90.0, "build": 90.0, "warmup": 90.0, "step": 5.0, "teardown": 20.0}
    summary = run_local(sweep, settings(phase_limits_s=limits, lease_s=20.0), live=False, command="sweep run")
    rows = store.read_attempts(sweep.path).to_pylist()
    said = {FAULTS[row["seed"]]: row for row in sorted(rows, key=lambda row: row["started_at"])}
    assert summary.outcomes == {"ok": 2, "oom": 1, "hang": 1, "crash": 1}, [row["evidence"] for row in rows]
    assert {FAULTS[row["seed"]]: row["outcome"] for row in rows} == {
        "ok": "ok",
        "oom": "oom",
        "hang": "hang",
        "raise": "crash",
    }
    assert all(row["engine_version"] == ENGINES["torchtitan"] for row in rows)
    assert [row["outcome"] for row in rows if row["seed"] in (1, 5)] == ["ok", "ok"], "the last one ran, too"
    assert "Tried to allocate 2.00 GiB" in said["oom"]["evidence"]
    assert "a tensor of another shape" in said["raise"]["evidence"]
    assert "train_step (faulty.py:" in said["hang"]["evidence"]
    assert [row["will_retry"] for row in rows if row["outcome"] == "hang"] == [True, False], "a hang is tried again"
    assert all(row["phase"] == "step" and row["phase_step"] == 1 for row in rows if row["outcome"] != "ok")
