"""A fake cluster that exists only on PATH and is polled often, and a small sweep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchers.slurm import held_nodes, pilot_submitter, polling, submission_tracker
from launchers.state.sweep_dir import SweepDir
from tests.launchers.scripted import points
from tests.launchers.slurm.fakeslurm import FakeSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The fake cluster, with shorter waits than a real one."""
    monkeypatch.setattr(submission_tracker, "GRACE_S", 0.0)
    monkeypatch.setattr(submission_tracker, "REQUEUE_GRACE_S", 0.2)
    monkeypatch.setattr(pilot_submitter, "_RETRY_S", (0.0,))
    monkeypatch.setattr(pilot_submitter, "_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(polling, "SQUEUE_S", 0.1)
    monkeypatch.setattr(polling, "SLOWEST_SQUEUE_S", 0.2)
    monkeypatch.setattr(polling, "FILES_S", 0.1)
    monkeypatch.setattr(held_nodes, "RELEASE_S", 0.3)
    cluster = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
    return cluster


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    """Three points for one node of two devices."""
    made = SweepDir.create(tmp_path / "it's a sweep", {})
    made.add_points(points("ok", "ok", "ok"))
    return made
