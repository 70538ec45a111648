"""``python -m sweep grade``: what it prints and writes of the shipped rows, and of a file of predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from results.errors import InvalidResults, UltrasweepError
from sweep.cli.commands import run_command
from tests.sweep.helpers import plan_of, store_attempt

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[3] / "results" / "recorded"
ONE_SWEEP = RECORDED / "h200x4_llama_node"


@pytest.mark.exhaustive(seconds=20)
def test_shipped_rows_are_graded_by_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grades.json"
    assert run_command("grade", [str(RECORDED), "--by", "tp", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for said in ("Predictions against measurements", "closed form", "rehearsed", "Spearman", "Out of memory"):
        assert said in text
    assert "zero_stage" not in text, "only the axes that were asked for"
    found = json.loads(out.read_text())
    whole = {(row["depth"], row["quantity"]): row for row in found["grades"] if row["axis"] is None}
    memory = whole["rehearsed", "peak_memory"]
    assert memory["n"] > 50 and memory["mape"] < 0.001 and memory["spearman"] is None
    assert whole["closed_form", "step_time"]["n"] == sum(
        (pair["depth"], pair["quantity"]) == ("closed_form", "step_time") for pair in found["pairs"]
    )
    assert max(row["right"] for row in found["oom_curve"]) > 0.98


def test_pairs_are_written_as_a_table_and_as_json(tmp_path: Path) -> None:
    for name in ("grades.json", "pairs.parquet"):
        assert run_command("grade", [str(ONE_SWEEP), "--out", str(tmp_path / name)]) == 0
    found = json.loads((tmp_path / "grades.json").read_text())
    assert len(pd.read_parquet(tmp_path / "pairs.parquet")) == len(found["pairs"]) > 10


def test_predictions_stand_beside_the_table_that_they_were_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, predicted = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    measured.write_text(
        "gpu,gpus,layers,hidden,seq,gbs_seqs,mbs,tp,status,step_time_s,reserved_gib\n"
        + "".join(f"H100,8,16,2048,4096,8,1,{tp},ok,{tp},40\n" for tp in (1, 2, 4))
        + "H100,8,16,2048,4096,8,1,8,oom,,\n"
    )
    lines = [f"{44 * 2**30},{time},{0.9 * time},{1.05 * time}\n" for time in (1.1, 2.2, 4.0, 9.0)]
    predicted.write_text(
        "predicted_peak_reserved_bytes,step_time_s,step_time_low_s,step_time_high_s\n" + "".join(lines)
    )
    none = str(tmp_path / "none")
    assert run_command("grade", [none, "--predictions", str(predicted), "--against", str(measured)]) == 0
    text = capsys.readouterr().out
    [times] = [line.split() for line in text.splitlines() if line.startswith("calibrated") and "step time" in line]
    assert times[3:5] == ["3", "6.7"] and "100.0" in times, "nine tenths of 1.1 and 2.2 are below what was measured"
    [memory] = [line.split() for line in text.splitlines() if line.startswith("calibrated") and "reserved" in line]
    assert memory[3:5] == ["3", "10.0"]


def test_recorded_intervals_are_held_to_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [point.experiment for point in plan_of(["grid=tiny"]).points][:4]
    interval = {"predicted_step_time_low_s": 0.8, "predicted_step_time_high_s": 1.1}
    for number, experiment in enumerate(points):
        recorded = interval if number else {}  # the first is of an older version
        times = {"predicted_step_time_s": 1.0, "step_time_s": 0.9 + 0.1 * number, "cluster": "lab"}
        store_attempt(tmp_path / "s", experiment, **times, **recorded)
    assert run_command("grade", [str(tmp_path), "--by", "tp"]) == 0
    text = capsys.readouterr().out
    assert "Inside their predicted interval, closed form: 2 of 3 step times; 1 more have no interval" in text
    [times] = [line for line in text.splitlines() if line.startswith("closed form") and "step time" in line]
    assert times.rstrip().endswith("66.7 %")


@pytest.mark.filterwarnings("error")
def test_a_table_is_read_as_predict_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its status in any case, numbers with commas, a text where a number is not known, a row's own name beside."""
    measured, predicted = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    measured.write_text(
        "gpu,gpus,world_size,layers,hidden,seq,gbs_seqs,mbs,status,step_time_s,reserved_gib\n"
        'H100,8,8,16,2048,4096,8,1,OK,1.0,"1,000"\n'
        "H100,8,8,16,2048,4096,?,1,Success,2.0,n/a\n"
        "H100,8,8,16,2048,4096,8,1,oom,?,40.0\n"
    )
    predicted.write_text("step_time_s,predicted_peak_reserved_bytes\n" + f"1.1,{1100 * 2**30}\n" * 3)
    none = str(tmp_path / "none")
    assert run_command("grade", [none, "--predictions", str(predicted), "--against", str(measured)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("calibrated")]
    assert [line[3:5] for line in lines] == [["2", "27.5"], ["1", "10.0"]]


def test_a_table_without_rows_or_predictions_is_one_line(tmp_path: Path) -> None:
    empty, other, none = tmp_path / "rows.csv", tmp_path / "other.csv", str(tmp_path / "none")
    empty.write_text("gpu,gpus,status,step_time_s\n")
    other.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidResults, match=r"rows\.csv has no row"):
        run_command("grade", [none, "--predictions", str(other), "--against", str(empty)])
    with pytest.raises(InvalidResults, match="it holds no prediction"):
        run_command("grade", [str(ONE_SWEEP), "--predictions", str(other)])


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UltrasweepError, match="--by tpp: no such axis; did you mean"):
        run_command("grade", [str(ONE_SWEEP), "--by", "tpp"])
    with pytest.raises(UltrasweepError, match="end its name in"):
        run_command("grade", [str(ONE_SWEEP), "--out", "grades.csv"])
    with pytest.raises(UltrasweepError, match="needs --predictions FILE"):
        run_command("grade", [str(ONE_SWEEP), "--against", "rows.csv"])
    with pytest.raises(InvalidResults, match="cannot be read"):
        run_command("grade", [str(ONE_SWEEP), "--predictions", str(tmp_path / "gone.parquet")])
