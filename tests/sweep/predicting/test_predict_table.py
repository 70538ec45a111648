"""``predict`` on tables of any kind: what is read, what is refused and why, what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from results.errors import UltrasweepError
from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.predicting.predict_table import OUT, predict_frame, read_table
from tests.sweep.predicting.predicted import EXPERTS, one
from tests.workloads.predict.tables import random_rows, row
from workloads.predict.table import COLUMNS


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
        ({"ep": 8}, "ep 8, but no experts: give num_experts, experts_per_token and expert_ffn"),
        ({"ep": 3, **EXPERTS}, "ep 3 does not divide num_experts 8"),
        ({"num_experts": 8}, "the experts are described in part: experts_per_token and expert_ffn not given"),
        ({**EXPERTS, "experts_per_token": 9}, "experts_per_token 9 is more than num_experts 8"),
        ({**EXPERTS, "dense_layers": 32}, "dense_layers 32 leaves no layer with experts of 32 layers"),
        ({**EXPERTS, "gated_mlp": "no"}, "experts without a gate"),
        ({"kv_heads": 5}, "kv_heads 5 does not divide heads = 32"),
        ({"cluster": "h100"}, "cluster 'h100' is not known; known: a100_40gb"),
        ({"gpu": "A100", "cluster": "h200"}, "gpu 'A100' is not the device of cluster h200 (NVIDIA H200)"),
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


def test_measurements_that_are_not_understood_are_said() -> None:
    rows = pd.DataFrame([{**row(), "status": word, "step_time_s": 1.5} for word in ("ok", "passed", "other")])
    found = predict_frame(rows.drop(columns=["status", "step_time_s"]), rows.assign(reserved_gib=["", "~60", "60"]))
    assert found.mistakes == (
        "calibration row 2: status 'passed' is not known, so it is not used; known: ok, oom, other",
        "calibration row 2: reserved_gib = '~60' is not a number, so it is not used",
    )
    assert found.fitted_on == 1


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


def test_memory_of_rows_that_are_no_layout_of_our_engine_is_that_of_any_code_base() -> None:
    assert one(heads=24, tp=8, dp=1, kv_heads=1)["predicted_peak_allocated_bytes"] > 0


def test_a_cluster_of_the_users_own_describes_a_device_that_does_not_ship(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "quad.yaml").write_text(
        "defaults: [h200, _self_]\nname: quad\ndevices_per_node: 4\n"
        "device: {name: NVIDIA H100 NVL, driver_names: [], memory_bytes: 96e9, memory_bandwidth: 4 TB/s, "
        "peak_flops: {bf16: 989e12}, source: test}\n"
    )
    frame = pd.DataFrame([row(gpu="H100 NVL"), row(gpu=None, cluster="quad")])
    said = predict_frame(frame, None, ConfFolders((tmp_path,))).predictions
    assert said["step_time_s"].nunique() == 1 and said["step_time_s"].notna().all()
    assert said["step_time_s"].iloc[0] > one(gpu="H200")["step_time_s"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"cluster/quad\.yaml is empty; a cluster begins for example with defaults: \[h200, _self_\]"),
        (
            "backend: cpu",
            r"cluster quad: name, device, devices_per_node, intra_node must be .* \(.*cluster/quad\.yaml\)",
        ),
    ],
)
def test_an_own_cluster_without_a_name_is_told_by_its_file(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "quad.yaml").write_text(text)
    with pytest.raises(UltrasweepError, match=said):
        predict_frame(pd.DataFrame([row()]), None, ConfFolders((tmp_path,)))


def test_a_degree_that_follows_from_the_number_of_devices_is_told() -> None:
    assert (
        "cp not given: 2, with which the degrees multiply to gpus = 8"
        in one(gpus=8, dp=4, tp=1, pp=1, cp=None)["reason"]
    )
    for known in ({"dp": 4, "cp": 2}, {"dp": 8}, {"dp": None}):
        assert "cp not given" not in str(one(gpus=8, **{"tp": 1, "pp": 1, "cp": None, **known})["reason"])


LARGE = {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, "gpus": 2048, "dp": 16, "tp": 8, "pp": 16}


def test_embedding_and_loss_count_as_layers_where_the_code_base_does_so() -> None:
    layout = {**LARGE, "mbs": 1, "grad_accum": 16, "sharding": "zero1"}
    found = one(**layout, vpp=8, codebase="megatron")
    assert found["step_time_s"] > 0
    assert "126 layers on 128 chunks: embedding and loss counted as layers" in found["reason"]
    refused = one(**layout, vpp=9, codebase="megatron")["reason"]
    assert "16 x 9 = 144 is more than the 128 layers, with embedding and loss counted" in refused
    assert "16 x 8 = 128 is more than the 126 layers" in one(**layout, vpp=8)["reason"]


def test_a_code_base_that_fills_stages_in_order_may_leave_some_empty() -> None:
    layout = {"layers": 28, "hidden": 3072, "heads": 32, "ffn": 8192, "gpus": 128, "dp": 1, "tp": 4, "pp": 32}
    assert one(**layout, grad_accum=256, codebase="nanotron")["step_time_s"] > 0
    assert "pp 32 is more than the 28 layers" in one(**layout, grad_accum=256, codebase="ultrasweep")["reason"]


def test_no_more_micro_batches_are_in_flight_than_there_are() -> None:
    """Four of them: their activations on the first stage are the same for any number of chunks."""
    layout = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384, "gpus": 4, "dp": 1, "pp": 4}
    layout |= {"mbs": 1, "codebase": "megatron", "sharding": "zero0", "gated_mlp": False}

    def gib(vpp: int, micro_batches: int) -> float:
        return float(one(**layout, vpp=vpp, grad_accum=micro_batches)["predicted_peak_allocated_bytes"]) / 2**30

    assert gib(2, 4) == pytest.approx(gib(1, 4))
    assert gib(8, 4) < 1.1 * gib(1, 4)  # the last stage, with the logits, now holds nearly four, too
    assert gib(1, 64) < gib(8, 64) < gib(2, 64)  # p + (p - 1) / v, in micro-batches


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
