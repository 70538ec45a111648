"""Rows whose algorithms are all deterministic: what was measured on H200, which kernel runs where, and the cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.predict_table import predict_frame
from workloads.predict.cells import deterministic
from workloads.predict.parameters import TIME
from workloads.predict.table import read_points

ROW = {
    "gpu": "H200", "gpus": 8, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 16384, "vocab": 131200,
    "tie_embeddings": False, "gated_mlp": False, "seq": 8192, "mbs": 1, "grad_accum": 4, "dp": 8, "tp": 1, "pp": 1,
    "sharding": "zero1", "recompute": "none", "precision": "bf16", "codebase": "megatron",
}  # fmt: skip


def step_s(**changes: Any) -> float:
    return float(predict_frame(pd.DataFrame([ROW | changes]), None).predictions["step_time_s"][0])


def points(**changes: Any) -> Any:
    profiles = read_profiles()
    return read_points(pd.DataFrame([ROW | changes]), read_clusters(), profiles, profiles[GENERAL]).points


def attention_s(**changes: Any) -> float:
    """Seconds of attention of one layer and micro-batch by the form, forward and backward."""
    x = points(**changes)
    flops = 0.5 * 3.5 * 4 * x.tokens * x.seq * x.queries / x.tp
    rate = x.kernel * x.clock * x.peak * TIME["attention"].value / (1 + TIME["short"].value / x.seq)
    return float((flops / rate)[0])


@pytest.mark.parametrize(("layout", "measured"), [({}, 10.22e-3), ({"tp": 4, "dp": 2, "mbs": 2}, 5.92e-3)])
def test_flash_attention_2_is_as_slow_as_measured(layout: dict[str, Any], measured: float) -> None:
    there = {**layout, "attention_kernel": "flash2"}
    assert attention_s(**there, deterministic="true") == pytest.approx(measured, rel=0.12)
    assert attention_s(**there) < 0.75 * measured
    on_blackwell = attention_s(**layout, gpu="B200", deterministic="true")
    assert on_blackwell == pytest.approx(measured, rel=0.12), "what it reaches on Hopper"
    assert attention_s(**layout, gpu="B200", attention_kernel="cudnn", deterministic="true") < 0.25 * on_blackwell


@pytest.mark.parametrize(("tokens", "columns", "measured"), [(8192, 131200, 19.9e-3), (16384, 32800, 10.2e-3)])
def test_the_loss_moves_what_was_measured(tokens: int, columns: int, measured: float) -> None:
    rate = float(points().memory_bandwidth[0]) * TIME["memory"].value
    assert deterministic.LOSS * tokens * columns / rate == pytest.approx(measured, rel=0.03)
    more = step_s(deterministic="true", attention_kernel="flash") - step_s(attention_kernel="flash")
    assert more > 4 * 0.6 * 19.9e-3, "four micro-batches of the loss, and attention"


def test_tokens_of_other_ranks_are_looked_up_one_by_one() -> None:
    """Two micro-batches of 16,384 tokens, three quarters of them elsewhere."""
    split = {"tp": 4, "dp": 2, "mbs": 2, "grad_accum": 2, "layers": 1, "vocab": 512, "deterministic": "true"}
    whole = step_s(**split)
    looked_up = 2 * 16384 * 0.75 * deterministic.LOOKUP_S
    assert looked_up == pytest.approx(2 * 12.3e-3, rel=0.01)
    assert whole - step_s(**split | {"deterministic": ""}) > looked_up


def test_hopper_stores_the_gradients_of_scores_and_others_do_not() -> None:
    assert points(deterministic="true").deterministic.tolist() == [2.0]
    assert points(gpu="A100", deterministic="yes").deterministic.tolist() == [1.0]
    assert points(deterministic="false").deterministic.tolist() == points().deterministic.tolist() == [0.0]
    assert attention_s(gpu="A100", deterministic="true") == pytest.approx(attention_s(gpu="A100") / 0.67)
    longer = [step_s(deterministic=said, seq=32768, gpu="H100") for said in ("true", "")]
    stored = 4 * 32 * deterministic.STORED * 32 * 32768**2 / (3.35e12 * TIME["memory"].value)
    assert longer[0] - longer[1] == pytest.approx(stored, rel=0.2)


def test_what_is_assumed_is_said_and_other_words_are_refused() -> None:
    said = predict_frame(pd.DataFrame([ROW | {"gpu": "GB200", "deterministic": "true"}]), None).predictions
    assert "cuDNN before 9.18.1" in said["reason"][0]
    refused = predict_frame(pd.DataFrame([ROW | {"deterministic": "mostly"}]), None)
    assert (
        np.isnan(refused.predictions["step_time_s"].astype(float)[0])
        and "neither true nor false" in refused.mistakes[0]
    )
