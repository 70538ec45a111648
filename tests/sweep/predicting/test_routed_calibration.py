"""What a calibration on few rows says of rows with routed experts, and what of dense ones."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from sweep.predicting.predict_table import predict_frame

DENSE = {
    "gpu": "B200", "gpus": 8, "layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256,
    "seq": 4096, "mbs": 1, "dp": 4, "tp": 2, "pp": 1, "sharding": "zero1", "precision": "bf16", "codebase": "megatron",
}  # fmt: skip
ROUTED = DENSE | {
    "layers": 4, "hidden": 5120, "heads": 40, "ffn": 12288, "dp": 8, "tp": 1, "ep": 8, "num_experts": 160,
    "experts_per_token": 6, "expert_ffn": 1536, "shared_experts": 2, "dense_layers": 0,
}  # fmt: skip


def rows(of: dict[str, Any], *grad_accum: int, **changes: Any) -> pd.DataFrame:
    return pd.DataFrame([{**of, "grad_accum": each, **changes} for each in grad_accum])


def ratios(asked: pd.DataFrame, given: pd.DataFrame, **slower: float) -> list[float]:
    """Predictions after a calibration over those before. ``slower``: by how much the rows of ``given`` took longer than
    predicted, those without experts (``dense``) and those with (``routed``)."""
    before = predict_frame(given, None).predictions["step_time_s"].astype(float)
    factor = given["num_experts"].notna().map({False: slower.get("dense", 1.0), True: slower.get("routed", 1.0)})
    known = given.assign(step_time_s=before * factor, status="ok")
    after, alone = (predict_frame(asked, one).predictions["step_time_s"].astype(float) for one in (known, None))
    return list(after / alone)


GIVEN = pd.concat([rows(DENSE, 4, 6, 8, 12, 16, 24, 32, 48), rows(ROUTED, 4, 32)], ignore_index=True)


def test_routed_rows_do_not_get_what_dense_rows_of_a_calibration_need() -> None:
    (experts,) = ratios(rows(ROUTED, 8), GIVEN, dense=1.15)
    (dense,) = ratios(rows(DENSE, 10), GIVEN, dense=1.15)
    assert experts == pytest.approx(1.0, abs=0.04)
    assert dense == pytest.approx(1.15, abs=0.02)


def test_two_routed_rows_tell_how_far_others_like_them_are_off_and_nothing_of_dense_ones() -> None:
    (experts,) = ratios(rows(ROUTED, 8), GIVEN, routed=1.3)
    (dense,) = ratios(rows(DENSE, 10), GIVEN, routed=1.3)
    assert experts > 1.2
    assert dense == pytest.approx(1.0, abs=0.02)


def test_routed_rows_of_another_device_tell_little() -> None:
    elsewhere = pd.concat([rows(DENSE, 4, 6, 8, 12, 16, 24, 32, 48), rows(ROUTED, 4, 32, gpu="H100")])
    (experts,) = ratios(rows(ROUTED, 8), elsewhere.reset_index(drop=True), routed=1.3)
    assert experts < 1.12
