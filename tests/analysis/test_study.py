"""The published study replayed from its raw table: figures and tables against the published values."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from analysis import report
from analysis.claims.published import WINNERS
from analysis.drawing import style
from analysis.figures import best_configurations, bubble, registry
from analysis.options import Options
from analysis.rows import by_degree, collective_bandwidth, labels, metrics, winners
from analysis.rows.cohorts import split
from analysis.rows.load import load
from tests.analysis.figure_texts import assert_texts_fit, words
from tests.analysis.pages import text_of
from tests.fixed_task import fixed_task_seconds
from tests.results.tables.test_reference import ROW, write
from tests.sampling import sampled

pytestmark = pytest.mark.drawn(one_in=2)

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT.parent / "shared" / "study"
TABLE = STUDY / "bench_final2_mfu2.csv"
LABELS = {"1B": "1.34B", "3B": "3.57B", "8B": "8.86B", "80B": "80B", "469B": "469B"}
LAYOUT = {"dp": "dp", "tp": "tp", "pp": "pp", "acc": "batch_accum", "mbs": "mbs", "zero": "zero_stage"}


def published(path: str) -> pd.DataFrame:
    file = STUDY / path
    if not file.exists():
        pytest.skip(f"the study's {path} is not at {file}")
    return pd.read_csv(file)


@pytest.fixture(scope="module")
def study() -> pd.DataFrame:
    """The labelled frame of the whole published table."""
    if not TABLE.exists():
        pytest.skip(f"the study's raw table is not at {TABLE}")
    [cohort] = split(load(TABLE).attempts)
    return cohort.frame


@pytest.mark.slow
def test_labels_of_the_study_name_its_engine_alone(tmp_path: Path) -> None:
    """On the page, on its parts and in its pictures; the versions of the study are texts of its own."""
    before = ROW | {"after_pp_fix": False, "dp": 4, "pp": 2, "batch_accum": "32.0"}
    table, options = write(tmp_path / "study.csv", ROW, before), Options(figures=("outcomes",), formats=("svg",))
    page = report.build(table, tmp_path / "out", options)
    [part] = json.loads((page.parent / "report.json").read_text())["parts"]
    assert (part["title"], part["stamp"]) == ("Measured: h100_efa, by nanotron", None)
    assert set(re.findall(r"by nanotron[^\"<.,·]*", page.read_text())) == {"by nanotron"}
    [picture] = page.parent.glob("figures/*.svg")
    assert "nanotron" not in picture.read_text()


@pytest.mark.slow
def test_published_heatmap_cell_by_cell(study: pd.DataFrame) -> None:
    table = best_configurations.data(study)
    found = table[table["rank_by"] == "published_mfu"].set_index(["model", "nodes"])
    assert set(found.index) == set(WINNERS)
    for key, cell in WINNERS.items():
        row = found.loc[key]
        assert row["mfu_percent"] == pytest.approx(cell.mfu_percent, abs=0.0051), key
        assert row["memory_gb"] == pytest.approx(cell.memory_gb, abs=0.0051), key
        assert tuple(int(row[name]) for name in LAYOUT) == cell.layout, key


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "prefix"), [("published_mfu", "pub"), ("tokens_per_s", "true")])
def test_both_rankings_name_the_rows_of_the_reference(study: pd.DataFrame, rule: str, prefix: str) -> None:
    expected = published("best_configs_published_vs_corrected.csv")
    expected = expected.assign(model=expected["model"].map(LABELS)).set_index(["model", "nodes"]).sort_index()
    table = best_configurations.data(study)
    found = table[table["rank_by"] == rule].set_index(["model", "nodes"]).sort_index()
    assert list(found.index) == list(expected.index)
    assert found["tokens_per_s_per_gpu"].tolist() == pytest.approx(expected[f"{prefix}_tok/s/gpu"].tolist())
    assert found["mfu_percent"].tolist() == pytest.approx(expected[f"{prefix}_mfu"].tolist())
    assert found["memory_gb"].tolist() == pytest.approx(expected[f"{prefix}_Mem Res (GB)"].tolist())
    for ours, theirs in LAYOUT.items():
        assert found[ours].astype(int).tolist() == expected[f"{prefix}_{theirs}"].astype(int).tolist()


@pytest.mark.slow
def test_seven_of_27_winners_change(study: pd.DataFrame) -> None:
    table = best_configurations.data(study)
    by_rule = {rule: table[table["rank_by"] == rule].set_index(["model", "nodes"]) for rule in winners.RULES}
    ids = [frame["attempt_id"].sort_index() for frame in by_rule.values()]
    changed = ids[0] != ids[1]
    assert len(changed) == 27
    assert sorted(changed[changed].index) == [*(("1.34B", n) for n in (1, 2, 4, 8)), *(("3.57B", n) for n in (2, 4, 8))]
    pure = by_rule["tokens_per_s"].loc[changed[changed].index]
    assert ((pure["tp"] == 1) & (pure["pp"] == 1)).all()


@pytest.mark.slow
def test_a_cell_won_by_another_model_is_marked_and_models_are_ranked_apart(study: pd.DataFrame) -> None:
    table = best_configurations.data(study).set_index(["model", "nodes", "rank_by"])
    assert table.loc[("80B", 8, "published_mfu"), "shape"] == "80B (8 kv heads)"
    assert (table["shape"] != table.index.get_level_values("model")).sum() == 2
    best = metrics.best_configurations(study)
    apart = best[(best["world_size"] == 64) & best["model"].str.startswith("80B")]
    assert set(apart["model"]) == {"80B", "80B (8 kv heads)", "80B (vocabulary 49,152)"}
    shown = words(registry.FIGURES[1].draw(study))
    assert any("a different model from the rest of its row: 80B (8 kv heads)" in text for text in shown)
    assert {"44.32 %", "41.8 GiB", "dp1 tp4 pp16 †"} <= shown


def test_utilization_by_our_formulas(study: pd.DataFrame) -> None:
    ok = study[study["outcome"] == "ok"]
    counted = 6 * ok["counted_params"] + 12 * ok["num_layers"] * ok["hidden_size"] * ok["seq_len"]
    theirs = counted * ok["tokens_per_s_per_gpu"] / ok["peak_flops"]
    assert theirs.tolist() == pytest.approx(ok["published_mfu"].tolist(), rel=1e-9)
    # Ours counts every parameter, theirs keeps three digits of the count.
    assert ok["mfu_playbook"].tolist() == pytest.approx(ok["published_mfu"].tolist(), rel=0.002)
    # Their model FLOPs, printed to 0.01 TFLOP/s, are PaLM's.
    assert (ok["mfu_palm"] * 989e12 - ok["published_model_flops_per_s"]).abs().max() < 0.02e12


def test_scaling_of_data_parallelism_is_the_published_one(study: pd.DataFrame) -> None:
    figure = published("figures/dp_scaling.csv")
    table = by_degree.data_parallel(study)
    found = table[table["workload"] == "1.34B"].set_index("degree")
    rates = figure[figure["name"] == "Throughput (tokens/sec/GPU)"].set_index("x")["y"]
    assert found["tokens_per_s_per_gpu"].to_dict() == rates.to_dict()
    lost = figure[(figure["type"] == "bar") & (figure["name"] != "Throughput (tokens/sec/GPU)")].set_index("x")["y"]
    assert found["lost"].dropna().to_dict() == pytest.approx(lost.to_dict())
    # The published memory line is that of micro-batch 1 everywhere; ours is of the runs that the bars show.
    memory = figure[figure["name"] == "Memory Usage (GB)"].set_index("x")["y"]
    plain = found[found["micro_batch_size"] == 1]
    assert plain["memory_gib"].to_dict() == pytest.approx(memory[plain.index].to_dict(), abs=0.011)
    assert found.loc[8, "memory_gib"] == pytest.approx(50.18)


def test_bandwidth_is_the_published_one(study: pd.DataFrame) -> None:
    figure = published("figures/pp_comm_bandwidth.csv")
    table = collective_bandwidth.by_nodes(study)
    whole = table[(table["scope"] == "world") & (table["regime"] == "all")]
    for number, (name, title) in enumerate(
        {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}.items()
    ):
        found = whole[whole["collective"] == name].sort_values("nodes")
        assert found["nodes"].tolist() == [1, 2, 4, 8, 16, 32, 64]
        assert found["mean"].tolist() == pytest.approx(figure[figure["name"] == title]["y"].tolist())
        band = figure[figure["trace"] == 2 * number]["y"].tolist()  # upper edge, then the lower one backwards
        assert found["q95"].tolist() == pytest.approx(band[:7])
        assert found["q05"].tolist() == pytest.approx(band[:6:-1])
    quantiles = published("bandwidth_by_nodes_quantiles.csv").iloc[2:, :4].astype(float)
    median = whole[whole["collective"] == "all_reduce"].sort_values("nodes")["median"]
    assert median.tolist() == pytest.approx(quantiles.iloc[:, 2].tolist(), abs=0.051)


def test_regimes_stand_apart_in_the_bandwidth_table(study: pd.DataFrame) -> None:
    table = collective_bandwidth.by_nodes(study)
    table = table[(table["collective"] == "all_reduce") & (table["scope"] == "world")].set_index(["regime", "nodes"])
    assert table.loc["fast"].index.min() == 8
    assert table.loc[("slow", 64), "median"] == pytest.approx(13.3, abs=0.1)
    assert table.loc[("fast", 64), "median"] > 160
    assert table.loc[("fast", 16), "runs"] + table.loc[("slow", 16), "runs"] == table.loc[("all", 16), "runs"]


def test_bubble_sizes_are_the_published_ones() -> None:
    figure = published("figures/pp_bubblesize.csv")
    sizes = bubble.sizes()
    found = {f"m={m}, v={v}": value for m, v, value in zip(sizes["m"], sizes["v"], sizes["bubble"], strict=True)}
    assert found == figure.set_index("y")["x"].to_dict()
    assert sizes["bubble"].is_monotonic_increasing


def test_tensor_parallelism_falls_beyond_the_node_and_pipelines_are_after_the_rewrite(study: pd.DataFrame) -> None:
    table = by_degree.tensor_parallel(study).set_index(["workload", "degree"])
    for model in ("1.34B", "3.57B", "8.86B"):
        assert table.loc[(model, 16), "lost_share"] > 0.2 > table.loc[(model, 8), "lost_share"]
        assert table.loc[(model, 32), "largest_micro_batch"] > table.loc[(model, 2), "largest_micro_batch"]
    used = by_degree.pipeline_parallel(study)
    assert set(used["series"]) == set(by_degree.PP_SERIES)
    versions = study.set_index("attempt_id").loc[used["attempt_id"], "after_pp_fix"]
    assert versions.all()


def test_outcomes_by_label_are_the_published_counts(study: pd.DataFrame) -> None:
    counts = study.assign(workload=labels.study_label(study)).groupby(["workload", "world_size", "outcome"]).size()
    tables = counts.unstack(fill_value=0)
    assert (tables.loc[("1.34B", 8), "ok"], tables.loc[("1.34B", 8)].sum()) == (32, 65)
    assert (tables.loc[("80B", 64), "ok"], tables.loc[("80B", 64)].sum()) == (19, 150)
    assert (tables.loc[("469B", 512), "ok"], tables.loc[("469B", 512)].sum()) == (7, 114)


NOT_OF_THE_STUDY = {
    *("breakdown", "breakdown_by_axis", "breakdown_by_kind", "device_hours", "failures_by_phase", "memory_timeline"),
    *("memory_by_category", "predicted_vs_found", "prediction_depths", "overhead"),
}
"""Figures of what the study has not recorded."""
DRAWN = [spec.name for spec in registry.FIGURES if spec.name not in NOT_OF_THE_STUDY]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(DRAWN, 6, seconds=1))
def test_figures_of_the_study(study: pd.DataFrame, name: str) -> None:
    [spec] = [spec for spec in registry.FIGURES if spec.name == name]
    assert_texts_fit(spec.draw(study))


@pytest.mark.slow
def test_what_the_study_has_not_recorded_is_not_drawn(study: pd.DataFrame) -> None:
    specs = [spec for spec in registry.FIGURES if spec.name in NOT_OF_THE_STUDY]
    assert len(specs) == len(NOT_OF_THE_STUDY)
    for spec in specs:
        with pytest.raises(style.NothingToDraw):
            spec.draw(study)


@pytest.mark.slow
def test_the_report_takes_the_published_file(study: pd.DataFrame, tmp_path: Path) -> None:
    yardstick = fixed_task_seconds()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "analysis.report", str(TABLE), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    yardstick = max(yardstick, fixed_task_seconds())  # a busy machine slows both
    used = after.ru_utime - before.ru_utime
    print(f"{time.monotonic() - start:.1f} s, of processors {used:.1f} s, {used / yardstick:.0f} times the fixed task")
    assert used < 150 * yardstick  # 44 times on idle cores
    assert not any(line.endswith(("| torch", "  torch")) for line in done.stderr.splitlines())
    assert "peak memory" in done.stderr
    assert (tmp_path / "out" / "index.html").stat().st_size < 850_000
    shown = text_of(tmp_path / "out" / "index.html") + text_of(tmp_path / "out" / "claims.html")
    assert "Measured: h100_efa, by nanotron" in shown and "nanotron the pipeline" not in shown
    assert not any("nanotron the" in path.read_text() for path in (tmp_path / "out" / "figures").glob("*.svg"))
    table = pd.read_csv(tmp_path / "out" / "tables" / "best_configurations.csv")
    assert table.columns[:12].tolist() == [
        *("model", "nodes", "rank_by", "mfu_percent", "memory_gb", "dp", "tp", "pp", "acc", "mbs", "zero"),
        "tokens_per_s_per_gpu",
    ]
    assert len(table) == 54
    assert set(table["engine"]) == {"nanotron"}
    found = pd.read_csv(tmp_path / "out" / "tables" / "claims.csv")
    assert found.columns[:4].tolist() == ["claim", "data", "verdict", "evidence"]
    assert "7 of 27 winners change" in (tmp_path / "out" / "claims.html").read_text()
    for spec in registry.FIGURES:
        if spec.data is not None:
            assert (tmp_path / "out" / "tables" / f"{spec.name}.csv").is_file()


@pytest.mark.slow
def test_a_csv_that_is_not_the_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("model,rate\nx,1\n")
    done = subprocess.run(
        [sys.executable, "-m", "analysis.report", str(tmp_path / "mine.csv"), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'mine.csv'} is not the study's table: it has no column job_id")
    assert not (tmp_path / "out").exists()
