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
from sweep.composing.conffiles import ConfFolders
from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from sweep.predicting.measured_tables import columns_of_attempts
from sweep.predicting.predict_table import OUT, predict_frame, read_table
from tests.workloads.costs.shapes import DEEPSEEK_V2_LITE, LLAMA_1B, MIXTRAL
from tests.workloads.predict.tables import random_rows, row
from workloads.costs.memory.estimate import estimate_memory
from workloads.predict.table import COLUMNS
from workloads.predict.words import recomputed_of, zero_of
from workloads.spec.experiment import Experiment
from workloads.spec.record import config_columns

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 4096}


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


@pytest.mark.slow
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
        ({"sharding": "zero9"}, "sharding 'zero9' is not known; known: zero0 to zero3"),
        ({"sharding": "fsdp=1"}, "sharding 'fsdp=1' is not known"),  # a switch or a degree
        ({"sharding": "no zero3"}, "sharding 'no zero3' is not known"),
        ({"recompute": "most"}, "recompute 'most' is not known; known: none, selective, full"),
        ({"recompute": "not full"}, "recompute 'not full' is not known"),
        ({"recompute": "full.every0"}, "recompute 'full.every0' is not known"),
        ({"precision": "int4"}, "precision 'int4' is not known; known: bf16"),
        ({"precision": "nvfp4", "gpu": "B200"}, "precision 'nvfp4': no device here has a known rate in 4 bits"),
        ({"precision": "bf16 + mxfp4", "gpu": "B200"}, "no device here has a known rate in 4 bits"),
        ({"attention_kernel": "warp"}, "attention_kernel 'warp' is not known; known: flash, flash2"),
        ({"gated_mlp": "maybe"}, "gated_mlp = 'maybe' is neither true nor false"),
        ({"tie_embeddings": "perhaps"}, "tie_embeddings = 'perhaps' is neither true nor false"),
        ({"gpu": "GH200"}, "a GH200 is no H200"),
        ({"gpu": "NVIDIA GH200 144G HBM3e"}, "a GH200 is no H200"),
        ({"gpu": "H100 PCIe"}, "cards for PCIe have lower rates"),
        ({"gpu": "H200 NVL"}, "NVL cards have other rates"),
        ({"gpu": "H100 96GB"}, "an H100 with 80 GB is described, none with 96 GB"),
        ({"gpu": "H1000"}, "gpu 'H1000' is not known"),
        ({"gpu": "H100 turbo"}, "gpu 'H100 turbo': 'turbo' is not known"),
    ],
)
def test_a_word_that_is_not_understood_refuses_its_row(changes: dict[str, Any], said: str) -> None:
    found = one(**changes)
    assert said in found["reason"]
    assert found[list(OUT[:-1])].isna().all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": ""}, "precision not given: 16 bits"),
        ({"precision": "fp8?"}, "precision 'fp8?' is not certain: taken as fp8"),
        ({"sharding": None, "codebase": "megatron"}, "sharding not given: zero"),
        ({"sharding": "hsdp"}, "sharding 'hsdp': taken as zero3 over all data-parallel ranks"),
        ({"tie_embeddings": ""}, "tie_embeddings not given: false"),
        ({"kv_heads": None}, "kv_heads not given: 32, as many as heads"),
        ({"codebase": None}, "codebase not given"),
        ({"vpp": 2}, "vpp 2 without a pipeline: taken as 1"),
        ({"allreduce_gb_s": "fast"}, "allreduce_gb_s = 'fast' is not a number above 0: ignored"),
        ({"codebase": "megatron"}, "gated_mlp not given: true, since kv_heads < heads"),
        ({"codebase": "megatron", "kv_heads": 32, "ffn": 16384}, "gated_mlp not given: false, since ffn is 4 x hidden"),
        ({"gpu": "H800"}, "H100 with NVLink of 400 instead of 900 GB/s"),
        ({"gpu": "GH200", "cluster": "h200"}, "gpu 'GH200': taken as the NVIDIA H200 of cluster h200"),
        ({"power_w": 900}, "power_w 900: ignored, above the usual 700 W"),
        ({"attention_kernel": "flash2", "gpu": "B200"}, "its rate on NVIDIA B200 is not known, that of flash is taken"),
        (
            {"gpu": "H100", "gpus": 16, "dp": 16},
            "cluster not given: h100_efa, 22.5 GB/s a device between nodes (h100_ib400 has 50)",
        ),
        ({**EXPERTS, "ep": 8}, "shared_experts not given: 0; dense_layers not given: 0"),
    ],
)
def test_what_a_row_does_not_say_is_said(changes: dict[str, Any], said: str) -> None:
    found = one(**changes)
    assert said in found["reason"] and found["step_time_s"] > 0
    assert pd.isna(one()["reason"])


def test_whole_words_of_sharding_and_recomputation() -> None:
    """``fsdp=0`` and ``no fsdp`` hold the word fsdp and mean that there is none."""
    stages = {
        0: ("zero0", "none", "ddp", "distributed data parallel", "fsdp=0", "no fsdp", "fsdp: off", "no_shard", "0"),
        1: ("zero-1", "ZeRO: 1", "distributed optimizer", "dist_opt", "1"),
        2: ("ZeRO stage 2", "shard_grad_op", "fsdp (zero2)"),
        3: ("zero3", "fsdp", "FSDP2", "fsdp=8", "full_shard", "3.0"),
    }
    note: list[str] = []
    for stage, cells in stages.items():
        assert {zero_of(cell, 0, note) for cell in cells} == {stage}, stage
    kinds = {
        0: ("none", "no checkpointing", "off", "0"),
        1: ("selective", "norm+swiglu", "selective (core_attn, moe_act)", "selective+mla_up+experts"),
        2: ("full", "full.every2", "True", "activation checkpointing", "block"),
    }
    for kind, cells in kinds.items():
        assert {recomputed_of(cell, note).kind for cell in cells} == {kind}, kind
    assert note == []


@pytest.mark.slow
def test_columns_say_what_the_profile_of_a_code_base_would_guess() -> None:
    def time(**changes: Any) -> float:
        return float(one(**{"codebase": "megatron", "gpu": "H100", **changes})["step_time_s"])

    assert time(gated_mlp=False) < 0.9 * time() == pytest.approx(0.9 * time(gated_mlp="yes"))
    long = {"seq": 32768, "mbs": 1}
    newest, second, stored = (time(**long, attention_kernel=kernel) for kernel in ("cudnn", "FA2", "eager"))
    assert newest < second < stored
    assert time(power_w=700) == time() < time(power_w=350) < 1.3 * time()
    wide = {"gpu": None, "gpus": 64, "dp": 8, "tp": 8, "sharding": "zero2"}
    assert time(**wide, cluster="h100_ib400") < time(**wide, cluster="h100_efa")
    linked = {"tp": 8, "dp": 1}
    assert time(**linked, gpu="H800") > 1.05 * time(**linked, gpu="H100")
    assert time(gpu="H20") > 5 * time()


def test_a_cluster_of_the_users_own_describes_a_device_that_does_not_ship(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "quad.yaml").write_text(
        "defaults: [h200, _self_]\nname: quad\ndevices_per_node: 4\n"
        "device: {name: NVIDIA GH200 96GB, driver_names: [], memory_bytes: 96e9, memory_bandwidth: 4 TB/s, "
        "peak_flops: {bf16: 989e12}, source: test}\n"
    )
    frame = pd.DataFrame([row(gpu="GH200 96GB"), row(gpu=None, cluster="quad")])
    said = predict_frame(frame, None, ConfFolders((tmp_path,))).predictions
    assert said["step_time_s"].nunique() == 1 and said["step_time_s"].notna().all()
    assert said["step_time_s"].iloc[0] > one(gpu="H200")["step_time_s"]


LARGE = {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, "gpus": 2048, "dp": 16, "tp": 8, "pp": 16}


def test_embedding_and_loss_count_as_layers_where_the_code_base_does_so() -> None:
    layout = {**LARGE, "mbs": 1, "grad_accum": 16, "sharding": "zero1"}
    found = one(**layout, vpp=8, codebase="megatron")
    assert found["step_time_s"] > 0
    assert "126 layers on 128 chunks: embedding and loss counted as layers" in found["reason"]
    refused = one(**layout, vpp=9, codebase="megatron")["reason"]
    assert "16 x 9 = 144 is more than the 128 layers, with embedding and loss counted" in refused
    assert "16 x 8 = 128 is more than the 126 layers" in one(**layout, vpp=8)["reason"]


def test_no_more_micro_batches_are_in_flight_than_there_are() -> None:
    """Four of them: their activations on the first stage are the same for any number of chunks."""
    layout = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 16384, "gpus": 4, "dp": 1, "pp": 4}
    layout |= {"mbs": 1, "codebase": "megatron", "sharding": "zero0", "gated_mlp": False}

    def gib(vpp: int, micro_batches: int) -> float:
        return float(one(**layout, vpp=vpp, grad_accum=micro_batches)["predicted_peak_allocated_bytes"]) / 2**30

    assert gib(2, 4) == pytest.approx(gib(1, 4))
    assert gib(8, 4) < 1.1 * gib(1, 4)  # the last stage, with the logits, now holds nearly four, too
    assert gib(1, 64) < gib(8, 64) < gib(2, 64)  # p + (p - 1) / v, in micro-batches


def test_experts_in_columns_are_predicted_as_a_plan_predicts_them() -> None:
    """At equal rates: the same closed form, times the same ratio of structures."""
    moe = MIXTRAL.moe
    assert moe is not None
    shape = {"layers": MIXTRAL.num_layers, "hidden": MIXTRAL.hidden_size, "heads": MIXTRAL.num_heads}
    shape |= {"kv_heads": MIXTRAL.num_kv_heads, "ffn": MIXTRAL.ffn_hidden_size, "vocab": MIXTRAL.vocab_size}
    experts = {"num_experts": moe.num_experts, "experts_per_token": moe.experts_per_token, "shared_experts": 0}
    experts |= {"expert_ffn": moe.expert_hidden_size, "dense_layers": 0, "tie_embeddings": MIXTRAL.tie_embeddings}
    found = one(**shape, **experts, ep=8, grad_accum=4, sharding="zero2")
    planned = Experiment.canonical(
        model=MIXTRAL, seq_len=4096, global_batch_size=64, micro_batch_size=2, dp=8, ep=8, zero_stage=2
    )
    [expected] = Forecast.of(read_clusters()["h200"]).times([planned])
    assert expected is not None and pd.isna(found["reason"])
    assert found["step_time_s"] == pytest.approx(expected.step_time_s, rel=1e-6)
    assert found["step_time_high_s"] == pytest.approx(expected.high_s, rel=1e-6)
    workspace = read_clusters()["h200"].device.workspace_bytes
    assert found["predicted_peak_allocated_bytes"] == estimate_memory(planned).peak_bytes + workspace
    other = one(**shape, **experts, ep=8, grad_accum=4, sharding="zero2", codebase="megatron")
    assert 0.5 < other["predicted_peak_allocated_bytes"] / found["predicted_peak_allocated_bytes"] < 2


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
