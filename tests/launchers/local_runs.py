"""Runs on this machine with a scripted workload: starting their pilots, waiting for them, reading their rows."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from launchers.settings import LaunchSettings
from launchers.state import pilot_state
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.sweep_dir import SweepDir
from results.tables import store
from workloads.contract.protocol import write_json

SCRIPTED = (sys.executable, "-m", "tests.launchers.scripted")


def rows_of(sweep: SweepDir) -> list[dict[str, Any]]:
    rows = store.read_attempts(sweep.path).to_pylist()
    return sorted(rows, key=lambda row: row["started_at"])


def start_pilot(sweep: SweepDir, pilot_id: str, launch: LaunchSettings, **changes: Any) -> subprocess.Popen[bytes]:
    config = PilotConfig(
        **{"settings": launch, "command": "test", "wall_time_s": None, "stop_with_parent": False, **changes}
    )
    write_json(pilot_state.config_path(sweep, pilot_id), pilot_config_to_dict(config))
    with pilot_state.log_path(sweep, pilot_id).open("wb") as log:
        return subprocess.Popen([*SCRIPTED, str(sweep.path), pilot_id], env=pilot_environment(), stdout=log, stderr=log)


def phase_of(sweep: SweepDir) -> str | None:
    """Phase of the first running attempt in its pilot's state file; None while none runs."""
    return next((one.phase for state in pilot_state.all_states(sweep) for one in state.running), None)


def until(condition: Any, limit_s: float = 100.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
