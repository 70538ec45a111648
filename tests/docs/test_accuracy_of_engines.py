"""Predictions of other engines from ten of their recorded rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from docs.tools.accuracy_of_engines import TEN, draws, graded
from results.tables.store import read_attempts
from sweep.predicting.known import MeasuredLayout, ran_layouts

RECORDED = Path(__file__).resolve().parents[2] / "results" / "recorded"
SWEEPS = ("h200x2_engines_axes", "h200x2_engines_best", "h200x2_engines_experts")


@pytest.fixture(scope="module")
def megatron() -> dict[str, MeasuredLayout]:
    """Layouts that Megatron-Core with Transformer Engine ran, with and without its CUDA graph, dense and routed."""
    rows = [row for sweep in SWEEPS for row in read_attempts(RECORDED / sweep).to_pylist()]
    return ran_layouts(row for row in rows if row["engine"] == "megatron" and row["outcome"] == "ok")


@pytest.mark.slow
def test_ten_rows_predict_steps_with_and_without_graphs(megatron: dict[str, MeasuredLayout]) -> None:
    names = sorted(megatron)
    assert {ran.experiment.compile for ran in megatron.values()} == {"none", "block"}
    drawn = next(draws(names, TEN))
    pairs = graded("h200", megatron, drawn, [name for name in names if name not in drawn])
    assert len(pairs) == len(names) - TEN == 11
    assert np.mean([abs(one.time_off) for one in pairs]) < 0.06
    assert np.mean([abs(one.memory_off) for one in pairs]) < 0.03


def test_experts_are_predicted_before_any_row_is_measured(megatron: dict[str, MeasuredLayout]) -> None:
    routed = [name for name, ran in megatron.items() if ran.experiment.model.moe is not None]
    pairs = graded("h200", megatron, [], routed)
    assert len(pairs) == 2
    assert all(abs(one.time_off) < 0.08 and abs(one.memory_off) < 0.02 for one in pairs)
