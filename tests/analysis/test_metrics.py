"""Ranking, winners, cohorts and counts, on rows small enough to be worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pandas as pd
import pytest

from analysis.figures import conclusions
from analysis.rows import cohorts, labels, metrics
from analysis.rows.load import last_attempts
from analysis.rows.stats import median_interval
from results.tables.schema import MEASUREMENT_VERSION
from results.text.numbers import format_bytes, listed
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

ONE_B, THREE_B, _ = synthetic.MODELS


def experiment(**fields: Any) -> Experiment:
    return Experiment.canonical(**({"model": ONE_B, "dp": 2, "zero_stage": 1, "global_batch_size": 64} | fields))


def rows_of(*specs: tuple[Experiment, dict[str, Any]]) -> pd.DataFrame:
    """A labelled frame; a rate in a spec also sets the step time that goes with it."""
    rows = []
    for index, (point, columns) in enumerate(specs):
        if rate := columns.get("tokens_per_s_per_gpu"):
            step = point.tokens_per_step / rate / point.world_size
            columns = {"step_time_s": step, "step_time_min_s": step, "step_time_max_s": step} | columns
        rows.append(synthetic.attempt(point, index, **({"outcome": "ok"} | columns)))
    return labels.add_labels(frame_of(rows))


MIXTURE = dataclasses.replace(
    ONE_B, name="mixture", moe=MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=1024)
)


def test_each_routing_is_a_workload_of_its_own() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"routing": "skewed", "routing_imbalance": 2},
        {"routing": "learned"},
        {"routing": "learned", "routing_imbalance": 2.0, "micro_batch_size": 2},
        {"routing": "learned", "capacity_factor": 1.25},
    ]
    frame = rows_of(*((experiment(model=MIXTURE, **kind), {}) for kind in kinds), (experiment(), {}))
    learned = "mixture, learned routing"
    names = ["mixture", "mixture, skewed 2×", learned, learned, f"{learned}, capacity 1.25", "llama1b"]
    assert list(frame["workload"]) == names
    assert list(metrics.ranked(frame).groupby("workload")["rank"].max().loc[["mixture", learned]]) == [1.0, 2.0]
    lengths = labels.add_labels(pd.concat([frame, frame.assign(seq_len=8192)], ignore_index=True))
    assert "mixture, seq 8192, learned routing, capacity 1.25" in set(lengths["workload"])
    assert labels.workloads(frame.iloc[2:3], lengths_of=lengths) == ["mixture, seq 4096, learned routing"]


def test_rank_is_within_model_and_size_by_throughput_per_gpu() -> None:
    frame = rows_of(
        (experiment(micro_batch_size=1), {"tokens_per_s_per_gpu": 100.0}),
        (experiment(micro_batch_size=2), {"tokens_per_s_per_gpu": 300.0}),
        (experiment(micro_batch_size=4), {"tokens_per_s_per_gpu": 200.0}),
        (experiment(dp=4), {"tokens_per_s_per_gpu": 50.0}),
        (experiment(model=THREE_B), {"tokens_per_s_per_gpu": 10.0}),
        (experiment(micro_batch_size=8), {"outcome": "oom"}),
    )
    ranked = metrics.ranked(frame)
    table = ranked[["model", "world_size", "micro_batch_size", "rank"]].values.tolist()
    assert table == [
        ["llama1b", 2, 2, 1.0],
        ["llama1b", 2, 4, 2.0],
        ["llama1b", 2, 1, 3.0],
        ["llama1b", 4, 1, 1.0],
        ["llama3b", 2, 1, 1.0],
    ]
    best = metrics.best_configurations(frame).iloc[0]
    assert best["slower_by"] == pytest.approx(1 / 3)
    assert best["runner_up"] == "dp2 z1 · mbs 4×8"
    assert best["candidates"] == 3
    assert not best["tie"]


@pytest.mark.slow
def test_overlapping_steps_are_a_tie() -> None:
    frame = rows_of(
        (experiment(micro_batch_size=1), {"tokens_per_s_per_gpu": 100.0}),
        (experiment(micro_batch_size=2), {"tokens_per_s_per_gpu": 101.0}),
    )
    assert not metrics.best_configurations(frame)["tie"].iloc[0]
    slower = frame.assign(step_time_max_s=1.02 * frame["step_time_max_s"])
    assert metrics.best_configurations(slower)["tie"].iloc[0]


def test_runs_whose_losses_differ_get_no_rank() -> None:
    frame = rows_of(
        (experiment(micro_batch_size=1), {"tokens_per_s_per_gpu": 100.0}),
        (experiment(micro_batch_size=2), {"tokens_per_s_per_gpu": 900.0, "loss_agrees": False}),
        (experiment(micro_batch_size=4), {"tokens_per_s_per_gpu": 50.0, "loss_agrees": None}),
    )
    ranked = metrics.ranked(frame)
    assert ranked["micro_batch_size"].tolist() == [2, 1, 4]
    assert math.isnan(ranked["rank"].iloc[0])
    assert ranked["rank"].tolist()[1:] == [1.0, 2.0]
    assert metrics.best_configurations(frame)["micro_batch_size"].tolist() == [1]


def test_repeats_count_once_by_their_median() -> None:
    point = experiment()
    rates = [100.0, 120.0, 90.0]
    frame = rows_of(*((point, {"tokens_per_s_per_gpu": rate, "sweep": f"s{rate}"}) for rate in rates))
    [row] = metrics.ranked(frame).to_dict("records")
    assert row["tokens_per_s_per_gpu"] == 100.0
    assert row["repeats"] == 3
    assert row["repeat_spread"] == pytest.approx(120 / 90 - 1)


def test_last_attempt_decides_a_point() -> None:
    point = experiment()
    frame = rows_of(
        (point, {"outcome": "hang", "attempt_number": 1, "will_retry": True}),
        (point, {"tokens_per_s_per_gpu": 5.0, "attempt_number": 2}),
        (point, {"outcome": "crash", "method": "rehearsed"}),
    )
    assert last_attempts(frame)["outcome"].tolist() == ["ok", "crash"]


def test_cohorts_never_pool_methods_clusters_or_measurement_versions() -> None:
    point = experiment()
    frame = frame_of(
        [
            synthetic.attempt(point, 0),
            synthetic.attempt(point, 1, method="rehearsed"),
            synthetic.attempt(point, 2, cluster="h100_efa"),
            synthetic.attempt(point, 3, measurement_version=MEASUREMENT_VERSION + 1),
            synthetic.attempt(point, 4, cluster=None),
        ]
    )
    parts = cohorts.split(frame)
    assert [len(part.frame) for part in parts] == [1] * 5
    assert len({part.slug for part in parts}) == 5
    assert parts[-1].slug == f"rehearsed-h200-v{MEASUREMENT_VERSION}"
    assert f"measurement version {MEASUREMENT_VERSION + 1}" in " ".join(part.title for part in parts)


def test_mixtures_are_said() -> None:
    point = experiment()
    same = frame_of([synthetic.attempt(point, i) for i in range(2)])
    assert cohorts.mixtures(same) == []
    mixed = frame_of([synthetic.attempt(point, 0, outcome="ok"), synthetic.attempt(point, 1, driver_version="575.1")])
    assert cohorts.mixtures(mixed) == []  # one driver is known, the other row does not say
    mixed.loc[0, "driver_version"] = "570.9"
    assert cohorts.mixtures(mixed) == ["The rows mix 2 drivers: 570.9 (1 rows) and 575.1 (1 rows)."]


def test_rehearsed_rows_are_joined_with_measured_ones_of_the_same_experiment() -> None:
    both, alone = experiment(), experiment(micro_batch_size=2)
    frame = rows_of(
        (both, {"peak_allocated_bytes": 1000, "step_time_s": 2.0}),
        (both, {"peak_allocated_bytes": 1010, "step_time_s": 1.8, "method": "rehearsed"}),
        (alone, {"method": "rehearsed"}),
    )
    [row] = metrics.rehearsed_beside_measured(frame).to_dict("records")
    assert row["peak_difference"] == pytest.approx(0.01)
    assert row["step_time_difference"] == pytest.approx(-0.1)


def test_prediction_errors_and_device_hours_by_hand() -> None:
    frame = rows_of(
        (experiment(), {"predicted_peak_bytes": 110, "peak_allocated_bytes": 100, "duration_s": 3600.0}),
        (experiment(micro_batch_size=2), {"outcome": "oom", "predicted_peak_bytes": 5, "duration_s": 1800.0}),
        (experiment(micro_batch_size=4), {"predicted_peak_bytes": None, "method": "rehearsed", "duration_s": 3600.0}),
    )
    errors = metrics.prediction_errors(frame, "predicted_peak_bytes", "peak_allocated_bytes")
    assert errors.tolist() == pytest.approx([0.1])
    times = {"predicted_step_time_s": 2.0, "step_time_s": 1.6}
    frame_of_times = rows_of((experiment(), times), (experiment(tp=2), {**times, "method": "rehearsed_fake"}))
    errors = metrics.prediction_errors(frame_of_times, "predicted_step_time_s", "step_time_s")
    assert errors.tolist() == pytest.approx([0.25])  # what was traced without a device is the prediction itself
    hours = metrics.device_hours(frame)  # 2 GPUs for an hour and 1 device for an hour; 2 GPUs for half an hour
    assert hours.to_dict() == pytest.approx({"ok": 3.0, "oom": 1.0})


def test_times_inside_their_recorded_interval_by_hand() -> None:
    recorded = {"predicted_step_time_s": 1.0, "predicted_step_time_low_s": 0.8, "predicted_step_time_high_s": 1.2}
    older = recorded | {"predicted_step_time_low_s": None, "predicted_step_time_high_s": None}
    frame = rows_of(
        (experiment(), recorded | {"step_time_s": 1.2}),
        (experiment(micro_batch_size=2), recorded | {"step_time_s": 0.79}),
        (experiment(micro_batch_size=4), older | {"step_time_s": 1.0}),
        (experiment(tp=2), recorded | {"outcome": "oom"}),
        (experiment(tp=2), recorded | {"step_time_s": 1.0, "method": "rehearsed"}),  # nothing was measured
    )
    assert metrics.inside_interval(frame) == (1, 2)
    assert metrics.inside_interval(frame.iloc[2:]) == (0, 0)
    said = conclusions.of_predictions(frame)
    assert said is not None and said.endswith(" Inside their predicted interval: 1 of 2 step times.")
    told = conclusions.of_predictions(frame.iloc[2:3])
    assert told is not None and "interval" not in told


def test_labels() -> None:
    assert labels.degrees({"dp": 8, "dp_replicate": 2, "dp_shard": 4, "zero_stage": 3, "tp": 2}) == "dp2×4 z3 tp2"
    assert labels.degrees({"dp": 1, "pp": 4, "pp_schedule": "gpipe", "zero_stage": 0}) == "dp1 pp4 gpipe"
    interleaved = {"dp": 1, "pp": 4, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2.0}
    assert labels.degrees(interleaved) == "dp1 pp4 interleaved 1f1b v2"
    batching = {"micro_batch_size": 2, "num_microbatches": 8, "recompute": "full", "precision": "fp8_rowwise"}
    assert labels.batching(batching) == "mbs 2×8, rc full, fp8 rowwise"
    assert labels.batching({**batching, "recompute_every": 1.0}) == "mbs 2×8, rc full, fp8 rowwise"
    assert labels.batching({**batching, "recompute_every": 3.0}) == "mbs 2×8, rc full every 3, fp8 rowwise"
    assert labels.devices(1, "CPU processes") == "1 CPU process"
    assert labels.devices(8, "GPUs") == "8 GPUs"
    assert format_bytes(1.5 * 2**30) == "1.5 GiB"
    assert format_bytes(None) == "–"
    assert listed(["a", "b", "c"]) == "a, b and c"


def test_sequence_length_is_part_of_the_workload_only_where_it_varies() -> None:
    frame = rows_of((experiment(), {}), (experiment(seq_len=8192), {}), (experiment(model=THREE_B), {}))
    assert frame["workload"].tolist() == ["llama1b, seq 4096", "llama1b, seq 8192", "llama3b"]
    assert labels.workload_order(frame) == ["llama1b, seq 4096", "llama1b, seq 8192", "llama3b"]


def test_median_interval() -> None:
    assert median_interval([]) is None
    assert median_interval([math.nan]) is None
    few = median_interval([3.0, 1.0, math.nan, 2.0])
    assert few is not None
    assert (few.median, few.low, few.high, few.n) == (2.0, None, None, 3)
    many = median_interval([float(i) for i in range(101)])
    assert many is not None
    assert many.low is not None
    assert many.high is not None
    # The 95 % order-statistic interval of the median of 101 values is the 41st to the 61st: 40 to 60.
    assert 38 <= many.low <= 42
    assert 58 <= many.high <= 62
    assert median_interval([float(i) for i in range(101)]) == many
