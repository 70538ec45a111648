"""``import ultrasweep``: the answers are those of the commands, and so are the messages about mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ultrasweep

from docs.tools.python_interface import undocumented
from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.composing.conffiles import PACKAGED
from workloads.spec.experiment import from_json
from workloads.spec.experiment_values import FIELDS

pytestmark = pytest.mark.drawn(one_in=2)

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "results" / "recorded" / "h200x2_schedules"
EXAMPLES = re.findall(
    r"```python\n(.*?)```\n\nIt prints:\n\n```\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL
)
NUMBER = re.compile(r"[\d,]*\.?\d+")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder without measured rows, which predictions would use."""
    monkeypatch.chdir(tmp_path)


def command(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert main(words) == code
    told = capsys.readouterr()
    return told.out if code == 0 else told.err


def test_everything_of_the_interface_is_explained() -> None:
    assert undocumented() == []
    assert sorted(ultrasweep.__all__) == ultrasweep.__all__
    assert all(isinstance(getattr(ultrasweep, name), Callable | type) for name in ultrasweep.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples_print_what_their_page_says(example: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, kept = EXAMPLES[example]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == kept


def test_the_page_has_examples() -> None:
    functions = {"advise", "load", "memory", "plan", "predict"}
    assert {name for code, _ in EXAMPLES for name in re.findall(r"ultrasweep\.([a-z]+)\(", code)} == functions


# plan


@pytest.mark.slow
def test_a_plan_is_the_ledger_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+grid=llama8b_8gpu", "model=llama3b", "cluster=h100_ib400", "grid.axes.tp=[1,2]", "plan.oom_margin=1.2"]
    where = "predicted_peak_bytes < 60e9"
    printed = command(["plan", *words, "--where", where, "--out", str(tmp_path / "plan.parquet")], capsys)
    plan = ultrasweep.plan(
        "llama8b_8gpu",
        model="llama3b",
        cluster="h100_ib400",
        axes={"tp": [1, 2]},
        where=where,
        overrides={"plan.oom_margin": 1.2},
    )
    ledger = read_ledger(tmp_path / "plan.parquet").to_pandas()
    pd.testing.assert_frame_equal(plan.points, ledger[plan.points.columns], check_dtype=False)
    assert plan.facts["points"] == len(ledger) and f"{len(ledger):,} points" in printed
    assert {verdict: count for verdict, count in plan.facts["verdicts"].items() if count} == (
        ledger["verdict"].value_counts().to_dict()
    )
    assert all(one.rpartition("-")[2] in printed for one in plan.fastest["experiment_id"])
    assert plan.fastest["predicted_tokens_per_s_per_gpu"].max() == ledger["predicted_tokens_per_s_per_gpu"].max()


def test_what_is_not_predicted_is_null() -> None:
    plan = ultrasweep.plan("tiny")
    assert plan.points["predicted_step_time_s"].isna().all()
    assert plan.facts["expected_gpu_hours"] is None
    assert len(plan.fastest) > 0 and plan.fastest["predicted_mfu"].isna().all()


def test_a_model_is_the_path_of_its_config(tmp_path: Path) -> None:
    published = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": False, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"], "rope_theta": 1e4, "max_position_embeddings": 512,
    }  # fmt: skip
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published))
    named = {
        str(ultrasweep.plan("one_point", model=path, cluster="cpu").points["model"].iloc[0])
        for path in (folder / "config.json", "own/config.json", Path("own"))
    }
    assert len(named) == 1 and "own" in named.pop()


# advise


@pytest.mark.slow
def test_advice_is_the_table_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama8b", "cluster=h200", "gpus=[4,8]", "tp=[1,2]", "global_batch_size=256"]
    printed = " ".join(command(["advise", *words, "--top", "3"], capsys).split())
    advice = ultrasweep.advise("llama8b", "h200", [4, 8], global_batch_size=256, top=3, overrides={"tp": [1, 2]})
    assert advice.layouts["gpus"].tolist() == [4] * 3 + [8] * 3 and advice.layouts["place"].tolist() == [1, 2, 3] * 2
    assert set(advice.layouts["tp"]) <= {1, 2} and len(advice.goal) == 0
    for row in advice.layouts.itertuples():
        between = f"{row.predicted_tokens_per_s_per_gpu_low:,.0f} to {row.predicted_tokens_per_s_per_gpu_high:,.0f}"
        assert f"{row.predicted_tokens_per_s_per_gpu:,.0f} {between}" in printed
        assert f"{100 * row.predicted_mfu:.1f} {row.predicted_peak_bytes / 2**30:.1f}" in printed
        assert from_json(row.config_json).world_size == row.gpus
    shares = advice.layouts[["work_share", "pipeline_share", "traffic_share", "optimizer_share"]]
    assert shares.sum(axis=1).to_numpy() == pytest.approx(1)
    assert advice.facts["search_command"] in printed
    assert f"{advice.facts['allowed_layouts']:,} layouts obey the rules" in printed
    for row in advice.sizes.itertuples():
        assert f"{row.gpus} GPUs: the fastest that fit, {row.layouts_timed:,} layouts timed" in printed


@pytest.mark.slow
def test_a_goal_is_the_table_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama1b", "cluster=h200", "gpus=8-32", "tokens=1e11", "days=5", "price=2.5"]
    printed = " ".join(command(["advise", *words], capsys).split())
    advice = ultrasweep.advise("llama1b", "h200", "8-32", tokens=1e11, days=5, price=2.5)
    assert len(advice.layouts) == len(advice.sizes) == 0 and len(advice.goal) > 0
    for row in advice.goal.itertuples():
        name = "least money" if row.choice == "cheapest" else row.choice
        assert f"{name} {row.gpus:,} {row.days:.3g} {row.days_low:.3g} to {row.days_high:.3g}" in printed
        assert row.price == pytest.approx(2.5 * row.gpu_hours)


def test_an_objective_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama1b", "cluster=h200", "gpus=[8,16]", "tp=1", "pp=1", "cp=1", "global_batch_size=64"]
    document = json.loads(command(["advise", *words, "--optimise", "energy", "--top", "3", "--json"], capsys))
    narrowed = {"tp": 1, "pp": 1, "cp": 1}
    asked = {"global_batch_size": 64, "top": 3, "optimise": "energy", "overrides": narrowed}
    advice = ultrasweep.advise("llama1b", "h200", [8, 16], **asked)
    name = "predicted_energy_per_token_at_most_j"
    assert advice.layouts[name].tolist() == [one[name] for one in document["layouts"]]
    cautious = advice.layouts["predicted_step_time_cautious_s"] * advice.layouts["world_size"]
    assert cautious.is_monotonic_increasing and advice.layouts["place"].tolist() == [1, 2, 3]
    assert advice.facts["optimise"] == document["optimise"] == "energy"


# memory


@pytest.mark.slow
def test_memory_of_a_row_is_that_of_the_plan() -> None:
    plan = ultrasweep.plan("llama8b_8gpu", axes={"pp": 2, "dp_shard": 4, "dp_replicate": 1, "tp": 1})
    for row in plan.points.head(4).to_dict("records"):
        found = ultrasweep.memory(row, cluster="h200")
        assert (found.experiment_id, found.peak_bytes) == (row["experiment_id"], row["predicted_peak_bytes"])
        assert found.limit_bytes == row["limit_bytes"] and found.fits == (found.peak_bytes <= found.limit_bytes)
        assert found.stages.index.tolist() == [0, 1]
        assert found.stages["peak_bytes"].max() + (found.workspace_bytes or 0) == found.peak_bytes
        parts = found.stages.drop(columns="peak_bytes").sum(axis=1)
        assert (parts == found.stages["peak_bytes"]).all()
        assert ultrasweep.memory(pd.Series(row)).experiment_id == row["experiment_id"]


def test_memory_of_fields_is_that_of_the_grid_of_one_point() -> None:
    fields = {"model": "llama1b", "dp_shard": 2, "zero_stage": 3, "global_batch_size": 4, "recompute": "full"}
    axes = {name: value for name, value in fields.items() if name != "model"}
    (planned,) = ultrasweep.plan("one_point", model="llama1b", axes=axes).points.to_dict("records")
    found = ultrasweep.memory(fields)
    assert found.experiment_id == planned["experiment_id"]
    assert (found.workspace_bytes, found.limit_bytes, found.fits) == (None, None, None)
    assert ultrasweep.memory(fields, cluster="h200").peak_bytes == planned["predicted_peak_bytes"]


@pytest.mark.parametrize("change", [{"micro_batch_size": 2}, {"model": "llama1b"}, {"dp_shard": 4}])
def test_a_row_with_another_value_is_another_layout(change: Mapping[str, Any]) -> None:
    fields = {"model": "llama3b", "dp_shard": 2, "zero_stage": 3, "global_batch_size": 8}
    axes = {name: value for name, value in fields.items() if name != "model"}
    row = ultrasweep.plan("one_point", model="llama3b", axes=axes).points.iloc[0]
    changed = ultrasweep.memory({**row, **change})
    assert changed.peak_bytes != ultrasweep.memory(row).peak_bytes
    assert changed.experiment_id == ultrasweep.memory({**fields, **change}).experiment_id


@pytest.mark.slow
def test_columns_of_recorded_rows_are_those_of_their_configuration() -> None:
    """So that a value of a row that differs from its configuration is one that a user has set."""
    rows = ultrasweep.load(ROOT / "results" / "recorded").attempts.drop_duplicates("experiment_id")
    assert len(rows) > 1_000
    for row in rows.to_dict("records"):
        experiment = from_json(row["config_json"])
        names = [name for name in FIELDS if name in row and name != "model" and not pd.isna(row[name])]
        assert [name for name in names if row[name] != getattr(experiment, name)] == []


# load and predict


@pytest.mark.slow
def test_rows_and_their_predictions_are_those_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ultrasweep.load(RECORDED)
    assert results.sweeps == ("h200x2_schedules",) and len(results.attempts) == 11
    out = tmp_path / "predicted.parquet"
    command(["predict", str(RECORDED / "attempts.parquet"), "--out", str(out)], capsys)
    stored = pd.read_parquet(out).set_index("experiment_id")
    part = results.attempts.iloc[[7, 2, 5]]
    predictions = ultrasweep.predict(part)
    assert predictions.rows.index.tolist() == part.index.tolist()
    found = predictions.rows.set_index("experiment_id")
    pd.testing.assert_frame_equal(found, stored.loc[found.index], check_dtype=False)
    assert (predictions.mistakes, predictions.fitted_on, predictions.ignored_columns) == ((), 0, ())


@pytest.mark.slow
def test_a_frame_is_predicted_like_its_file(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"gpu": "H100", "gpus": [8, 8, 8], "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
        | {"vocab": 128256, "seq": 4096, "gbs_seqs": 64, "mbs": 1, "dp": [8, 4, 3], "tp": [1, 2, 2], "colour": "red"}
    )
    frame.to_csv(tmp_path / "table.csv", index=False)
    found, read = ultrasweep.predict(frame), ultrasweep.predict(tmp_path / "table.csv")
    pd.testing.assert_frame_equal(found.rows, read.rows)
    assert found.rows["step_time_s"].notna().tolist() == [True, True, False]
    assert len(found.mistakes) == 1 and found.mistakes == read.mistakes
    assert found.ignored_columns == ("colour",)


# Mistakes


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ultrasweep.plan("tinny"), ["plan", "+grid=tinny"]),
        (lambda: ultrasweep.plan("tiny", axes={"tq": 2}), ["plan", "+grid=tiny", "grid.axes.tq=2"]),
        (lambda: ultrasweep.plan("tiny", where="tq < 2"), ["plan", "+grid=tiny", "--where", "tq < 2"]),
        (
            lambda: ultrasweep.plan("tiny", overrides={"launcher.num_devices": "many"}),
            ["plan", "+grid=tiny", "launcher.num_devices=many"],
        ),
        (lambda: ultrasweep.advise("llama9b", "h200", 8), ["advise", "model=llama9b", "cluster=h200", "gpus=8"]),
        (lambda: ultrasweep.advise("llama8b", "h200"), ["advise", "model=llama8b", "cluster=h200"]),
        (
            lambda: ultrasweep.advise("llama8b", "h200", 8, overrides={"color": "red"}),
            ["advise", "model=llama8b", "cluster=h200", "gpus=8", "color=red"],
        ),
        (lambda: ultrasweep.plan("tiny", conf="nowhere"), ["plan", "+grid=tiny", "--conf", "nowhere"]),
        (lambda: ultrasweep.predict("no.csv"), ["predict", "no.csv", "--out", "out.csv"]),
    ],
)
def test_a_mistake_has_the_text_of_the_command(
    call: Callable[[], object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ultrasweep.UltrasweepError) as raised:
        call()
    assert command(words, capsys, code=2).strip() == f"ultrasweep: {raised.value}"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ultrasweep.memory({"tp": 2}), "layout has no model: give one of"),
        (lambda: ultrasweep.memory({"model": "llama8b", "tp": [1, 2]}), "describes 2 points"),
        (lambda: ultrasweep.memory({"model": "llama8b", "tp": 5}), "tp=5 does not divide num_heads=32"),
        (lambda: ultrasweep.memory({"model": "llama8b", "engine": "megatron"}), "engine=megatron"),
        (lambda: ultrasweep.load("nowhere"), "nowhere does not exist"),
        (lambda: ultrasweep.load(""), "give the path"),
        (lambda: ultrasweep.predict(pd.DataFrame({"color": ["red"]})), "frame has none of the columns"),
        (lambda: ultrasweep.plan([]), "grid=[]"),
        (lambda: ultrasweep.plan("tiny", axes={"tp": [{2}]}), "grid.axes.tp={2}: give a number"),
        (lambda: ultrasweep.plan("tiny", overrides=["a=b"]), "give a mapping"),  # type: ignore[arg-type]
        (lambda: ultrasweep.advise("llama8b", "h200", 8, top=0), "top=0"),
    ],
)
def test_other_mistakes_are_said_in_one_line(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ultrasweep.UltrasweepError) as raised:
        call()
    assert says in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_own_models_are_found(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        re.sub(r"^name:.*\n", "", (PACKAGED / "model" / "tiny.yaml").read_text(), flags=re.MULTILINE)
    )
    found = ultrasweep.memory({"model": "mine"}, conf=tmp_path / "conf")
    assert found.peak_bytes == ultrasweep.memory({"model": "tiny"}).peak_bytes
    assert ultrasweep.plan("tiny", model="mine", conf=["conf"]).points["model"].unique().tolist() == ["mine"]
