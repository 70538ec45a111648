"""A new sweep without points."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.state.sweep_dir import SweepDir


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "sweep", {"note": 1})
