"""``--json``: one document with the documented fields, the numbers of the text, and null for what is unknown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from results.tables.store import read_ledger
from sweep.__main__ import main
from tests.sweep.documented_json import documented, printed, said_of

pytestmark = pytest.mark.drawn(one_in=2)

ROOT = Path(__file__).parents[3]
SCHEDULES = ROOT / "results" / "recorded" / "h200x2_schedules"
HEAD = {"schema", "schema_version"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder without measured rows, which predictions would use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")


def text(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return " ".join(capsys.readouterr().out.split())


# plan


@pytest.mark.slow
def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["tp=[1,2,5]", "dp_shard=8", "zero_stage=[1,3]", "micro_batch_size=[1,8]", "recompute=[none,full]"]
    axes += ["global_batch_size=64"]
    words = ["plan", "+grid=one_point", "model=llama8b", *(f"grid.axes.{axis}" for axis in axes)]
    words += ["budget.gpu_hours=3", "--out", "plan.parquet"]
    document, shown = printed(words, capsys), text(words, capsys)
    assert set(document) == documented("plan") | HEAD
    assert (document["schema"], document["schema_version"]) == ("ultrasweep.plan/1", 1)
    ledger = read_ledger(tmp_path / "plan.parquet").to_pandas()
    assert document["points"] == len(ledger)
    counted = ledger["verdict"].value_counts().to_dict()
    assert {name: count for name, count in document["verdicts"].items() if count} == counted
    invalid = ledger[ledger["verdict"] == "invalid"]
    for rule, count in document["rules"].items():
        told = invalid["detail"].str.contains(f"; {rule}: ", regex=False)
        assert ((invalid["rule"] == rule) | told).sum() == count
    assert sum(document["rules"].values()) > len(invalid) == document["verdicts"]["invalid"] > 0
    for verdict, count in counted.items():
        assert f"{verdict} {count:,}" in shown
    for rule, count in document["rules"].items():
        assert f"{count:,} {rule}" in shown
    assert f"{document['may_not_fit']:,} may not fit" in shown or not document["may_not_fit"]
    for job in document["jobs"]:
        nodes = f"{job['nodes']} node{'s' if job['nodes'] > 1 else ''}"
        assert f"{nodes}, {job['gpus']} GPUs {job['points']} {job['expected_gpu_hours']:.2f}" in shown
    assert sum(job["points"] for job in document["jobs"]) == document["verdicts"]["run"]
    assert set(document["listed"][0]) - {name for name in ledger.columns if name.startswith("predicted")} - {
        *("limit_bytes", "expected_gpu_hours", "worst_gpu_hours")
    } <= said_of("plan")
    rows = ledger.set_index("experiment_id")
    for point in document["listed"]:
        rate, row = point["predicted_tokens_per_s_per_gpu"], rows.loc[point["experiment_id"]]
        assert f"{rate:,.0f}" in shown and point["experiment_id"].rpartition("-")[2] in shown
        assert f"{100 * point['predicted_mfu']:.1f} {point['predicted_peak_bytes'] / 2**30:.1f}" in shown
        assert (rate, point["verdict"]) == (row["predicted_tokens_per_s_per_gpu"], row["verdict"])
        assert set(point["variants"]) <= set(ledger["experiment_id"])
        assert (f"+{len(point['variants'])} variant" in shown) or not point["variants"]


@pytest.mark.slow
def test_listed_points_are_those_that_options_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "+grid=llama8b_8gpu", "--sort", "predicted_peak_bytes:asc", "--top", "3"]
    peaks = [point["predicted_peak_bytes"] for point in printed(words, capsys)["listed"]]
    assert len(peaks) == 3 and peaks == sorted(peaks)
    refused = printed(["plan", "+grid=llama8b_8gpu", "--show", "predicted_oom"], capsys)["listed"]
    assert refused and {point["verdict"] for point in refused} == {"predicted_oom"}
    assert all("needs" in point["detail"] and not point["variants"] for point in refused)


def test_what_a_plan_does_not_know_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(["plan", "+grid=tiny"], capsys)
    unknown = ("predicted_with", "budget_gpu_hours", "expected_gpu_hours")
    assert [document[name] for name in unknown] == [None] * 3
    assert {point["predicted_step_time_s"] for point in document["listed"]} == {None}
    assert {point["predicted_mfu"] for point in document["listed"]} == {None}


def test_a_plan_of_which_nothing_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "+grid=one_point", "model=llama8b", "grid.axes.tp=5", "--json"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    assert printed([*words[:-1], "--show", "all"], capsys, code=2)["verdicts"]["invalid"] == 1


# advise


@pytest.mark.slow
def test_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "model=llama8b", "cluster=h200", "gpus=[3,8]", "global_batch_size=256", "--top", "2"]
    document, shown = printed(words, capsys), text(words, capsys)
    assert set(document) == documented("advise") | HEAD and document["schema"] == "ultrasweep.advise/1"
    assert set(document["layouts"][0]) | set(document["sizes"][0]) <= said_of("advise") | {
        f"predicted_tokens_per_s_per_gpu_{end}" for end in ("low", "high")
    }
    assert (document["gpus"], document["gpus_without_layout"]) == ([8], [3])
    assert "no layout obeys the rules on 3 GPUs" in shown
    assert [document[name] for name in ("tokens", "days", "goal", "price_per_gpu_hour")] == [None] * 4
    assert document["search_command"] in shown and document["times_from"] in shown
    for one in document["layouts"]:
        low, high = (one[f"predicted_tokens_per_s_per_gpu_{end}"] for end in ("low", "high"))
        between = f"{one['predicted_tokens_per_s_per_gpu']:,.0f} {low:,.0f} to {high:,.0f}"
        assert f"{between} {one['predicted_step_time_s']:.3g} s {100 * one['predicted_mfu']:.1f}" in shown
        assert one["layout"] in shown and one["experiment"]["model"]["name"] == "llama8b"


@pytest.mark.slow
def test_a_goal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "model=llama1b", "cluster=h200", "gpus=8-16", "tokens=1e11", "days=5", "price=2"]
    document = printed(words, capsys)
    assert (document["tokens"], document["days"], document["layouts"], document["sizes"]) == (1e11, 5, [], [])
    assert {one["choice"] for one in document["goal"]} <= {"fewest", "surely", "cheapest"} and document["goal"]
    assert set(document["goal"][0]) <= said_of("advise") | {
        f"predicted_tokens_per_s_per_gpu_{end}" for end in ("low", "high")
    }
    assert all(one["price"] == pytest.approx(2 * one["gpu_hours"]) for one in document["goal"])
    never = printed([*words[:4], "tokens=1e15", "days=1"], capsys)
    assert (never["goal"], never["search_command"], never["search_gpu_hours"]) == ([], None, None)


@pytest.mark.slow
def test_advice_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(["advise", "model=llama70b", "cluster=h200", "gpus=1"], capsys)
    assert document["layouts"] == [] and document["search_command"] is None
    assert document["sizes"][0]["least_bytes"] > document["limit_bytes"]


# explain


@pytest.mark.slow
def test_an_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "b1fce478", "--results", str(SCHEDULES)]
    document, shown = printed(words, capsys), text(words, capsys)
    assert set(document) == documented("explain") | HEAD and document["schema"] == "ultrasweep.explain/1"
    assert shown.startswith(document["experiment_id"])
    assert f"{document['parameters'] / 1e6:,.1f} M parameters" in shown
    assert f"{document['flops_per_token_palm']:.3e} a token" in shown
    memory = document["memory"]
    assert {*memory, *memory["stages"][0]} <= said_of("explain")
    for stage in memory["stages"]:
        assert f"{stage['peak_bytes'] / 2**30:.2f}" in shown
    assert max(stage["peak_bytes"] for stage in memory["stages"]) == memory["peak_bytes"]
    assert f"on {document['idle_cluster']}:" in shown
    for share in document["idle_shares"]:
        assert f"{100 * share:.1f} %" in shown
    (attempt,) = document["attempts"]
    assert f"attempt {attempt['attempt_id']}" in shown and attempt["outcome"] == "ok"
    assert f"step time {1e3 * attempt['step_time_s']:,.1f} ms" in shown
    assert attempt["failed_rank"] is None and attempt["evidence"] is None and attempt["logs"] is None
    assert attempt["ended_at"] - attempt["started_at"] == pytest.approx(attempt["duration_s"])


@pytest.mark.slow
def test_the_events_of_an_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "b1fce478", "--results", str(SCHEDULES), "--memory"]
    document, shown = printed(words, capsys), text(words, capsys)
    assert set(document) | set(document["events"][0]) <= said_of("explain") | HEAD
    for event in document["events"]:
        assert f"{event['tensor']} {event['allocated_bytes']:+,} {event['total_bytes']:,}" in shown
    assert document["events"][document["peak_event"]]["total_bytes"] == document["peak_bytes"]
    assert f"bytes on stage {document['stage']}, {document['action']}" in shown


@pytest.mark.slow
def test_a_planned_point_is_explained_on_the_cluster_of_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "+grid=one_point", "model=llama1b", "cluster=a100_40gb"]
    [point] = printed([*words, "--out", "plan.parquet"], capsys)["listed"]
    shown = text(["explain", point["experiment_id"], "--results", "plan.parquet"], capsys)
    assert "for matrix products on a100_40gb" in shown


def test_a_planned_point_has_no_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+grid=tiny", "--out", "plan.parquet"]) == 0
    document = printed(["explain", "tiny-dp1z0-mbs1-gbs4-s128-fp32", "--results", "plan.parquet"], capsys)
    assert document["attempts"] == []
    (verdict,) = document["verdicts"]
    assert (verdict["verdict"], verdict["predicted_step_time_s"]) == ("run", None)
    assert verdict["predicted_peak_bytes"] == document["memory"]["peak_bytes"]


@pytest.mark.parametrize("words", [["plan", "+grid=tinny"], ["advise", "model=tiny"], ["explain", "no-such-id"]])
def test_an_error_leaves_standard_output_empty(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("results").mkdir()
    assert main([*words, "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and re.match("ultrasweep: ", told.err)
