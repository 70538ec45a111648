"""mxfp8 and nvfp4: planned by their own rates and sizes, never taken for fp8, and refused where something would run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import ultrasweep

from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import cluster_named
from tests.sampling import sampled
from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.fp8 import cast_bytes, gathered_bytes
from workloads.costs.time.timeline import estimate_time
from workloads.rules.engine_kinds import engine_lacks
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS

B200, H200 = (cluster_named(name, ConfFolders(())) for name in ("b200", "h200"))
"""One with these formats, one without."""


def of(precision: str, **fields: Any) -> Experiment:
    asked = {"dp": 8, "zero_stage": 1, "micro_batch_size": 2, "global_batch_size": 64, **fields}
    return Experiment.canonical(model=LLAMA_8B, precision=precision, **asked)


def test_bytes_with_scales() -> None:
    assert cast_bytes(of("mxfp8"), 3200) == 3200 + 3200 // 32
    assert cast_bytes(of("nvfp4"), 3200) == 3200 // 2 + 3200 // 16
    assert [gathered_bytes(of(precision), 2, of_experts=True) for precision in PLANNED_FORMATS] == [2, 2]


def test_smaller_formats_save_less_and_take_less_time() -> None:
    experiments = [of(precision) for precision in ("bf16", "mxfp8", "nvfp4")]
    peaks = [estimate_memory(one).peak_bytes for one in experiments]
    times = [estimate_time(one, B200).step_time_s for one in experiments]  # type: ignore[union-attr]
    assert peaks == sorted(peaks, reverse=True) and times == sorted(times, reverse=True)
    # A scale of mxfp8 is as large for its elements as one of fp8_blockwise, and both keep the same tensors.
    assert peaks[1] == estimate_memory(of("fp8_blockwise")).peak_bytes


def test_the_rate_is_the_devices_in_this_format() -> None:
    rates = B200.device.peak_flops
    assert rates["nvfp4"] == 2 * rates["mxfp8"] and not {*PLANNED_FORMATS} & {*H200.device.peak_flops}
    assert [B200.device.peak_of(precision) for precision in PLANNED_FORMATS] == [4.5e15, 9e15]
    assert estimate_time(of("nvfp4"), H200) is None


@pytest.mark.parametrize("precision", PLANNED_FORMATS)
def test_a_device_without_the_format_is_refused_by_name(precision: str) -> None:
    assert violations(of(precision), B200) == []
    [broken] = violations(of(precision), H200)
    assert broken.message == (
        f"precision={precision}, but NVIDIA H200 has no {precision} matrix products; it has bf16, fp16, fp8, fp32"
    )
    assert engine_lacks(LLAMA_8B, precision) == (f"{precision} matrix products",)


@pytest.mark.parametrize("precision", sampled(PLANNED_FORMATS, 1))
def test_a_run_is_refused_by_name(
    precision: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("+grid=llama8b_8gpu", "cluster=b200", f"grid.axes.precision=[bf16,{precision}]", "grid.axes.compile=none")
    assert main(["run", *words, "launcher=slurm", "launcher.dry=true"]) == 2
    told = capsys.readouterr().err.splitlines()
    (said,) = [line for line in told if not line.startswith("planning: ")]  # which a slow machine adds
    assert f"precision={precision} can be planned and exported, but not run" in said
    assert main(["plan", *words]) == 0
    assert f"precision={precision} cannot be run yet" in capsys.readouterr().out
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine_lacks"] == {"llama8b": [f"{precision} matrix products"]}


def test_intervals_say_that_nothing_was_measured() -> None:
    axes = {"tp": 1, "pp": 1, "compile": "none", "precision": ["fp8_blockwise", "mxfp8", "nvfp4"]}
    points = ultrasweep.plan("llama8b_8gpu", cluster="b200", axes=axes).points
    points = points[points["verdict"].eq("run")]
    width = np.log(points["predicted_step_time_high_s"] / points["predicted_step_time_low_s"])
    of_kind = width.groupby(points["precision"]).median()
    assert of_kind[["mxfp8", "nvfp4"]].min() > 1.05 * of_kind["fp8_blockwise"]
