"""``predict`` on rows of sweeps: our engine is predicted as a plan predicts it, another one by its own rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from results.errors import InvalidResults
from results.statistics import grade
from results.tables.schema import ATTEMPTS
from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from sweep.predicting.measured_tables import columns_of_attempts, has_more_than_columns, measured_attempts
from sweep.predicting.predict_table import OUT, predict_frame
from tests.sweep.predicting.predicted import one
from tests.workloads.costs.shapes import DEEPSEEK_V2_LITE, LLAMA_1B, MIXTRAL
from tests.workloads.predict.tables import row
from workloads.costs.memory.estimate import estimate_memory
from workloads.predict.probed import LAUNCH_S, USUAL_LAUNCH
from workloads.spec.experiment import Experiment, from_json
from workloads.spec.record import config_columns


def attempts_of(engine: str, factor: float = 1.0, count: int = 12) -> pd.DataFrame:
    """Finished rows of one engine as a sweep writes them, each ``factor`` times as long as ours is predicted."""
    layouts = [(dp, zero, rate) for dp in (2, 4, 8) for zero in (0, 2) for rate in ("none", "full")][:count]
    experiments = [
        Experiment.canonical(
            model=LLAMA_1B,
            seq_len=4096,
            global_batch_size=64,
            dp=dp,
            zero_stage=zero,
            recompute=recompute,
            engine=engine,
        )
        for dp, zero, recompute in layouts
    ]
    rows = [
        dict.fromkeys(ATTEMPTS.names)
        | config_columns(experiment)
        | {"method": "measured", "outcome": "ok", "device_name": "NVIDIA H200", "step_time_s": 1.0}
        for experiment in experiments
    ]
    frame = pd.DataFrame(rows)
    ours = predict_frame(columns_of_attempts(frame.assign(engine="ultrasweep")), None).predictions
    return frame.assign(step_time_s=factor * ours["step_time_s"].astype(float))


def test_rows_of_a_sweep_are_a_table_and_our_engine_needs_no_calibration() -> None:
    rows = attempts_of("ultrasweep")
    for table in (rows, rows.drop(columns="host_launch_s")):  # rows of older versions have no such column
        found = predict_frame(table, None).predictions
        assert found["step_time_s"].astype(float).tolist() == pytest.approx(rows["step_time_s"].tolist())


@pytest.mark.slow(seconds=4)
def test_another_engine_is_predicted_only_once_its_own_rows_are_there() -> None:
    theirs, ours = attempts_of("torchtitan", 2.0), attempts_of("ultrasweep")
    for calibration in (None, ours):
        found = predict_frame(theirs, calibration)
        assert found.predictions[list(OUT[:-1])].isna().all(axis=None)
        assert set(found.predictions["reason"]) == {"engine torchtitan is unknown: --calibrate with rows that it ran"}
        assert len(found.mistakes) == len(theirs)
    fitted = (
        predict_frame(pd.concat([theirs, ours], ignore_index=True), theirs).predictions["step_time_s"].astype(float)
    )
    assert fitted[: len(theirs)].tolist() == pytest.approx(theirs["step_time_s"].tolist(), rel=0.1)
    assert fitted[len(theirs) :].tolist() == pytest.approx(ours["step_time_s"].tolist())  # theirs say nothing of ours


def test_rows_of_a_sweep_with_experts_are_predicted_and_with_latents_refused() -> None:
    rows = attempts_of("ultrasweep", count=3)
    for place, model in ((1, MIXTRAL), (2, DEEPSEEK_V2_LITE)):
        routed = Experiment.canonical(model=model, seq_len=4096, global_batch_size=64, dp=8, ep=8, zero_stage=2)
        rows = rows.assign(
            **{
                name: [*rows[name][:place], value, *rows[name][place + 1 :]]
                for name, value in config_columns(routed).items()
            }
        )
    found = predict_frame(rows, None).predictions
    assert found["step_time_s"].notna().tolist() == [True, True, False]
    assert found["step_time_s"][1] > 1.5 * found["step_time_s"][0]
    assert found["reason"].iloc[2] == "models with latent attention cannot be predicted from a table"


MORE_THAN_COLUMNS = (
    {"documents": "lognormal mean=1500.0 sigma=1.2 seed=7"}, {"optimizer": "muon"}, {"optimizer_states": "bf16"},
    {"optimizer_offload": 0.5}, {"activation_offload": "all"},
)  # fmt: skip


@pytest.mark.parametrize("more", MORE_THAN_COLUMNS, ids=lambda more: next(iter(more)))
def test_rows_of_a_sweep_with_more_than_columns_say_do_not_calibrate(more: dict[str, Any]) -> None:
    """A step that also moves its states to the host is no slow plain step."""
    rows = attempts_of("ultrasweep", count=2)
    experiment = from_json(rows["config_json"][1])
    odd = config_columns(dataclasses.replace(experiment, **more))
    rows = rows.assign(**{name: [rows[name][0], value] for name, value in odd.items()})
    assert has_more_than_columns(rows).tolist() == [False, True]
    assert measured_attempts(rows)["experiment_id"].tolist() == [rows["experiment_id"][0]]
    reasons = predict_frame(rows, None).predictions["reason"]
    assert pd.isna(reasons[0]) and reasons[1].startswith("taken as a plain step: packed documents")


def test_memory_of_our_engine_is_that_of_a_plan() -> None:
    """From columns, and from rows of a sweep, whose configuration says more than columns can."""
    cluster = read_clusters()["h200"]
    said = predict_frame(pd.DataFrame([row(1), row(1, recompute="full", pp=2, dp=4, vpp=2)]), None).predictions
    whole = {"model": LLAMA_1B, "zero_stage": 1, "micro_batch_size": 2, "seq_len": 4096}
    plain = Experiment.canonical(dp=8, global_batch_size=32, **whole)
    staged = Experiment.canonical(
        dp=4, pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, recompute="full", global_batch_size=16, **whole
    )
    for experiment, found in zip((plain, staged), said["predicted_peak_allocated_bytes"], strict=True):
        assert found == estimate_memory(experiment).peak_bytes + cluster.device.workspace_bytes
    odd = Experiment.canonical(dp=8, global_batch_size=32, recompute="norm+swiglu", **whole)
    rows = attempts_of("ultrasweep", count=1).assign(**{name: [value] for name, value in config_columns(odd).items()})
    found = predict_frame(rows, None).predictions.iloc[0]
    assert found["predicted_peak_allocated_bytes"] == estimate_memory(odd).peak_bytes + cluster.device.workspace_bytes
    assert found["fits"] and found["predicted_peak_reserved_bytes"] > found["predicted_peak_allocated_bytes"]


def test_experts_in_columns_are_predicted_as_a_plan_predicts_them() -> None:
    """At equal rates: the same closed form, times the same ratio of structures."""
    moe = MIXTRAL.moe
    assert moe is not None
    shape = {"layers": MIXTRAL.num_layers, "hidden": MIXTRAL.hidden_size, "heads": MIXTRAL.num_heads}
    shape |= {"kv_heads": MIXTRAL.num_kv_heads, "ffn": MIXTRAL.ffn_hidden_size, "vocab": MIXTRAL.vocab_size}
    experts = {"num_experts": moe.num_experts, "experts_per_token": moe.experts_per_token, "shared_experts": 0}
    experts |= {"expert_ffn": moe.expert_hidden_size, "dense_layers": 0, "tie_embeddings": MIXTRAL.tie_embeddings}
    usual_host = USUAL_LAUNCH * LAUNCH_S
    found = one(**shape, **experts, ep=8, grad_accum=4, sharding="zero2", host_launch_s=usual_host)
    layout = {"seq_len": 4096, "global_batch_size": 64, "micro_batch_size": 2, "dp": 8, "ep": 8, "zero_stage": 2}
    planned, usual = (Experiment.canonical(model=MIXTRAL, **layout, cuda_graph=graph) for graph in ("none", "auto"))
    expected, without_host = Forecast.of(read_clusters()["h200"]).times([planned, usual])
    assert expected is not None and without_host is not None and pd.isna(found["reason"])
    captured = one(**shape, **experts, ep=8, grad_accum=4, sharding="zero2", code_version="engine 4 captured")
    assert captured["step_time_s"] == pytest.approx(without_host.step_time_s, rel=1e-6)
    assert captured["step_time_s"] < found["step_time_s"] * (1 - 2e-6)
    assert found["step_time_s"] == pytest.approx(expected.step_time_s, rel=1e-6)
    assert found["step_time_high_s"] == pytest.approx(expected.high_s, rel=1e-6)
    workspace = read_clusters()["h200"].device.workspace_bytes
    assert found["predicted_peak_allocated_bytes"] == estimate_memory(planned).peak_bytes + workspace
    other = one(**shape, **experts, ep=8, grad_accum=4, sharding="zero2", codebase="megatron")
    assert 0.5 < other["predicted_peak_allocated_bytes"] / found["predicted_peak_allocated_bytes"] < 2


def test_predictions_of_a_sweep_are_graded_by_their_ids() -> None:
    """Whatever their order; without ids they are refused, as nothing says which row is which."""
    attempts = attempts_of("ultrasweep")
    said = predict_frame(attempts, None).predictions
    assert said["experiment_id"].tolist() == attempts["experiment_id"].tolist()
    attempts["started_at"] = pd.date_range("2026-01-01", periods=len(attempts), freq="-1h", tz="UTC")
    points = grade.measured_points(attempts.assign(cluster="h200", measurement_version=1))
    straight = grade.pairs_of_predictions(said, points)
    turned = grade.pairs_of_predictions(said.iloc[::-1].reset_index(drop=True), points)
    pd.testing.assert_frame_equal(straight, turned)
    with pytest.raises(InvalidResults, match="no experiment_id"):
        grade.pairs_of_predictions(said.drop(columns="experiment_id"), points)
