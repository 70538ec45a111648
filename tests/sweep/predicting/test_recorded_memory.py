"""The planner's closed form of memory against every measured run of the engine that ships with the program."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow.parquet as pq
import pytest

from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.store import read_attempts
from sweep.composing.config import compose_sweep
from tests.sampling import SEED
from workloads.costs.memory import expert_activations, layer_classes
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import from_json

RECORDED = Path(__file__).resolve().parents[3] / "results" / "recorded"

MOST_OFF = 0.0124
EXCEPTIONS = {
    # 2.9 % more than predicted: with a host half a step ahead, the engine of that time held ten messages that had left
    # (docs/tools/rows_of_other_hosts/h200x2_messages).
    "llama1b-dp1z0-pp4-interleaved_1f1bv2-mbs2-gbs8-s4096-rcfull-compiled-c8ceab29",
    # 1.6 % more: layers that recompute beside all-gather attention kept more when they were handed to the compiler
    # (docs/tools/rows_of_other_hosts/h200x2_compiled_recomputed).
    "llama8b-dp2z2-cp2-mbs2-gbs8-s4096-rcselective.every2-compiled-cbf8b5ae",
}
"""Of older engines."""


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    columns = ["attempt_id", "experiment_id", "method", "outcome", "cluster", "engine", "peak_allocated_bytes"]
    rows = read_attempts(RECORDED).select([*columns, "config_json"]).to_pylist()
    return [row for row in rows if (row["method"], row["outcome"], row["engine"]) == ("measured", "ok", "ultrasweep")]


def errors_of(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """How far off the predicted peaks are by attempt, and of those in `EXCEPTIONS`."""
    workspaces = {
        name: compose_sweep(["+grid=tiny", f"cluster={name}"]).cluster.device.workspace_bytes
        for name in ("h200", "h100_ib400")
    }
    errors: dict[str, float] = {}
    odd: dict[str, float] = {}
    for row in rows:
        predicted = estimate_memory(from_json(row["config_json"])).peak_bytes + workspaces[row["cluster"]]
        where = odd if row["experiment_id"] in EXCEPTIONS else errors
        where[row["attempt_id"]] = predicted / row["peak_allocated_bytes"] - 1
    return errors, odd


@pytest.mark.slow
def test_predicted_peaks_of_a_sample_are_those_of_the_recorded_runs(measured: list[dict[str, Any]]) -> None:
    errors, _ = errors_of(random.Random(SEED).sample(measured, 120))
    worst = max(errors, key=lambda name: abs(errors[name]))
    assert abs(errors[worst]) < MOST_OFF, worst
    assert median(map(abs, errors.values())) < 0.001


@pytest.mark.exhaustive(seconds=10)
@pytest.mark.slow
def test_predicted_peaks_are_those_of_the_recorded_runs(measured: list[dict[str, Any]]) -> None:
    errors, odd = errors_of(measured)
    assert len(errors) >= 943 and len(odd) == len(EXCEPTIONS)
    assert all(0.015 < abs(error) < 0.03 for error in odd.values()), "what runs as predicted is no exception"
    found = sorted(abs(error) for error in errors.values())
    assert median(found) < 0.0005
    assert mean(found) < 0.00075
    assert found[-1] < MOST_OFF, max(errors, key=lambda name: abs(errors[name]))


def test_learned_routing_needs_more_by_the_rows_that_a_rank_received(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = compose_sweep(["+grid=tiny", "cluster=h200"]).cluster.device.workspace_bytes
    table = pq.read_table(ON_OTHER_HOSTS / "h200x4_received_rows" / "received.parquet")
    highest: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        known = highest.get(row["experiment_id"])
        if known is None or row["peak_allocated_bytes"] > known["peak_allocated_bytes"]:
            highest[row["experiment_id"]] = row
    assert len(highest) == 3
    for row in highest.values():
        experiment, peak = from_json(row["config_json"]), row["peak_allocated_bytes"]
        most = max(mean(layers) for layers in row["received_rows"])
        balanced = estimate_memory(experiment).peak_bytes + workspace
        assert most > 1.05 * expert_activations.received_rows(experiment)
        with monkeypatch.context() as patch:
            patch.setattr(expert_activations, "received_rows", lambda _, most=most: round(most))
            patch.setattr(layer_classes, "_KEPT", {})  # without sizes of layers that received an equal share
            found = estimate_memory(experiment).peak_bytes + workspace
        assert balanced < 0.993 * peak
        assert found == pytest.approx(peak, rel=0.0006)
