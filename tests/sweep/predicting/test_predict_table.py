"""``predict`` on tables of any kind: what is read, what is refused and why, what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from results.errors import InvalidResults, UltrasweepError
from results.statistics import grade
from results.tables.schema import ATTEMPTS
from sweep.__main__ import main
from sweep.predicting.codebases import read_clusters
from sweep.predicting.measured_tables import columns_of_attempts
from sweep.predicting.predict_table import OUT, predict_frame, read_table
from tests.workloads.costs.shapes import LLAMA_1B, MIXTRAL
from tests.workloads.predict.tables import random_rows, row
from workloads.costs.memory.estimate import estimate_memory
from workloads.predict.table import COLUMNS
from workloads.spec.experiment import Experiment
from workloads.spec.record import config_columns


def one(**changes: Any) -> pd.Series[Any]:
    """The prediction of one row."""
    predictions = predict_frame(pd.DataFrame([row(**changes)]), None).predictions
    assert tuple(predictions.columns) == OUT
    return predictions.iloc[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "TPU v5e"}, "gpu 'TPU v5e' is not known"),
        ({"gpu": None}, "gpu is not given"),
        ({"gpus": 16}, "dp x tp x pp x cp = 8 x 1 x 1 x 1 = 8, gpus = 16"),
        ({"gpus": 9, "dp": None, "tp": 2}, "does not divide gpus = 9"),
        ({"layers": "many"}, "layers = 'many' is not a number"),
        ({"hidden": None}, "hidden is not given"),
        ({"seq": -1}, "seq = -1 is not a whole number"),
        ({"gbs_seqs": 31}, "dp x mbs x grad_accum = 8 x 2 x 2 = 32, gbs_seqs = 31"),
        ({"mbs": None, "grad_accum": None}, "the batch is not known"),
        ({"pp": 8, "dp": 1, "layers": 4}, "pp 8 is more than the 4 layers"),
        ({"ep": 8}, "no column describes the experts"),
        ({"precision": "fp32"}, "precision 'fp32'"),
        ({"gpu": "A100", "precision": "fp8"}, "has no rate for precision 'fp8'"),
        ({"grad_accum": 1e400}, "grad_accum = inf is not a whole number"),
    ],
)
def test_a_row_of_which_nothing_can_be_said_has_a_reason(changes: dict[str, Any], said: str) -> None:
    found = one(**changes)
    assert found[list(OUT[:-1])].isna().all()
    assert said in found["reason"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": None, "pp": None, "cp": None, "vpp": None, "ep": None},
        {"dp": None},
        {"gpus": None},
        {"grad_accum": None, "gbs_seqs": 32},
        {"mbs": None, "gbs_seqs": 32},
        {"mbs": 2.0, "layers": "32", "hidden": "4,096"},
        {"kv_heads": None, "sharding": "ZeRO-1", "recompute": None},
        {"gpu": "NVIDIA-H200 SXM"},
    ],
)
def test_what_follows_from_the_rest_need_not_be_given(changes: dict[str, Any]) -> None:
    expected = one(**({"kv_heads": 32} if "kv_heads" in changes else {}))["step_time_s"]
    assert one(**changes)["step_time_s"] == pytest.approx(expected)


def test_what_is_taken_for_granted_is_said() -> None:
    found = one(vocab=None, codebase="nobody's")
    assert "no profile of code base" in found["reason"]
    assert "vocab not given" in found["reason"]
    assert found["step_time_low_s"] < found["step_time_s"] < found["step_time_high_s"]


@pytest.mark.parametrize("gpu", ["A100-SXM4-40GB", "A100 80GB", "H100", "H200", "B200", "GB200", "B300", "GB300 NVL72"])
@pytest.mark.parametrize("codebase", ["nanotron", "Megatron-LM", "torchtitan", "llm-foundry", "", "something else"])
def test_devices_and_code_bases(gpu: str, codebase: str) -> None:
    found = one(gpu=gpu, codebase=codebase)
    assert 0.01 < found["step_time_s"] < 100
    assert found["predicted_peak_allocated_bytes"] < found["predicted_peak_reserved_bytes"]


def test_columns_may_stand_in_any_order_and_rows_too() -> None:
    frame = random_rows(30, 0)
    straight = predict_frame(frame, None).predictions
    columns = predict_frame(frame[frame.columns[::-1]], None).predictions
    pd.testing.assert_frame_equal(straight, columns)
    order = np.random.default_rng(0).permutation(len(frame))
    rows = predict_frame(frame.iloc[order].reset_index(drop=True), None).predictions
    pd.testing.assert_frame_equal(straight.iloc[order].reset_index(drop=True), rows)


def test_a_table_without_any_row_or_known_row() -> None:
    assert len(predict_frame(pd.DataFrame(columns=list(COLUMNS)), None).predictions) == 0
    assert predict_frame(pd.DataFrame({"gpu": ["?"]}), None).predictions["step_time_s"].isna().all()


@pytest.mark.slow
def test_calibration_draws_predictions_to_what_was_measured() -> None:
    frame = random_rows(30, 1)
    cold = predict_frame(frame, None).predictions["step_time_s"].astype(float)
    slow = frame.assign(status="ok", step_time_s=2 * cold)
    warm = predict_frame(frame, slow.head(10)).predictions["step_time_s"].astype(float)
    assert abs(np.log(warm / cold / 2)).mean() < 0.5 * np.log(2)
    with pytest.raises(UltrasweepError, match="none of the columns status"):
        predict_frame(frame, frame)
    with pytest.raises(UltrasweepError, match="no row of the calibration"):
        predict_frame(frame, frame.assign(step_time_s="x"))


@pytest.mark.slow
def test_failed_rows_of_a_calibration_have_no_time() -> None:
    frame = random_rows(20, 2)
    cold = predict_frame(frame, None).predictions["step_time_s"].astype(float)
    rows = frame.assign(status=["ok"] * 10 + ["oom"] * 10, step_time_s=[*cold[:10], *(cold[10:] * 100)])
    outcome = predict_frame(frame, rows)
    assert outcome.fitted_on == 10
    assert (outcome.predictions["step_time_s"].astype(float) / cold).max() < 1.5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame([row(), row(gpu="abacus"), row(gpus=3)])
    frame.to_csv(tmp_path / "table.csv", index=False)
    assert main(["predict", str(tmp_path / "table.csv"), "--out", str(tmp_path / "out.parquet")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("row 2: gpu 'abacus' is not known")
    assert said[1].startswith("row 3: dp x tp x pp x cp")
    assert said[-1].endswith("1 of 3 rows predicted")
    written = pd.read_parquet(tmp_path / "out.parquet")
    assert tuple(written.columns) == OUT
    assert written["step_time_s"].notna().tolist() == [True, False, False]
    assert (written["fits"].dtype, written["predicted_peak_reserved_bytes"].dtype) == ("boolean", "Int64")


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("none.csv", None, "no such file"),
        ("empty.csv", "", "cannot be read as a table"),
        ("other.csv", "a,b\n1,2\n", "has none of the columns"),
        ("broken.parquet", "not a table", "cannot be read as a table"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, name: str, contents: str | None, said: str) -> None:
    if contents is not None:
        (tmp_path / name).write_text(contents)
    with pytest.raises(UltrasweepError, match=said):
        read_table(tmp_path / name)


def test_a_result_needs_a_name_that_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pd.DataFrame([row()]).to_csv(tmp_path / "t.csv", index=False)
    assert main(["predict", str(tmp_path / "t.csv"), "--out", str(tmp_path / "x.txt")]) == 2
    assert "must end in .parquet or .csv" in capsys.readouterr().err


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


def test_rows_with_experts_have_a_reason() -> None:
    rows = attempts_of("ultrasweep", count=2)
    routed = Experiment.canonical(model=MIXTRAL, seq_len=4096, global_batch_size=64, dp=8, ep=8, zero_stage=2)
    rows.loc[1, "config_json"] = config_columns(routed)["config_json"]
    found = predict_frame(rows, None).predictions
    assert found["step_time_s"].notna().tolist() == [True, False]
    assert found["reason"].iloc[1] == "models with routed experts cannot be predicted from a table"


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


@pytest.mark.parametrize("code", ["ultrasweep", "nanotron"])
def test_a_word_says_how_many_layers_recompute(code: str) -> None:
    kinds = ("none", "full.every4", "full.every2", "full")
    found = [one(codebase=code, recompute=kind) for kind in kinds]
    times, peaks = ([of[name] for of in found] for name in ("step_time_s", "predicted_peak_allocated_bytes"))
    assert times == sorted(set(times)) and peaks == sorted(set(peaks), reverse=True)
    if code == "nanotron":  # of our engine, whole layers
        assert peaks[2] == pytest.approx((peaks[0] + peaks[3]) / 2, rel=0.1)


def test_a_word_says_what_the_host_does_again() -> None:
    small = {
        "hidden": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 1024,
        "mbs": 1,
        "gbs_seqs": 8,
        "grad_accum": 1,
        "seq": 512,
    }
    kinds = ("none", "norm.every2", "norm", "norm+rope", "selective")
    times = [one(**small, recompute=kind)["step_time_s"] for kind in kinds]
    assert times == sorted(set(times))


def test_memory_of_rows_that_are_no_layout_of_our_engine_is_that_of_any_code_base() -> None:
    assert one(heads=24, tp=8, dp=1, kv_heads=1)["predicted_peak_allocated_bytes"] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sharding": "zero9"}, "sharding 'zero9' is not known: taken as zero"),
        ({"recompute": "most"}, "recompute 'most' is not known: taken as none"),
        ({"recompute": "full.every0"}, "recompute 'full.every0' is not known: taken as full in every layer"),
        ({"precision": "int4"}, "precision 'int4' is not known: taken as 16 bits"),
        ({"precision": ""}, "precision not given: 16 bits"),
        ({"sharding": None, "codebase": "megatron"}, "sharding not given: zero"),
    ],
)
def test_words_that_are_not_known_are_said(changes: dict[str, Any], said: str) -> None:
    assert said in one(**changes)["reason"]
    assert pd.isna(one()["reason"])


def test_a_table_is_not_written_over_and_columns_nobody_reads_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    pd.DataFrame([{**row(), "recomput": "full"}]).to_csv(table, index=False)
    before = table.read_text()
    assert main(["predict", str(table), "--out", str(table)]) == 2
    assert "is an input table and would be overwritten" in capsys.readouterr().err
    assert table.read_text() == before
    assert main(["predict", str(table), "--out", str(tmp_path / "out.csv")]) == 0
    assert "ignored columns: recomput" in capsys.readouterr().out


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
