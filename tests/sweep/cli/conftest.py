"""The machine on which tests of the command line run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.composing import machine


@pytest.fixture
def machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU and without a Slurm, and with an empty working folder, where sweeps go by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 0)
