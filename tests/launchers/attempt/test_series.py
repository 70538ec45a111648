"""Columns with one value per pipeline stage or step, from constructed results."""

from __future__ import annotations

import pytest

from launchers.attempt import series
from tests.analysis.synthetic import experiments
from workloads.contract.protocol import RankResult, StepRecord
from workloads.spec.experiment import Experiment


def two_stages() -> Experiment:
    return next(e for e in experiments(micro_batch_sizes=(1,)) if e.pp == 2 and e.world_size == 8)


def result(rank: int, forward: float | None, busy: list[float | None], peaks: list[int | None]) -> RankResult:
    steps = [
        StepRecord(
            step=step,
            is_warmup=step == 0,
            step_time_s=1.0,
            forward_backward_s=seconds,
            pipeline_idle_s=None if seconds is None else 1.0 - seconds,
            peak_allocated_bytes=peak,
        )
        for step, (seconds, peak) in enumerate(zip(busy, peaks, strict=True))
    ]
    return RankResult(rank=rank, coordinates={}, steps=steps, phase_started_at={}, forward_s=forward)


def test_times_are_means_over_the_ranks_of_a_stage() -> None:
    experiment = two_stages()
    results = {r: result(r, 0.1 + r, [9.0, 0.5, 0.75], [1, 2, 3]) for r in range(experiment.world_size)}
    columns = series.time_columns(experiment, results)
    half = experiment.world_size // 2
    assert columns["forward_by_stage_s"] == [pytest.approx(0.1 + (half - 1) / 2), pytest.approx(0.1 + half * 1.5 - 0.5)]
    assert columns["forward_backward_by_stage_s"] == [0.625, 0.625], "warm-up does not count"
    assert columns["pipeline_idle_by_stage_s"] == [0.375, 0.375]
    assert "backward_by_stage_s" not in columns, "no rank measured it"


def test_a_stage_that_did_not_run_has_no_time() -> None:
    columns = series.time_columns(two_stages(), {0: result(0, 0.1, [None, None], [1, 1])})
    assert columns == {"forward_by_stage_s": [0.1, None]}
    assert series.time_columns(two_stages(), {}) == {}


def test_peaks_by_stage_and_by_step() -> None:
    results = {0: result(0, None, [None] * 3, [10, 30, 20]), 4: result(4, None, [None] * 3, [15, 25, None])}
    assert series.peaks_by_stage(two_stages(), {0: 30, 4: 25}) == [30, 25]
    columns = series.peaks_by_step(results)
    assert columns["peak_allocated_by_step_bytes"] == [15, 30], "the third step lacks a rank"
    assert columns["peak_reserved_by_step_bytes"] is None
