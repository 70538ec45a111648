"""Engines side by side: what is the same layout, what each engine made of it, and whose winner is another."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from analysis import report
from analysis.compare import comparison
from analysis.compare.command import main as compare_main
from analysis.drawing import style
from analysis.figures import engines_side_by_side
from analysis.index_page import headlines
from analysis.page import engines_page
from analysis.rows import cohorts, engines
from results.errors import InvalidResults
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.compared import run, sweep
from tests.analysis.conftest import frame_of
from tests.analysis.pages import QUICK, text_of
from workloads.spec.engine_versions import WITHOUT_TRANSFORMER_ENGINE
from workloads.spec.experiment import ENGINES, Experiment

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]

POINTS = [point for point in synthetic.experiments(synthetic.MODELS[:2], (4,), (1,)) if point.zero_stage in (1, 3)][:6]


def by(point: Experiment, engine: str) -> Experiment:
    version = WITHOUT_TRANSFORMER_ENGINE if engine == "megatron" else ENGINES[engine]
    fields = {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
    fields |= {"engine": engine, "engine_version": version, "gradient_accumulation_fusion": None}
    return Experiment.canonical(**fields)


def rows_of(*rates: tuple[int, str, float], **columns: object) -> list[dict[str, object]]:
    """Finished runs: which of `POINTS`, by which engine, at how many tokens/s/GPU."""
    return [
        run(by(POINTS[at], engine), rate, place, **columns) | {"attempt_id": f"{place:04d}"}
        for place, (at, engine, rate) in enumerate(rates)
    ]


TWO = [(0, "ultrasweep", 1000.0), (0, "torchtitan", 900.0), (1, "ultrasweep", 800.0), (1, "torchtitan", 1200.0)]


def test_one_engine_has_nothing_beside_it(tmp_path: Path) -> None:
    frame = frame_of(rows_of((0, "ultrasweep", 1000.0), (1, "ultrasweep", 800.0)))
    assert engines.side_by_side(frame).empty and engines.winners(frame).empty
    assert engines_page.side_by_side(frame, tmp_path, ("png",)) is None
    assert not engines_page.tables(frame) and not list(tmp_path.iterdir())


def test_the_same_layout_is_found_and_ours_is_first() -> None:
    rows = rows_of(*TWO, (2, "torchtitan", 700.0))
    rows[1]["losses"] = [12.0012, 11.5, 11.0]
    found = engines.side_by_side(frame_of(rows))
    assert found["engine"].tolist() == ["ultrasweep", "torchtitan"] * 2
    assert found["ratio"].fillna(0).tolist() == pytest.approx([0, 0.9, 0, 1.5])
    assert found["loss_difference"].fillna(0).tolist() == pytest.approx([0, 1e-4, 0, 0], rel=1e-3)
    assert found["engine_version"].tolist() == [ENGINES["ultrasweep"], ENGINES["torchtitan"]] * 2
    assert (found["peak_allocated_bytes"] == 1000 * 2**20).all()


def test_repeats_count_by_their_median_and_failures_have_no_rate() -> None:
    rows = rows_of(
        (0, "ultrasweep", 1000.0), (0, "torchtitan", 900.0), (0, "torchtitan", 500.0), (0, "torchtitan", 980.0)
    )
    failed = synthetic.attempt(by(POINTS[1], "torchtitan"), 8, outcome="oom")
    found = engines.side_by_side(frame_of([*rows, failed, *rows_of((1, "ultrasweep", 700.0))]))
    assert found.loc[found["engine"] == "torchtitan", "tokens_per_s_per_gpu"].fillna(-1).tolist() == [900.0, -1]
    assert found.loc[found["outcome"] == "oom", ["ratio", "loss_difference", "first_loss"]].isna().all(axis=None)


def test_each_engine_has_its_own_winner() -> None:
    best = engines.winners(frame_of(rows_of(*TWO))).set_index("engine")
    assert best["tokens_per_s_per_gpu"].to_dict() == {"ultrasweep": 1000.0, "torchtitan": 1200.0}
    assert best["layout"].nunique() == 2 and not best["same"].any()
    agreed = engines.winners(frame_of(rows_of(*TWO[:3], (1, "torchtitan", 100.0))))
    assert agreed["same"].all() and agreed["layout"].nunique() == 1


def test_rows_of_other_clusters_and_methods_stay_apart() -> None:
    rows = rows_of(*TWO[:2])
    rows[1]["cluster"] = "h100_efa"
    assert engines.side_by_side(frame_of(rows)).empty
    rows = rows_of(*TWO[:2])
    rows[1]["method"] = "rehearsed"
    assert engines.winners(frame_of(rows)).empty


def test_compare_puts_two_engines_of_one_folder_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep(tmp_path / "both", *rows_of(*TWO))
    found = comparison.compare(folder, folder, engines=("ultrasweep", "torchtitan"))
    assert found.pairs["ratio"].tolist() == pytest.approx([0.9, 1.5])
    assert set(found.pairs["verdict"]) == {"method changed"} and found.pairs["same_losses"].all()
    assert (found.pairs["engine_b"] == "torchtitan").all()
    with pytest.raises(InvalidResults, match="B has no rows of megatron, only torchtitan and ultrasweep"):
        comparison.compare(folder, folder, engines=("ultrasweep", "megatron"))
    out = ("--out", str(tmp_path / "out"))
    assert compare_main([str(folder), str(folder), "--engines", "ultrasweep,torchtitan", *out]) == 0
    assert "A and B differ in engine (A ultrasweep, B torchtitan)" in " ".join(capsys.readouterr().out.split())
    assert compare_main([str(folder), str(folder), "--engines", "torchtitan", *out]) == 2
    assert "is not two engines" in capsys.readouterr().err


def test_what_an_engine_ran_without_is_in_every_title_and_on_every_figure(tmp_path: Path) -> None:
    frame = frame_of(rows_of((0, "ultrasweep", 1000.0), (0, "megatron", 900.0)))
    by_engine = {part.frame["engine"].iloc[0]: part for part in cohorts.split(frame)}
    assert by_engine["megatron"].title == "Measured: h200, by megatron without Transformer Engine"
    assert by_engine["megatron"].stamp == "megatron without Transformer Engine"
    assert by_engine["ultrasweep"].stamp == ""
    assert not any(said.concluded == "Not measured." for said in headlines.trust(by_engine["megatron"]))
    rehearsed = cohorts.split(frame.assign(method="rehearsed"))
    assert all(headlines.trust(part)[0].concluded == "Not measured." for part in rehearsed)
    assert [part.stamp for part in cohorts.split(frame.assign(engine_version=None))] == ["", ""]
    told = engines_page.side_by_side(frame, tmp_path, ("svg",))
    assert told is not None and "megatron without Transformer Engine" in told.sentences[0]
    assert "without Transformer Engine" in (tmp_path / "engines_side_by_side.svg").read_text()
    for table, column in ((told.winners, "Engine"), (told.layouts, "Engine")):
        assert table.rows[1][table.header.index(column)] == "megatron 0.16.1+1 without Transformer Engine"


@pytest.mark.parametrize(
    ("version", "limits"),
    [
        ("0.16.1+1 without Transformer Engine", "without Transformer Engine"),
        ("0.16.1+1", ""),
        ("after the pipeline rewrite", ""),
        ("1.2 (nightly of May)", ""),
        ("2 without", ""),
        ("built without optimisation", ""),
    ],
)
def test_only_words_after_without_limit_an_engine(version: str, limits: str) -> None:
    rows = rows_of((0, "megatron", 900.0))
    [part] = cohorts.split(frame_of(rows).assign(engine_version=version))
    assert part.title == f"Measured: h200, by megatron {limits}".rstrip()
    assert part.stamp == (f"megatron {limits}" if limits else "")


def test_a_limit_of_some_rows_is_not_one_of_all() -> None:
    rows = rows_of((0, "megatron", 900.0), (1, "megatron", 800.0))
    [part] = cohorts.split(frame_of(rows).assign(engine_version=["0.16.1+1", "0.16.1+1 without Transformer Engine"]))
    assert part.title == "Measured: h200, by megatron partly without Transformer Engine"


def rates_of(*rates: tuple[str, str, float], **columns: object) -> pd.DataFrame:
    """Rows to draw: model, layout and our throughput; torchtitan has 0.9 of it."""
    common = {"method": "measured", "cluster": "h200", "measurement_version": 1, "world_size": 2} | columns
    return pd.DataFrame(
        common
        | {"workload": model, "layout": layout, "engine": engine, "engine_version": "1"}
        | {"tokens_per_s_per_gpu": rate * share}
        for model, layout, rate in rates
        for engine, share in (("ultrasweep", 1.0), ("torchtitan", 0.9))
    )


def test_every_model_has_a_panel_with_an_x_axis_of_its_own() -> None:
    rates = [("large", "dp2", 9000.0), ("small", "tp2", 40_000.0), ("small", "dp2", 50_000.0)]
    figure = engines_side_by_side.draw(rates_of(*rates), "tokens/s/GPU")
    small, large = figure.axes
    assert [ax.get_title("left") for ax in figure.axes] == ["small, 2 GPUs", "large, 2 GPUs"]
    assert small.get_xlim()[0] == large.get_xlim()[0] == 0
    assert 50_000 < small.get_xlim()[1] < 60_000 and 9000 < large.get_xlim()[1] < 10_000
    named = {label.get_text(): place for label, place in zip(small.get_yticklabels(), small.get_yticks(), strict=True)}
    assert named == {"dp2": 1, "tp2": 0}
    [alone] = engines_side_by_side.draw(rates_of(*rates[1:]), "tokens/s/GPU").axes
    assert alone.get_title("left") == ""
    assert [label.get_text() for label in alone.get_yticklabels()] == ["small · 2 · dp2", "small · 2 · tp2"]
    here, there = rates_of(rates[0]), rates_of(rates[0], cluster="h100_efa")
    figure = engines_side_by_side.draw(pd.concat([here, there], ignore_index=True), "tokens/s/process")
    assert [ax.get_title("left") for ax in figure.axes] == [
        f"large, 2 processes, {name}" for name in ("h200", "h100_efa")
    ]


def test_panels_share_the_layouts_that_are_drawn() -> None:
    small = [("small", f"small {at}", 50_000.0 - at) for at in range(60)]
    large = [("large", f"large {at}", 9000.0 - at) for at in range(5)]
    figure = engines_side_by_side.draw(rates_of(*small, *large), "tokens/s/GPU")
    drawn = [[label.get_text() for label in ax.get_yticklabels()] for ax in figure.axes]
    assert drawn == [[f"small {at}" for at in range(35)], [f"large {at}" for at in range(5)]]
    with pytest.raises(style.NothingToDraw, match="no layout finished with more than one engine"):
        engines_side_by_side.draw(rates_of(*large).assign(tokens_per_s_per_gpu=float("nan")), "tokens/s/GPU")


@pytest.mark.slow
def test_the_report_shows_engines_side_by_side_only_where_there_are_several(tmp_path: Path) -> None:
    one = report.build(sweep(tmp_path / "one", *rows_of(TWO[0], TWO[2])), tmp_path / "r1", QUICK)
    assert "Engines side by side" not in text_of(one) and not (one.parent / "tables" / "engines.csv").exists()
    two = report.build(sweep(tmp_path / "two", *rows_of(*TWO)), tmp_path / "r2", QUICK)
    said = text_of(two)
    assert "Engines side by side" in said and "The engines' winners differ in 1 of 1 model and size." in said
    assert "torchtitan runs at 1.20 times the first engine's throughput (median of 2 layouts, 0.90 to 1.50)." in said
    assert len(pd.read_csv(two.parent / "tables" / "engines.csv")) == 4
    assert (two.parent / "figures" / "engines_side_by_side.png").stat().st_size > 5000
    numbers = json.loads((two.parent / "report.json").read_text())
    assert [row["ratio"] for row in numbers["engines"]] == [None, pytest.approx(0.9), None, pytest.approx(1.5)]
    assert {row["engine"] for row in numbers["engine_winners"]} == {"ultrasweep", "torchtitan"}


@pytest.mark.slow
def test_the_part_opens_and_fits_a_phone(tmp_path: Path, browser: Browser) -> None:
    page = report.build(sweep(tmp_path / "two", *rows_of(*TWO)), tmp_path / "out", QUICK)
    for width in (1400, 375):
        browser.open(page, size=(width, 900))
        browser.wait("window.Report?.ready")
        browser.js("document.getElementById('engines').open = true")
        assert browser.js("document.documentElement.scrollWidth") <= width
        assert not browser.console()
