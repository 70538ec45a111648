"""Verdicts, their numbers, the order of points, the budget, and the ledger."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

import sweep.planning.point_verdict
from results.tables.schema import LEDGER, MEASUREMENT_VERSION
from results.tables.store import read_ledger
from results.text.numbers import GIB
from sweep.composing.config import compose_sweep
from sweep.planning.best_layouts import print_best
from sweep.planning.ledger import ledger_rows, write_ledger_file
from sweep.planning.plan import Plan, refuse_if_nothing_can_run
from sweep.planning.plan_json import plan_json
from sweep.planning.point_verdict import DeviceLimit, PlannedPoint
from sweep.planning.reuse import FinishedAttempt, find_finished
from sweep.planning.summary import eager_points, print_plan, reused_from
from tests.sweep.helpers import APERTUS, plan_of, store_attempt
from workloads.costs.memory.estimate import estimate_memory
from workloads.rules import installed_engines
from workloads.rules.layout_rules import Violation, violations
from workloads.spec.errors import InvalidSweep

EIGHT = ["+grid=llama8b_8gpu", "grid.axes.recompute=none", "grid.axes.compile=none"]


def test_every_point_has_one_verdict_and_its_numbers() -> None:
    plan = plan_of([*EIGHT, "cluster=h100_efa", "grid.axes.tp=[1,2,64]", "grid.axes.world_size=64"])
    assert sum(plan.counts.values()) == len(plan.points)
    assert set(plan.counts) == {"run", "invalid", "predicted_oom"}
    for point in plan.points:
        if point.verdict == "invalid":
            assert (point.experiment.tp, point.rule) == (64, "tp_num_heads")
            assert "num_heads=32" in (point.detail or "")
            assert point.peak_bytes is None
        else:
            assert point.peak_bytes == estimate_memory(point.experiment).peak_bytes + 2 * 32 * 2**20
            limit = 75 * GIB * 1.1
            assert (point.peak_bytes > limit) == (point.verdict == "predicted_oom")
            assert point.price is not None
            assert point.time is not None


def test_a_plan_names_every_rule_that_a_point_breaks(tmp_path: Path) -> None:
    """In the order of the rules, the same for all points; the counts by rule count a point for each."""
    axes = ["tp=[3,2]", "pp=[33,1]", "pp_schedule=1f1b", "global_batch_size=3", "cuda_graph=none", "micro_batch_size=2"]
    words = ["+grid=one_point", "model=llama8b", "cluster=h200", *(f"grid.axes.{one}" for one in axes)]
    plan = plan_of(words, device_limit=DeviceLimit(2, "this machine gives 2"))
    found = {(point.experiment.tp, point.experiment.pp): point for point in plan.points}
    tp, wide = ("tp_num_heads", "tp_ffn_hidden_size", "tp_num_kv_heads", "sequence_parallel"), ("launcher_devices",)
    assert found[2, 1].broken_rules == ("global_batch",)
    assert found[2, 33].broken_rules == ("global_batch", "pp_layers", *wide)
    assert found[3, 1].broken_rules == ("global_batch", *tp, *wide)
    assert found[3, 33].broken_rules == ("global_batch", "pp_layers", *tp, *wide)
    assert plan.broken_rules["global_batch"] == 4 and plan.broken_rules["pp_layers"] == 2
    rows = {(row["tp"], row["pp"]): row for row in ledger_rows(plan)}
    assert rows[2, 33]["rule"] == "global_batch"
    first, _, rest = rows[2, 33]["detail"].partition("; pp_layers: ")
    assert first == found[2, 33].broken[0].message == rows[2, 1]["detail"]
    assert rest.startswith("pp=33 stages") and rest.endswith(
        "; launcher_devices: needs 66 devices, this machine gives 2"
    )
    facts = {one["experiment_id"]: one for one in json.loads(plan_json(plan, 0, verdicts=["invalid"]))["listed"]}
    assert facts[found[2, 33].experiment.id]["broken"] == [
        {"rule": one.rule, "message": one.message} for one in found[2, 33].broken
    ]
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=200))
    assert "invalid       4  break a rule; one that breaks several counts for each" in file.getvalue()
    file = io.StringIO()
    print_best(plan, Console(file=file, width=400), verdicts=["invalid"])
    assert "global_batch: " in file.getvalue() and "  pp_layers: pp=33 stages need" in file.getvalue()


def test_a_model_that_run_refuses_is_not_said_to_be_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(APERTUS))
    plan = plan_of([*EIGHT, "cluster=h100_efa", f"model={tmp_path}", "grid.axes.tp=2"])
    assert plan.counts["run"]
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=200))
    assert "will be run" not in file.getvalue()
    assert "keep the rules and fit, but run refuses " in file.getvalue()


def test_points_whose_steps_are_not_captured_are_named_with_the_reason() -> None:
    layout = [f"grid.axes.{one}" for one in ("dp_shard=2", "ep=2", "zero_stage=1", "global_batch_size=4")]
    words = ["+grid=one_point", "model=qwen3_30b_a3b_8_layers", *layout, "grid.axes.routing=[balanced,learned]"]
    (line,) = eager_points(plan_of([*words, "cluster=h200"]))
    assert line.startswith("1 point with eager steps: with routing=learned the host waits in every layer")
    assert eager_points(plan_of([*words, "cluster=h200", "grid.axes.cuda_graph=none"])) == []
    assert eager_points(plan_of(["+grid=tiny"])) == [], "a CPU has no graphs at all"
    assert len(eager_points(plan_of([*words, "cluster=h200", "measure.warmup_steps=2"]))) == 2


def test_a_warm_up_too_short_for_a_graph_is_predicted_without_one() -> None:
    """Llama 1B with 512 tokens, whose eager steps the host paces."""
    words = ["+grid=one_point", "model=llama1b", "cluster=h200", "grid.axes.seq_len=512"]

    def seconds(*more: str) -> float:
        (point,) = plan_of([*words, *more]).points
        assert point.time is not None
        return point.time.step_time_s

    graph, eager = seconds(), seconds("grid.axes.cuda_graph=none")
    assert seconds("measure.warmup_steps=2") == eager > 1.2 * graph
    (line,) = eager_points(plan_of([*words, "measure.warmup_steps=2"]))
    assert line.endswith("but measure.warmup_steps is 2; use 3 or more")


@pytest.mark.slow
def test_the_margin_and_the_wish_to_see_failures_are_options() -> None:
    overrides = ["+grid=one_gpu", "model=llama8b", "cluster=h100_efa"]
    default = plan_of([*overrides, "plan.oom_margin=2.0"])
    strict = plan_of([*overrides, "plan.oom_margin=1.5"])
    assert strict.counts["predicted_oom"] > default.counts["predicted_oom"] > 0
    eager = plan_of([*overrides, "plan.run_predicted_oom=true"])
    assert eager.counts == {"run": len(default.points)}


@pytest.mark.slow
def test_what_the_engine_cannot_run_is_predicted_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this engine had no fp8."""
    lacks = Violation("engine_support", "this engine cannot run fp8 yet")
    monkeypatch.setattr(
        sweep.planning.point_verdict,
        "violations",
        lambda experiment, cluster: [*violations(experiment, cluster), lacks],
    )
    plan = plan_of(["+grid=deepseek_v3_2048gpu", "grid.axes.precision=fp8_rowwise", "grid.axes.ep=64"])
    refused = [point for point in plan.points if point.rule == "engine_support"]
    assert refused
    assert all(point.verdict == "invalid" and "cannot run fp8 yet" in (point.detail or "") for point in refused)
    assert all(point.peak_bytes and point.time for point in refused)


def test_points_of_another_engine_take_the_installed_version_and_are_refused_if_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"torchtitan": "0.3.0", "torch": "2.11.0"}
    monkeypatch.setattr(installed_engines, "_version", installed.get)
    plan = plan_of(["+grid=tiny", "grid.axes.engine=torchtitan"])
    assert {point.experiment.engine_version for point in plan.points} == {"0.3.0+1"}
    assert {(point.verdict, point.rule) for point in plan.points} == {("invalid", "engine_support")}
    simple = next(point for point in plan.points if point.experiment.world_size == 1)
    assert "torchtitan 0.3.0 with torch 2.11.0 is installed, and it needs torch 2.13" in (simple.detail or "")
    given = plan_of(["+grid=tiny", "grid.axes.engine=torchtitan", "grid.axes.engine_version=0.2.2+2"])
    assert {point.experiment.engine_version for point in given.points} == {"0.2.2+2"}


@pytest.mark.slow
def test_latent_attention_and_experts_run_in_fp8() -> None:
    plan = plan_of(["+grid=deepseek_v3_2048gpu", "grid.axes.precision=fp8_rowwise", "grid.axes.ep=64"])
    assert not [point for point in plan.points if point.rule in ("engine_support", "fp8_sizes", "fp8_experts")]


@pytest.mark.slow
def test_points_that_this_machine_cannot_give_devices_to() -> None:
    plan = plan_of([*EIGHT], device_limit=DeviceLimit(4, "this machine gives 4"))
    assert {point.rule for point in plan.points} == {"launcher_devices"}
    assert "needs 8 devices, this machine gives 4" in (plan.points[0].detail or "")
    rehearsed = plan_of([*EIGHT, "launcher=rehearse"], "rehearsed", device_limit=None)
    assert rehearsed.counts["run"] > 0


@pytest.mark.slow
def test_likely_best_points_of_every_cell_come_first() -> None:
    plan = plan_of(["+grid=[llama1b_8gpu,llama8b_8gpu]", "grid.axes.compile=none"])
    first_two = plan.to_run[:2]
    assert {point.experiment.model.name for point in first_two} == {"llama1b", "llama8b"}
    assert first_two[0].price is not None
    assert first_two[1].price is not None
    assert first_two[0].price.charged_h <= first_two[1].price.charged_h
    for name in ("llama1b", "llama8b"):
        rates = [p.tokens_per_s_per_gpu or 0 for p in plan.to_run if p.experiment.model.name == name]
        assert rates == sorted(rates, reverse=True)


def test_the_budget_keeps_the_best_and_names_the_rest() -> None:
    whole = plan_of([*EIGHT])
    plan = plan_of([*EIGHT, "budget.gpu_hours=2"])
    spent = sum(point.price.charged_h for point in plan.to_run if point.price)
    assert 1.8 < spent <= 2
    assert plan.counts["over_budget"] == len(whole.to_run) - len(plan.to_run) > 0
    assert plan.to_run[0] == whole.to_run[0]
    over = next(point for point in plan.points if point.verdict == "over_budget")
    assert over.detail is not None
    assert "of 2" in over.detail


def test_prices_of_measured_points() -> None:
    plan = plan_of(["+grid=llama8b_8gpu", "measure.warmup_steps=2", "measure.timed_steps=8", "plan.compile_s=100"])
    for point in plan.to_run:
        price, time = point.price, point.time
        assert price is not None
        assert time is not None
        overhead = 12 + (100 if point.experiment.compile == "block" else 0)
        assert price.expected_h == pytest.approx(8 * (overhead + 10 * time.step_time_s) / 3600)
        assert price.deadline_s == pytest.approx(180 + overhead + 5 * 10 * time.step_time_s)
        assert price.worst_h == pytest.approx(8 * price.deadline_s / 3600)


@pytest.mark.slow
def test_a_rehearsal_holds_one_device_and_pays_equal_stages_once() -> None:
    # With ZeRO 0 a rank does the same whatever the number of replicas: 4 nodes cost little more than 1.
    overrides = [
        "+grid=playbook",
        "model=llama1.34b",
        "launcher=rehearse",
        "grid.axes.zero_stage=0",
        "grid.axes.nodes=[2,4]",
    ]
    plan = plan_of(overrides, "rehearsed")
    prices = [point.price for point in plan.to_run if point.price is not None]
    assert all(price.devices == 1 for price in prices)
    free = [price for price in prices if price.expected_h == 0]
    assert 0 < len(free) < len(prices)
    measured = sum(p.price.charged_h for p in plan_of(overrides).to_run if p.price)
    assert sum(price.charged_h for price in prices) < measured / 20


def test_nothing_is_predicted_where_no_rate_is_known() -> None:
    plan = plan_of(["+grid=tiny"])
    for point in plan.to_run:
        assert point.time is None
        assert point.price is not None
        assert point.price.expected_h is None
        assert point.price.charged_h == point.price.worst_h > 0


def test_plans_of_which_nothing_can_run_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        InvalidSweep, match=r"no point fits in memory: .* needs [\d.]+ GiB on a device, NVIDIA H200 has 135\.8"
    ):
        refuse_if_nothing_can_run(plan_of(["+grid=one_gpu", "model=llama405b"]))
    with pytest.raises(
        InvalidSweep, match=r"no point can run; rules broken: tp_num_heads \((\d+)\), .*; e\.g\. tp=3 does"
    ):
        refuse_if_nothing_can_run(
            plan_of([*EIGHT, "grid.axes.tp=3", "grid.axes.world_size=24", "grid.axes.global_batch_size=384"])
        )


@pytest.mark.slow
def test_finished_attempts_are_of_the_same_method_device_and_meaning(tmp_path: Path) -> None:
    overrides = [*EIGHT, f"results_dir={tmp_path}", "name=mine"]
    plan = plan_of(overrides)
    ids = [point.experiment for point in plan.to_run[:7]]
    here = {"cluster": "h200", "device_name": "NVIDIA H200"}
    mine = tmp_path / "mine"
    ok = store_attempt(mine, ids[0], **here)
    oom = store_attempt(mine, ids[1], outcome="oom", **here)
    other_file = store_attempt(mine, ids[2], cluster="my_h200", device_name="NVIDIA H200")
    store_attempt(mine, ids[3], outcome="crash", **here)
    store_attempt(mine, ids[4], method="rehearsed", **here)
    store_attempt(mine, ids[5], cluster="h100_efa", device_name="NVIDIA H100 80GB HBM3")
    store_attempt(mine, ids[6], **{**here, "measurement_version": MEASUREMENT_VERSION + 1})
    finished = find_finished(plan.config, "measured")
    assert {key: attempt.attempt_id for key, attempt in finished.items()} == {
        ids[0].id: ok,
        ids[1].id: oom,
        ids[2].id: other_file,
    }
    again = plan_of(overrides, finished=finished)
    assert again.counts["cached"] == 3
    cached = next(point for point in again.points if point.experiment == ids[1])
    assert (cached.cached_attempt, cached.detail) == (oom, f"oom in attempt {oom} of sweep mine")
    assert reused_from(again) is None


@pytest.mark.slow
def test_rows_of_other_sweeps_stand_for_a_point_only_on_request(tmp_path: Path) -> None:
    overrides = [*EIGHT, f"results_dir={tmp_path}", "name=mine"]
    plan = plan_of(overrides)
    first, second, third = (point.experiment for point in plan.to_run[:3])
    here = {"cluster": "h200", "device_name": "NVIDIA H200"}
    store_attempt(tmp_path / "other", first, **here)
    theirs = store_attempt(tmp_path / "deep" / "theirs", second, **here)
    store_attempt(tmp_path / "other", second, **here)
    mine = store_attempt(tmp_path / "mine", first, **here)
    store_attempt(tmp_path / "recorded" / "shipped", third, **here)
    (tmp_path / "recorded" / "SHIPPED").write_text("")

    assert set(find_finished(plan.config, "measured")) == {first.id}
    reusing = compose_sweep([*overrides, "plan.reuse=true"])
    finished = find_finished(reusing, "measured")
    assert {key: (attempt.attempt_id, attempt.sweep) for key, attempt in finished.items()} == {
        first.id: (mine, "mine"),  # its own row before another sweep's
        second.id: (theirs, "theirs"),
    }
    again = plan_of([*overrides, "plan.reuse=true"], finished=finished)
    assert reused_from(again) == "rows of other sweeps used instead of a run (plan.reuse=true): theirs (1)"
    rows = {row["experiment_id"]: row for row in ledger_rows(again)}
    assert [rows[key.id]["cached_sweep"] for key in (first, second, third)] == ["mine", "theirs", None]
    assert rows[third.id]["verdict"] == "run"


@pytest.mark.slow
def test_a_folder_without_sweeps_has_no_finished_attempts(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        assert find_finished(compose_sweep(["+grid=tiny", f"results_dir={folder}"]), "measured") == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSweep, match="is a file"):
        find_finished(compose_sweep(["+grid=tiny", f"results_dir={tmp_path / 'file'}"]), "measured")


def test_the_ledger_has_every_point_once(tmp_path: Path) -> None:
    plan = plan_of(
        [*EIGHT, "cluster=h100_efa", "grid.axes.tp=[1,2,64]", "grid.axes.world_size=64", "budget.gpu_hours=1"]
    )
    path = tmp_path / "plan.parquet"
    write_ledger_file(path, plan)
    table = read_ledger(path)
    assert pq.read_schema(path).equals(LEDGER)
    assert table["point"].to_pylist() == list(range(len(plan.points)))
    assert table["experiment_id"].to_pylist() == [point.experiment.id for point in plan.points]
    assert set(table["verdict"].to_pylist()) == {"run", "invalid", "predicted_oom", "over_budget"}
    rows = {row["experiment_id"]: row for row in table.to_pylist()}
    for point in plan.points:
        row = rows[point.experiment.id]
        assert row["predicted_peak_bytes"] == point.peak_bytes
        assert row["rule"] == point.rule
        # What the engine alone lacks has a predicted time.
        broken = point.verdict == "invalid" and point.rule != "engine_support"
        assert (row["predicted_step_time_s"] is None) == broken
        assert row["limit_bytes"] == 75 * GIB
    assert not list(tmp_path.glob(".*"))  # no temporary file left


def test_ledger_rows_carry_null_for_what_is_not_known() -> None:
    row = ledger_rows(plan_of(["+grid=tiny"]))[0]
    assert row["predicted_step_time_s"] is None
    assert row["expected_gpu_hours"] is None
    assert row["limit_bytes"] is None
    assert row["predicted_peak_bytes"] > 0


@pytest.mark.slow
def test_a_plan_is_the_same_every_time() -> None:
    first, again = plan_of([*EIGHT]), plan_of([*EIGHT])
    assert [dataclasses.astuple(p) for p in first.points] == [dataclasses.astuple(p) for p in again.points]


@pytest.mark.slow
def test_some_refused_points_run_on_purpose_and_say_so() -> None:
    overrides = ["+grid=one_gpu", "model=llama8b", "cluster=h100_efa"]
    plain = plan_of(overrides)
    refused = {point.experiment.id: point for point in plan_points(plain, "predicted_oom")}
    assert len(refused) > 4
    half, other, all_of_them = (
        plan_of([*overrides, f"plan.audit={share}", f"plan.audit_seed={seed}"])
        for share, seed in ((0.5, 0), (0.5, 1), (1, 0))
    )
    chosen = [point for point in half.points if point.rule == "audit"]
    assert len(chosen) == -(-len(refused) // 2)
    for point in chosen:
        before = refused[point.experiment.id]
        assert point.verdict == "run" and before.detail is not None
        assert point.detail == f"run on purpose (plan.audit=0.5, seed 0): predicted out of memory, {before.detail}"
        assert dataclasses.replace(point, verdict=before.verdict, rule=None, detail=before.detail) == before
    for point in plan_points(half, "predicted_oom"):
        assert point == refused[point.experiment.id], "the others are as they were"
    assert {p.experiment.id for p in other.points if p.rule == "audit"} != {p.experiment.id for p in chosen}
    assert all_of_them.counts["predicted_oom"] == 0
    one = plan_of([*overrides, "plan.audit=0.0001"])
    assert sum(point.rule == "audit" for point in one.points) == 1, "a small share of few points is one"
    with pytest.raises(InvalidSweep, match="from 0 to 1"):
        plan_of([*overrides, "plan.audit=2"])
    # A sweep that goes on runs the rest of those chosen at first, and none beside them.
    ran = chosen[:-1]
    done = {p.experiment.id: FinishedAttempt(attempt_id="a", sweep="s", outcome="oom") for p in ran}
    again = plan_of([*overrides, "plan.audit=0.5", "plan.audit_seed=0"], finished=done)
    assert [p.experiment.id for p in again.points if p.rule == "audit"] == [chosen[-1].experiment.id]
    assert again.counts["cached"] == len(ran)


def plan_points(plan: Plan, verdict: str) -> list[PlannedPoint]:
    return [point for point in plan.points if point.verdict == verdict]
