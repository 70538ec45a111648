"""The closed forms of models that numbers describe give what they gave before they were those of layer kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from tests.workloads.costs.shapes import H200
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape import weight_sums
from workloads.costs.shape.flops import hardware_flops_per_token
from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.sent import step_traffic
from workloads.spec.experiment import Experiment

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("engine_layouts.json").read_text())
"""Layouts drawn at random, with what was predicted of them at the time: peaks of all stages, seconds of a
step, FLOPs of a token, messages of the first rank."""


@pytest.mark.slow
def test_memory_times_and_traffic_of_the_engines_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLOWED_DENSE", "SLOWED_EXPERTS"):  # additions to sums took as long as memory needs at the time
        monkeypatch.setattr(weight_sums, name, 1.0)
    folders, times = ConfFolders(), StepTimes(H200)
    for row in ROWS:
        # As all layouts were at the time: neither fused sums nor shared memory.
        fields = {**row["fields"], "gradient_accumulation_fusion": False, "engine_version": "4"}
        e = Experiment.canonical(model=folders.model(row["model"]), **fields)
        assert [stage.peak_bytes for stage in estimate_memory(e).stages] == row["peaks"], row
        assert float(times.seconds([e])[0]) == pytest.approx(row["step_time_s"], rel=1e-9), row
        assert hardware_flops_per_token(e) == pytest.approx(row["flops"], rel=1e-12), row
        sent = [[one.axis, one.op, one.calls, one.bytes] for one in step_traffic(e, 0)]
        assert sent == row["sent"], row
