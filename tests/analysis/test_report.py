"""The report of good rows: what the page says, in which order, and what lies beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from analysis import report
from analysis.explorer import row_data
from analysis.figures import registry
from analysis.index_page import next_runs
from analysis.page import sentences
from analysis.rows import metrics
from analysis.rows.cohorts import split
from analysis.rows.load import load
from results.tables import store
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from tests.analysis.pages import POINTS, QUICK, links, text_of

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]

RECORDED = Path(__file__).resolve().parents[2] / "results" / "recorded"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a half-finished measured sweep and a rehearsed one beside it."""
    folder = tmp_path_factory.mktemp("results")
    rows = synthetic.attempts(POINTS[:24])
    rows[3] |= {"loss_agrees": False}
    synthetic.make_sweep(folder / "eight", rows, waiting=POINTS[24:30])
    rehearsed = [row | {"attempt_id": f"r{row['attempt_id']}", "method": "rehearsed"} for row in rows[:8]]
    synthetic.make_sweep(folder / "one", rehearsed)
    return report.build(folder, folder / "report")


def test_page_says_what_was_run_and_what_is_missing(whole: Path) -> None:
    text = text_of(whole)
    assert "32 points attempted in 2 sweeps (eight and one): 24 measured and 8 rehearsed" in text
    assert "Unfinished: 6 of 38 planned points have no result yet" in text
    assert "42 grid points: 38 to run, 2 excluded by a rule and 2 predicted not to fit" in text
    assert "they are not ranked, since a wrong layout can be fast" in text
    assert re.search(
        r"[678] experiments were both rehearsed and measured: the rehearsed peak memory is off by 0.00 %", text
    )
    assert "Rows of different kinds are never pooled" in text


def test_page_names_the_winner_with_its_numbers(whole: Path) -> None:
    frame = pd.read_csv(whole.parent / "tables" / "best_configurations.csv")
    for row in frame[frame["method"] == "measured"].to_dict("records"):
        assert row["layout"] in text_of(whole)
        assert f"{row['tokens_per_s_per_gpu']:,.0f}" in text_of(whole)


def test_measured_and_rehearsed_stand_apart(whole: Path) -> None:
    parts = re.findall(r'<option value="([^"]+)">', whole.read_text())
    assert parts == ["measured-h200", "rehearsed-h200"]
    ranked = pd.read_csv(whole.parent / "tables" / "ranked.csv")
    assert set(ranked["method"]) == {"measured", "rehearsed"}
    firsts = ranked[ranked["rank"] == 1]
    assert not firsts.duplicated(["method", "cluster", "workload", "world_size"]).any()
    assert (firsts[firsts["method"] == "measured"]["workload"] == firsts[firsts["method"] == "measured"]["model"]).all()


def test_figures_of_what_was_not_measured_say_so_themselves(whole: Path) -> None:
    figures = whole.parent / "figures"
    stamped = {path.name: "communication is modelled" in path.read_text() for path in figures.glob("*.svg")}
    assert any(stamped.values()) and not all(stamped.values())
    assert all(told == ("-rehearsed-" in name) for name, told in stamped.items()), stamped
    [traced] = split(frame_of([synthetic.attempt(POINTS[1], 1, method="rehearsed_fake")]))
    assert "times are estimates" in traced.stamp


def test_page_is_self_contained_and_every_link_leads_somewhere(whole: Path) -> None:
    found, text = links(whole), whole.read_text()
    for kind in ("png", "svg"):
        shown = {link.removeprefix("figures/") for link in found if link.endswith(f".{kind}")}
        assert shown == {path.name for path in (whole.parent / "figures").glob(f"*.{kind}")}
    for link in found:
        if link.startswith("data:"):
            continue
        assert "://" not in link
        assert f'id="{link[1:]}"' in text if link.startswith("#") else (whole.parent / link).is_file()
    assert not re.search(r"<script[^>]+src=", text)
    assert "@import" not in text
    identities = re.findall(r' id="([^"]+)"', text)
    assert len(identities) == len(set(identities))


def test_every_figure_has_its_files_and_its_picture_or_a_reason(whole: Path) -> None:
    index, text = whole.read_text(), text_of(whole)
    assert f'id="measured-h200-{registry.FIGURES[0].name}"' in index
    for spec in registry.FIGURES:
        paths = [whole.parent / "figures" / f"{spec.name}-measured-h200.{kind}" for kind in ("png", "svg")]
        if f'id="measured-h200-{spec.name}"' in index:
            assert all(path.stat().st_size > 1000 for path in paths), spec.name
        else:
            assert f"{spec.title}: no " in text
            assert not any(path.exists() for path in paths), spec.name
    assert (whole.parent / "figures" / "outcomes-measured-h200.png").read_bytes().startswith(b"\x89PNG")


def test_texts_of_a_vector_figure_are_texts(whole: Path) -> None:
    assert ">Number of GPUs</text>" in (whole.parent / "figures" / "outcomes-measured-h200.svg").read_text()


def test_every_figure_with_values_has_them_as_a_table(whole: Path) -> None:
    for spec in registry.FIGURES:
        assert (whole.parent / "tables" / f"{spec.name}.csv").exists() == (spec.data is not None), spec.name
    best = pd.read_csv(whole.parent / "tables" / "best_configurations.csv")
    asked = "model nodes rank_by mfu_percent memory_gb dp tp pp acc mbs zero tokens_per_s_per_gpu"
    assert best.columns[:12].tolist() == asked.split()
    claims = pd.read_csv(whole.parent / "tables" / "claims.csv")
    assert claims.columns[:4].tolist() == ["claim", "data", "verdict", "evidence"]


def test_the_page_answers_in_order(whole: Path) -> None:
    found = re.findall(r"<h2[^>]*>([^<]+)</h2>", whole.read_text())
    assert found == ["The answer", "Every run", "Why", "Cost", "What failed", "How far to trust it", "Files"]


def test_there_is_one_page_and_its_numbers_as_a_file(whole: Path) -> None:
    assert {path.name for path in whole.parent.iterdir() if path.is_file()} == {
        "index.html",
        "claims.html",
        "report.json",
        "report_files.txt",
    }


def test_points_that_the_sweep_answered_itself_are_planned_points(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", [synthetic.attempt(p, i) for i, p in enumerate(POINTS[:4])])
    rows = store.read_ledger(sweep).to_pylist()
    own = store.read_attempts(sweep)["attempt_id"].to_pylist()
    for row, answer in zip(rows, [own[0], own[1], "of-another-sweep"], strict=False):
        row |= {"verdict": "cached", "cached_attempt": answer}
    store.write_ledger(sweep, rows)
    text = text_of(report.build(sweep, tmp_path / "out", QUICK))
    assert (
        "6 grid points: 3 to run, 1 answered by the rows of another sweep, 1 excluded by a rule and "
        "1 predicted not to fit" in text
    )


def test_rehearsed_times_are_cautioned_against_and_compared(tmp_path: Path) -> None:
    split_point = next(p for p in POINTS if p.tp == 2 and p.dp == 1)
    points = [POINTS[0], split_point]
    measured = [synthetic.attempt(p, i, outcome="ok") for i, p in enumerate(points)]
    folder = tmp_path / "results"
    synthetic.make_sweep(folder / "real", measured)
    rehearsed = [
        row | {"attempt_id": f"r{i}", "method": "rehearsed", "step_time_s": (1, 0.8)[i] * row["step_time_s"]}
        for i, row in enumerate(measured)
    ]
    synthetic.make_sweep(folder / "one", rehearsed)
    text = text_of(report.build(folder, tmp_path / "out", QUICK))
    assert "steps with tensor or context parallelism mostly come out too short, which would rank both too high" in text
    assert (
        "Rehearsed step times differ from the measured ones by −20.0 % to −20.0 % (median −20.0 %, n = 1) with tensor "
        "parallelism and +0.0 % to +0.0 % (median +0.0 %, n = 1) without it." in text
    )


def test_a_cpu_has_processes_in_the_list_of_runs() -> None:
    for backend, names in (("cpu", ("CPU processes", "tokens/s/process")), ("cuda", ("GPUs", "tokens/s/GPU"))):
        frame = frame_of([synthetic.attempt(POINTS[0], outcome="ok", backend=backend)])
        labels = {column["name"]: column["label"] for column in row_data.encode(frame, [])["columns"]}
        assert (labels["world_size"], labels["tokens_per_s_per_gpu"]) == names


def test_shipped_sweeps_wait_for_nothing() -> None:
    """Of 84 points, 11 have no row, and nobody will run them: that is a fact about these rows, not a warning."""
    results = load(RECORDED / "h100x1_validation")
    assert sentences.unfinished(results) is None
    assert next_runs.of_cells(results, results.attempts) == []
    assert sentences.what_was_run(results)[-1] == "11 points of these sweeps did not run before they ended."


def test_the_caution_on_rehearsals_is_what_the_recorded_rows_show() -> None:
    frame = store.read_attempts(RECORDED).to_pandas()
    both = metrics.rehearsed_beside_measured(frame)
    learned = both["experiment_id"].isin(frame.loc[frame["routing"] == "learned", "experiment_id"])
    staged = both["experiment_id"].isin(frame.loc[frame["pp"] > 1, "experiment_id"])
    assert both.loc[~learned & ~staged, "peak_difference"].abs().max() < 0.002
    assert both.loc[~learned & staged, "peak_difference"].abs().max() < 0.005  # of messages that are on their way
    assert learned.sum() >= 10
    assert both.loc[learned, "peak_difference"].abs().max() < 0.015  # how many tokens a rank gets moves by the step
    times, apart = both["step_time_difference"], (both["tp"] > 1) | (both["cp"] > 1)
    # Later ones count that ranks wait for each other: nearer, but too short where the host sets the pace.
    rehearsed = frame[frame["method"].str.startswith("rehearsed")].groupby("experiment_id")["started_at"].max()
    later = both["experiment_id"].map(rehearsed) >= pd.Timestamp("2026-11-26", tz="UTC")
    assert later.sum() > 15 and times[later & apart].abs().median() < 0.04 and times[later].min() < -0.1
    times, apart = times[~later], apart[~later]
    # Most: where the host sets the pace they may be too long, and hosts are not as fast at all times.
    assert times[apart].median() < -0.1 and (times[apart] < -0.03).mean() > 0.85
    assert -0.06 < times[~apart].median() < 0 and times[~apart].between(-0.11, 0.02).mean() > 0.8


def test_another_device_than_the_clusters_is_said_first(tmp_path: Path) -> None:
    source = "none: ran on NVIDIA H200, cluster h100_efa describes NVIDIA H100 80GB HBM3"
    row = synthetic.attempt(
        *(POINTS[0], 0), outcome="ok", method="rehearsed", cluster="h100_efa", peak_flops=None, peak_flops_source=source
    )
    index = report.build(synthetic.make_sweep(tmp_path / "s", [row]), tmp_path / "out", QUICK)
    said = "1 row ran on NVIDIA H200 for cluster h100_efa, whose devices are NVIDIA H100 80GB HBM3"
    text = text_of(index)
    assert text.index(said) < text.index("Memory limit")


def test_ranked_table_holds_every_finished_run_in_full_precision(whole: Path) -> None:
    ranked = pd.read_csv(whole.parent / "tables" / "ranked.csv")
    [measured, _] = split(store.read_attempts(whole.parent.parent).to_pandas())
    expected = metrics.ranked(measured.frame)
    found = ranked[ranked["method"] == "measured"]
    assert found["experiment_id"].tolist() == expected["experiment_id"].tolist()
    assert found["tokens_per_s_per_gpu"].tolist() == pytest.approx(expected["tokens_per_s_per_gpu"].tolist(), rel=1e-12)
    outcomes = pd.read_csv(whole.parent / "tables" / "outcomes.csv")
    assert outcomes["points"].sum() == 32


def test_retried_points_count_once() -> None:
    frame = frame_of([synthetic.attempt(POINTS[0], i, outcome="hang", attempt_number=i + 1) for i in range(3)])
    [cohort] = split(frame)
    assert metrics.group_counts(cohort.frame)["hang"].sum() == 1
