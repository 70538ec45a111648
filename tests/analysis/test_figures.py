"""Structure of the figures: what they show, and that no text is clipped or lies on another."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures import (
    all_runs,
    best_configurations,
    conclusions,
    cost,
    memory_by_category,
    outcomes,
    overhead,
    predicted_vs_found,
    registry,
)
from analysis.figures.spec import FigureSpec
from analysis.rows import metrics
from analysis.rows.cohorts import split
from results.text.numbers import format_number
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of, recorded_cohorts
from tests.analysis.drawn_bars import boxes
from tests.analysis.figure_texts import assert_texts_fit, words
from tests.sampling import sampled

pytestmark = pytest.mark.drawn(one_in=2)


def drawn(frame: pd.DataFrame) -> dict[str, Figure]:
    """Every figure that the rows can make, by name; what they cannot make says why in a sentence."""
    figures = {}
    for spec in registry.FIGURES:
        try:
            figures[spec.name] = spec.draw(frame)
        except style.NothingToDraw as reason:
            assert str(reason).startswith("no "), reason
    return figures


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    sampled([spec for spec in registry.FIGURES if spec.name != "bandwidth"], 16, seconds=0.5),
    ids=lambda spec: spec.name,
)
def test_no_text_is_clipped_or_overlaps_and_axes_have_labels(spec: FigureSpec, frame: pd.DataFrame) -> None:
    if spec.name == "pp_scaling":  # two depths of the same schedule on as many devices
        [cohort] = split(frame_of(synthetic.attempts(list(synthetic.experiments(world_sizes=(4,))))))
        frame = cohort.frame
    if spec.name == "breakdown":  # which is of runs without a profiled step
        frame = frame.assign(breakdown_step_time_s=None)
    if spec.name == "prediction_depths":  # the recorded runs that were rehearsed too
        ready = (cohort.frame for cohort in recorded_cohorts())
        frame = next(part for part in ready if part["rehearsed_step_time_s"].notna().any())
    figure = spec.draw(frame)
    assert_texts_fit(figure)
    assert figure.get_figwidth() <= style.MOST_WIDTH_IN
    labelled = [ax.get_xlabel() or ax.get_ylabel() for ax in figure.axes if ax.get_visible()]
    assert any(labelled)


def scattered(ax: Axes) -> list[PathCollection]:
    return [collection for collection in ax.collections if isinstance(collection, PathCollection)]


def test_all_runs_has_one_mark_a_point(frame: pd.DataFrame) -> None:
    figure = all_runs.draw(frame)
    assert sum(len(marks.get_offsets()) for marks in scattered(figure.axes[0])) == len(frame)
    [legend] = figure.legends
    names = {text.get_text() for text in legend.get_texts()}
    assert "out of memory" in names
    assert "diverged" not in names


def test_marks_stay_inside_their_cell() -> None:
    for most in (1, 5, 37, 400):
        places = all_runs._places(most, most)
        assert abs(places).max() < 0.5
        assert len({tuple(place) for place in places.round(6)}) == most


@pytest.mark.slow
def test_memory_stacks_add_up_and_show_the_device(frame: pd.DataFrame) -> None:
    figure = memory_by_category.draw(frame)
    ax = figure.axes[0]
    ends = {}
    for x, y, width, height in boxes(ax):
        if height < 0.5:
            continue  # the closed form's, below the measured one
        ends[round(y, 3)] = max(x + width, ends.get(round(y, 3), 0))
    workload, size = ax.get_title(loc="left").split(", ")
    ranked = metrics.ranked(frame)
    group = ranked[(ranked["workload"] == workload) & (ranked["world_size"] == int(size.split()[0]))]
    peaks = (group["peak_allocated_bytes"] / 2**30).head(len(ends)).tolist()
    assert list(ends.values()) == pytest.approx(peaks)
    assert any(line.get_xdata()[0] == pytest.approx(synthetic.H200_BYTES / 2**30) for line in ax.lines)


def test_outcomes_count_every_point(frame: pd.DataFrame) -> None:
    figure = outcomes.draw(frame)
    counts = outcomes.cells(frame)
    assert counts.to_numpy().sum() == len(frame)
    assert counts["out of memory"].sum() == (frame["outcome"] == "oom").sum()
    shown = words(figure)
    for count in counts.to_numpy()[counts.to_numpy() > 0]:
        assert f"{count:,}" in shown
    [legend] = figure.legends
    assert f"finished: {(frame['outcome'] == 'ok').sum():,}" in {text.get_text() for text in legend.get_texts()}
    bars = [bar for bar in boxes(figure.axes[0]) if bar[2] > 0]
    cell = counts.loc[("llama8b", 8)]
    y = outcomes.labels.workload_order(frame).index("llama8b") - 0.16
    of_cell = [width for x, low, width, height in bars if low < y < low + height and x > 2.5]
    assert [width / sum(of_cell) for width in of_cell] == pytest.approx([n / cell.sum() for n in cell if n])


@pytest.mark.slow
def test_a_caption_begins_with_what_the_rows_show(frame: pd.DataFrame) -> None:
    finished = (frame["outcome"] == "ok").sum()
    said = outcomes.conclude(frame)
    assert said is not None and said.startswith(f"{100 * finished / len(frame):.0f} % of {len(frame)} points finished")
    assert outcomes.conclude(frame.head(0)) is None
    for spec in registry.FIGURES:
        told = spec.conclude(frame)
        assert told is None or (told.endswith(".") and "nan" not in told and "{" not in told), spec.name
        empty = spec.conclude(frame.head(0))
        assert empty is None, f"{spec.name}: {empty}"


def test_the_conclusion_on_a_degree_is_of_the_costliest_step_that_most_models_have() -> None:
    rows = [
        ("a", 1, 100.0),
        ("a", 2, 90.0),
        ("a", 4, 60.0),
        ("b", 1, 50.0),
        ("b", 2, 40.0),
        ("b", 4, 30.0),
        ("c", 4, 9.0),
    ]
    table = pd.DataFrame(rows, columns=["workload", "degree", "rate"]).assign(series="s")
    table["lost_share"] = 1 - table["rate"] / table.groupby("workload")["rate"].shift()
    said = conclusions.of_degrees(table, "tp")
    assert said == "tp 2 → 4: the fastest run is 29 % slower on each device (median, n = 2 models, −33 % to −25 %)."
    assert conclusions.of_degrees(table[table["degree"] == 4].assign(lost_share=None), "tp") is None


@pytest.fixture(scope="module")
def recorded() -> pd.DataFrame:
    return recorded_cohorts()[0].frame


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_scaling", "tp_scaling", "efficiency", "breakdown_by_kind"])
def test_titles_of_panels_stay_inside_the_figure_and_apart(name: str, recorded: pd.DataFrame) -> None:
    spec = next(spec for spec in registry.FIGURES if spec.name == name)
    figure = spec.draw(recorded)
    style.lay_out(figure)
    boxes = [ax.title.get_window_extent() if ax.get_title() else None for ax in figure.axes]
    boxes += [ax._left_title.get_window_extent() for ax in figure.axes if ax.get_title(loc="left")]  # type: ignore[attr-defined]
    titles = [box for box in boxes if box is not None]
    assert titles
    assert all(box.x1 <= figure.bbox.width + 1 for box in titles)
    assert not any(one.overlaps(two) for one, two in itertools.combinations(titles, 2))


def test_overhead_shows_medians(frame: pd.DataFrame) -> None:
    ok = frame[(frame["outcome"] == "ok") & (frame["model"] == "llama1b") & (frame["world_size"] == 1)]
    ax = overhead.draw(frame).axes[0]
    first_bar = sorted(boxes(ax), key=lambda bar: (round(bar[1], 3), bar[0]))[0]
    assert first_bar[2] == pytest.approx(ok["spawn_s"].median())
    assert ax.get_yticklabels()[0].get_text() == f"llama1b, 1 GPU (n = {len(ok)})"


def test_prediction_shows_out_of_memory_at_the_limit(frame: pd.DataFrame) -> None:
    figure = predicted_vs_found.draw(frame)
    [crosses] = [line for line in figure.axes[0].lines if line.get_label() == "out of memory"]
    assert len(crosses.get_xdata()) == (frame["outcome"] == "oom").sum()
    assert set(crosses.get_ydata()) == {synthetic.H200_BYTES / 2**30}


@pytest.mark.slow
def test_one_row_one_model_and_cpu_rows_without_mfu() -> None:
    point = next(synthetic.experiments(world_sizes=(2,)))
    empty = dict.fromkeys(["mfu_palm", "mfu_causal", "mfu_playbook", "hfu", "peak_flops", "device_memory_bytes"])
    row = synthetic.attempt(point, outcome="ok", cluster="cpu", backend="cpu", peak_allocated_bytes=40 * 2**20, **empty)
    [cohort] = split(frame_of([row]))
    figures = drawn(cohort.frame)
    assert {"best_configurations", "all_runs", "outcomes", "overhead", "memory_by_category"} <= set(figures)
    for figure in figures.values():
        assert_texts_fit(figure)
    shown = words(best_configurations.draw(cohort.frame))
    assert {
        "Fastest configuration: throughput",
        "tokens/s/process",
        "Number of CPU processes",
        "40.0 MiB",
        "Peak allocated memory, MiB",
    } <= shown


@pytest.mark.slow
def test_wide_sweeps_and_long_names_fit() -> None:
    model = synthetic.llama("a-model-with-a-long-name-70b", 80, 8192, 64, 28672)
    sizes = (8, 16, 32, 64, 128, 256, 512)
    points = [p for p in synthetic.experiments((model,), sizes, (1,)) if p.dp <= 64]
    rows = synthetic.attempts(points, compile="block")
    [cohort] = split(frame_of(rows))
    figures = drawn(cohort.frame)
    assert set(figures) == {spec.name for spec in registry.FIGURES} - {"bandwidth", "breakdown", "prediction_depths"}
    for figure in figures.values():
        assert_texts_fit(figure)


@pytest.mark.slow
def test_figures_of_many_models_show_those_with_most_runs_and_say_so(
    frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_configurations, "_MOST_WORKLOADS", 2)
    monkeypatch.setattr(overhead, "_MOST_GROUPS", 3)
    monkeypatch.setattr(cost, "_MOST_BARS", 3)
    best = metrics.best_configurations(frame)
    layouts = best.groupby("workload")["candidates"].sum().sort_values(ascending=False)
    for draw in (best_configurations.draw, best_configurations.draw_published):
        figure = draw(frame)
        assert {text.get_text() for text in figure.axes[0].get_yticklabels()} == set(layouts.index[:2])
        assert len(figure.axes[0].collections[0].get_paths()) == 2 * frame["world_size"].nunique()
        assert any("1 more models, which have fewer finished layouts: see the table" in text for text in words(figure))
    ax = overhead.draw(frame).axes[0]
    counts = frame[frame["outcome"] == "ok"].groupby(metrics.GROUP).size()
    assert len(ax.get_yticks()) == 3 < len(counts)
    assert f"(n = {counts.max()})" in " ".join(text.get_text() for text in ax.get_yticklabels())
    assert f"The 3 of {len(counts)} groups with most finished points" in words(ax.figure.figure)
    figure = cost.draw_spent(frame)
    bars = boxes(figure.axes[0])
    hours = metrics.held_hours(frame).groupby([frame[name] for name in metrics.GROUP]).sum()
    assert np.unique(bars[:, 1]).size == 3
    assert (bars[:, 0] + bars[:, 2]).max() == pytest.approx(hours.max())
    assert f"{len(hours) - 3} more bars of fewer hours: see the table" in words(figure)
    assert figure.axes[0].get_title("left").startswith(f"{format_number(hours.sum())} GPU-hours")


def test_intervals_of_predictions_are_few_paths_with_the_ends_of_each() -> None:
    ax = style.new_figure(4, 3).subplots()
    low = np.arange(1.0, 251.0)
    rows = pd.DataFrame({"low": low, "high": low + 0.5, "found": low + 0.25})
    rows.loc[3, "high"] = np.nan
    predicted_vs_found.draw_intervals(ax, rows, "low", "high", "found")
    [lines] = ax.collections
    assert len(lines.get_paths()) == 3
    points = np.concatenate([path.vertices for path in lines.get_paths()])
    known = rows.dropna()
    assert (points[0::3] == known[["low", "found"]].to_numpy()).all()
    assert (points[1::3] == known[["high", "found"]].to_numpy()).all()
    assert np.isnan(points[2::3]).any(axis=1).all()
    assert ax.dataLim.extents == pytest.approx((1, 1.25, 250.5, 250.25))


def test_what_cannot_be_drawn_says_why() -> None:
    points = list(synthetic.experiments(world_sizes=(2,)))[:3]
    [cohort] = split(frame_of([synthetic.attempt(p, i, outcome="crash") for i, p in enumerate(points)]))
    for draw in (
        best_configurations.draw,
        best_configurations.draw_published,
        memory_by_category.draw,
        predicted_vs_found.draw,
        overhead.draw,
    ):
        with pytest.raises(style.NothingToDraw, match=r"no .*finished"):
            draw(cohort.frame)
    assert scattered(all_runs.draw(cohort.frame).axes[0])


@pytest.mark.slow
def test_files_are_reproducible_and_leave_no_state(frame: pd.DataFrame, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    for name in ("a", "b"):
        style.save(outcomes.draw(frame), tmp_path / f"{name}.png", tmp_path / f"{name}.svg")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_every_figure_with_data_has_a_table_of_it(frame: pd.DataFrame) -> None:
    for spec in registry.FIGURES:
        if spec.data is None or spec.name == "bandwidth":
            continue
        table = spec.data(frame)
        assert len(table), spec.name
        assert table.columns.is_unique


def test_ink_is_readable_on_every_colour() -> None:
    assert style.ink_on((1.0, 1.0, 1.0, 1.0)) == "black"
    assert style.ink_on((0.27, 0.0, 0.33, 1.0)) == "white"


def test_errors_of_predictions_keep_a_decimal_below_ten_per_cent() -> None:
    told = predicted_vs_found._summary(pd.Series([-0.0004, -0.0004, 0.034]))
    assert told == "off by 0.0 % (0.0 to +3.1 %), n = 3"
    assert predicted_vs_found._summary(pd.Series([-0.25, -0.012, 0.0])) == "off by −1.2 % (−23 to −0.1 %), n = 3"
