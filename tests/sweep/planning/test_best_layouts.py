"""The list of a plan's best points: how many, in which order, which of them, and with what reasons."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pyarrow.csv as pc
import pytest
from rich.console import Console

from results.tables.schema import LEDGER
from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from sweep.planning.best_layouts import fastest, parse_order, print_best
from sweep.planning.ledger import ledger_rows
from sweep.planning.mfu import mfu_cell
from sweep.planning.plan import Plan, make_plan
from sweep.planning.point_verdict import may_not_fit
from sweep.planning.price import information_order
from sweep.planning.summary import cannot_run_here, workload
from tests.sweep.helpers import plan_of
from workloads.spec.errors import InvalidSweep

SMALL = ["+grid=llama8b_8gpu", "grid.axes.recompute=none", "grid.axes.compile=none"]


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(SMALL)


def printed(plan: Plan, **options: object) -> str:
    file = io.StringIO()
    print_best(plan, Console(file=file, width=250), **options)  # type: ignore[arg-type]
    return file.getvalue()


def listed(text: str) -> list[str]:
    """The ids in the table: eight hexadecimal digits, a word of their own."""
    return re.findall(r"\b[0-9a-f]{8}\b", text)


def test_ten_best_layouts_by_default_with_their_ids(plan: Plan) -> None:
    able = [point for point in plan.points if point.verdict == "run"]
    best: dict[tuple[object, ...], str] = {}
    for point in sorted(able, key=lambda point: (may_not_fit(point), -(point.tokens_per_s_per_gpu or 0))):
        one = point.experiment
        best.setdefault((one.dp, one.tp, one.pp, one.micro_batch_size, one.pp_schedule, one.virtual_stages), one.hash)
    assert listed(printed(plan)) == [*best.values()][:10]
    assert listed(printed(plan, top=3)) == [*best.values()][:3]
    assert f"10 of {len(able):,} points shown; --top N for more of each model and size" in printed(plan)


@pytest.mark.slow
def test_a_rate_stands_beside_its_interval(plan: Plan) -> None:
    [best] = [point for point in plan.points if point.experiment.hash in listed(printed(plan, top=1))]
    assert best.time is not None
    tokens = best.experiment.tokens_per_step / best.experiment.world_size
    assert f"{tokens / best.time.high_s:,.0f} to {tokens / best.time.low_s:,.0f}" in printed(plan, top=1)
    assert best.time.low_s < best.time.step_time_s < best.time.high_s


@pytest.mark.slow
def test_every_model_and_size_has_its_best_layouts() -> None:
    plan = plan_of(["+grid=playbook", "grid.axes.nodes=[1,4]", "grid.axes.model=[llama3.57b,llama80b]"])
    best = [first for first, *_ in fastest([point for point in plan.points if point.verdict == "run"], 2)]
    assert [(p.experiment.model.name, p.experiment.world_size) for p in best] == [
        *[("llama3.57b", 8)] * 2,
        *[("llama3.57b", 32)] * 2,
        *[("llama80b", 32)] * 2,  # a node holds no layout of it, as in the study
    ]
    for first, second in zip(best[::2], best[1::2], strict=True):
        rates = [
            p.tokens_per_s_per_gpu or 0
            for p in plan.points
            if p.verdict == "run"
            and not may_not_fit(p)
            and (p.experiment.model, p.experiment.world_size) == (first.experiment.model, first.experiment.world_size)
        ]
        assert first.tokens_per_s_per_gpu == max(rates)
        assert (second.tokens_per_s_per_gpu or 0) <= (first.tokens_per_s_per_gpu or 0)
    assert len(fastest(plan.points)) == 40  # 4 models and sizes with 10 each


def test_a_layout_with_several_seeds_is_listed_once() -> None:
    plan = plan_of(["+grid=one_point", "cluster=h200", "grid.axes.seed=[1,2,3]", "grid.axes.micro_batch_size=[1,2]"])
    assert len(plan.points) == 6
    assert sorted(one.experiment.micro_batch_size for [one] in fastest(plan.points)) == [1, 2]


@pytest.mark.slow
def test_every_routing_has_its_best_layouts_and_is_run_early() -> None:
    plan = plan_of(["+grid=moe_2gpu", "grid.axes.model=deepseek_v2_lite_10_layers"])
    able = [point for point in plan.points if point.verdict == "run"]
    best = [first for first, *_ in fastest(able, 1)]
    assert [point.experiment.routing for point in best] == ["balanced", "learned"]
    lines = printed(plan, top=1).splitlines()
    named = [line for line in lines if line.startswith("deepseek_v2_lite_10_layers")]
    assert [line.split("  ")[0] for line in named] == [
        "deepseek_v2_lite_10_layers",
        "deepseek_v2_lite_10_layers, learned routing",
    ]
    rates = [point.tokens_per_s_per_gpu for point in able]
    order = information_order([p.experiment for p in able], rates, [p.price for p in able if p.price])
    assert {able[place].experiment.routing for place in order[:2]} == {"balanced", "learned"}


@pytest.mark.slow
def test_points_between_the_limit_and_the_margin_are_shown_and_marked(plan: Plan) -> None:
    tight = [
        point
        for point in plan_of([*SMALL, "plan.oom_margin=3"]).points
        if point.verdict == "run" and (point.peak_bytes or 0) > (point.limit_bytes or 0)
    ]
    assert tight
    text = printed(plan_of([*SMALL, "plan.oom_margin=3"]), top=1000)
    marked = [line for line in text.splitlines() if re.search(r"may not fit \(\d{3} %\)", line)]
    assert marked
    assert {listed(line)[0] for line in marked} <= {point.experiment.hash for point in tight}
    lines = [line for line in text.splitlines() if listed(line)]
    assert lines[-len(marked) :] == marked  # after every layout that fits


def test_a_layout_that_may_not_fit_follows_those_that_fit_and_variants_share_a_row() -> None:
    asked = ["grid.axes.zero_stage=[1,2]", "grid.axes.recompute=[none,selective]", "plan.oom_margin=3"]
    plan = plan_of(["+grid=one_point", "cluster=h200", "grid.axes.dp_shard=2", "grid.axes.global_batch_size=2", *asked])
    [[first, *others]] = fastest(plan.points)
    assert len(others) == 3
    assert first.tokens_per_s_per_gpu == max(point.tokens_per_s_per_gpu or 0 for point in plan.points)
    tight = [dataclasses.replace(first, limit_bytes=(first.peak_bytes or 0) - 1), *others]
    [[now, *_]] = fastest(tight)
    assert now.experiment.id == others[0].experiment.id
    assert "+3 variants: " in printed(plan)


def test_a_machine_without_the_devices_is_named() -> None:
    plan = plan_of(
        [
            "+grid=one_point",
            "cluster=h200",
            "grid.axes.dp_shard=[1,2]",
            "grid.axes.global_batch_size=2",
            "grid.axes.zero_stage=[0,1]",
        ]
    )
    assert cannot_run_here(plan, 2) is None
    line = (
        "this machine has 1 GPU and can run 1 of 2 points (1 to 2 GPUs each); launcher=slurm or launcher=rehearse can"
    )
    assert cannot_run_here(plan, 1) == line
    assert "has no GPU and can run none of them" in (cannot_run_here(plan, 0) or "")


def test_any_column_can_be_the_order(plan: Plan) -> None:
    able = [point for point in plan.points if point.verdict == "run"]
    by_peak = sorted(able, key=lambda point: point.peak_bytes or 0)
    assert listed(printed(plan, order=parse_order("predicted_peak_bytes"))) == [p.experiment.hash for p in by_peak[:10]]
    assert listed(printed(plan, order=parse_order("peak_bytes:desc"), top=2)) == [
        p.experiment.hash for p in sorted(able, key=lambda point: -(point.peak_bytes or 0))[:2]
    ]
    text = printed(plan, order=parse_order("expected_gpu_hours"), top=1)
    assert "by expected_gpu_hours, smallest first" in text and "GiB  expected_gpu_hours" in text
    assert parse_order("tokens_per_s_per_gpu").descending  # the better values come first
    assert not parse_order("tp").descending


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("predicted_peak_byte", "no column 'predicted_peak_byte'; did you mean 'predicted_peak_bytes'? known: "),
        ("tp:up", "write tp:asc (smallest first) or tp:desc (largest first)"),
    ],
)
def test_a_wrong_order_is_one_line(text: str, told: str) -> None:
    with pytest.raises(InvalidSweep) as error:
        parse_order(text)
    assert told in str(error.value)


@pytest.mark.slow
def test_what_cannot_run_is_shown_on_request_with_its_reason() -> None:
    plan = plan_of([*SMALL, "cluster=h100_efa", "grid.axes.tp=[1,2,64]", "grid.axes.world_size=64"])
    assert plan.counts["invalid"] and plan.counts["predicted_oom"]
    invalid = printed(plan, verdicts=("invalid",), top=100)
    assert len(listed(invalid)) == plan.counts["invalid"]
    assert re.search(r" invalid *\n *tp_num_heads: tp=64 does not divide num_heads=32 of llama8b", invalid)
    assert re.search(r"\n *tp_num_kv_heads: tp=64 neither", invalid), "each rule on its own line"
    assert "x margin 1.1 =" in printed(plan, verdicts=("predicted_oom",), top=1)
    everything = ("run", "invalid", "predicted_oom", "cached", "over_budget")
    assert len(listed(printed(plan, verdicts=everything, top=1000))) == len(plan.points)
    assert "no point has the verdict cached" in printed(plan, verdicts=("cached",))


def test_without_rates_the_missing_ones_are_named_and_a_list_is_made_on_request() -> None:
    plan = plan_of(["+grid=tiny"])
    text = printed(plan)
    assert "the file of cluster cpu lacks device.peak_flops.fp32, device.memory_bandwidth, matmul_efficiency" in text
    assert listed(text) == []
    assert len(listed(printed(plan, top=4, order=parse_order("predicted_peak_bytes")))) == 4


def test_mfu_is_relative_to_the_peak_of_each_precision_or_says_why_there_is_none(plan: Plan) -> None:
    mixed = plan_of([*SMALL, "grid.axes.precision=[bf16,fp8_rowwise,fp64]", "grid.axes.tp=1", "grid.axes.pp=1"])
    text = " ".join(printed(mixed, top=1000).split())
    assert "MFU is relative to the peak in each precision, in TFLOP/s: 989 of bf16, 1,979 of fp8_rowwise" in text
    assert "no MFU in fp64: the file of cluster h200 has no such peak_flops (it has bf16, fp16, fp8, fp32)" in text
    best = next(p for p in mixed.points if p.experiment.precision == "fp8_rowwise" and p.tokens_per_s_per_gpu)
    model, rate = best.experiment.model, best.tokens_per_s_per_gpu
    share = mfu_cell(model, best.experiment.seq_len, "fp8_rowwise", rate, mixed.config.cluster)
    assert float(share) * 2 == pytest.approx(
        float(mfu_cell(model, best.experiment.seq_len, "bf16", rate, mixed.config.cluster)), abs=0.15
    )
    assert "relative" not in printed(plan), "of bf16 alone nothing has to be said"


def test_a_plan_whose_points_only_just_fit_is_not_said_to_have_no_rates() -> None:
    plan = plan_of([*SMALL, "plan.oom_margin=3"])
    tight = [p for p in plan.points if p.verdict == "run" and (p.peak_bytes or 0) > (p.limit_bytes or 0)]
    only = dataclasses.replace(plan, points=tuple(tight))
    assert tight
    assert "no step time" not in printed(only)
    assert listed(printed(only))


@pytest.mark.parametrize("name", ["predicted_peak_bytes", "peak_bytes"])
def test_conditions_on_predictions_leave_points_out(name: str, plan: Plan) -> None:
    condition = f"{name} < 60e9 and micro_batch_size > 1"
    config = compose_sweep(SMALL, extra_where=[condition])
    chosen = make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured")
    expected = [
        point.experiment.id
        for point in plan.points
        if point.peak_bytes is not None and point.peak_bytes < 60e9 and point.experiment.micro_batch_size > 1
    ]
    assert {point.experiment.id for point in chosen.points} == set(expected)
    place = f"--where '{condition}'"
    assert chosen.dropped[place] == len(plan.points) - len(expected)
    assert chosen.unpredicted == sum(point.peak_bytes is None for point in plan.points)


@pytest.mark.slow
def test_conditions_on_predictions_that_nothing_meets_are_refused() -> None:
    config = compose_sweep(SMALL, extra_where=["predicted_peak_bytes < 1"])
    with pytest.raises(InvalidSweep, match=r"no point is left of .* ruled out by .*--where 'predicted_peak_bytes < 1'"):
        make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured")


@pytest.mark.slow
def test_the_command_lists_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *SMALL, "cluster=h100_efa", "--where", "num_microbatches >= 4"]
    assert main([*words, "--out", "plan.parquet", "--top", "4"]) == 0
    text = capsys.readouterr().out
    assert len(listed(text)) == 4
    assert re.search(r"combinations; ruled out by .*--where 'num_microbatches >= 4': \d", " ".join(text.split()))
    assert main([*words, "--out", "plan.csv", "--sort", "peak_bytes:asc", "--show", "all"]) == 0
    assert "predicted_oom" in capsys.readouterr().out
    stored = read_ledger(Path("plan.parquet"))
    assert stored.schema.names == LEDGER.names  # as a sweep's own ledger.parquet
    assert min(stored["num_microbatches"].to_pylist()) >= 4
    read = pc.read_csv("plan.csv")
    assert read.column_names == LEDGER.names
    assert read["experiment_id"].to_pylist() == stored["experiment_id"].to_pylist()
    peaks, known = read["predicted_peak_bytes"].to_pylist(), stored["predicted_peak_bytes"].to_pylist()
    assert peaks == known
    # An id of the list, eight digits, is enough for explain.
    hashes = [row["experiment_id"] for row in ledger_rows(plan_of([*SMALL, "cluster=h100_efa"]))]
    assert main(["explain", listed(text)[0], "--results", "plan.parquet"]) == 0
    said = capsys.readouterr().out
    assert any(id in said for id in hashes)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sort", "speed"], "--sort speed: no column 'speed'"),
        (["--show", "invalide"], "--show invalide: no such verdict; did you mean 'invalid'?"),
        (
            ["--out", "plan.txt"],
            "the ledger is a Parquet or a CSV file; name it plan.parquet or plan.csv",
        ),
    ],
)
def test_mistakes_in_the_options_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+grid=tiny", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_reasons_are_listed_also_where_nothing_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "+grid=one_gpu", "model=llama405b", "grid.axes.micro_batch_size=1"]
    assert main(words) == 2
    assert capsys.readouterr().out == ""
    assert main([*words, "--show", "predicted_oom"]) == 2
    told = capsys.readouterr()
    assert len(listed(told.out)) == 6 and "x margin 1.1" in " ".join(told.out.split())
    assert "no point fits in memory" in told.err


def test_every_engine_has_its_best_layouts() -> None:
    found = plan_of(["grid=tiny", "grid.axes.world_size=[1]", "+grid.axes.engine=[ultrasweep,torchtitan]"])
    best = [point.experiment for point, *_ in fastest(found.points, 1)]
    assert [workload(one) for one in best] == ["tiny", f"tiny, torchtitan {best[1].engine_version}"]
