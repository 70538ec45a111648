"""The planner's closed form of memory against every measured run of the engine that ships with the program."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import pytest

from results.store import read_attempts
from sweep.config import compose_sweep
from workloads.costs.memory import estimate_memory
from workloads.experiment import from_json

RECORDED = Path(__file__).resolve().parents[2] / "results" / "recorded"


@pytest.mark.slow
def test_predicted_peaks_are_those_of_the_recorded_runs() -> None:
    workspaces = {
        name: compose_sweep(["+grid=tiny", f"cluster={name}"]).cluster.device.workspace_bytes
        for name in ("h200", "h100_ib400")
    }
    errors = {}
    columns = ["attempt_id", "method", "outcome", "cluster", "engine", "peak_allocated_bytes", "config_json"]
    for row in read_attempts(RECORDED).select(columns).to_pylist():
        if (row["method"], row["outcome"], row["engine"]) == ("measured", "ok", "ultrasweep"):
            predicted = estimate_memory(from_json(row["config_json"])).peak_bytes + workspaces[row["cluster"]]
            errors[row["attempt_id"]] = predicted / row["peak_allocated_bytes"] - 1
    assert len(errors) >= 540
    found = sorted(abs(error) for error in errors.values())
    assert median(found) < 0.0005
    assert mean(found) < 0.00068
    assert found[-1] < 0.0106, max(errors, key=lambda name: abs(errors[name]))
