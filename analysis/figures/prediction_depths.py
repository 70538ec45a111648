"""Predicted against measured step time for each depth of prediction on the same runs: closed form and rehearsal."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures.predicted_vs_found import draw_intervals, finish, models_of, scatter
from analysis.figures.spec import FigureSpec
from analysis.rows.frame_cache import cache_per_frame
from results.statistics.errors_of_predictions import relative_errors, summary
from results.statistics.grade import READ_BY_PAIRS, measured_points, pairs_of_rows
from results.text.numbers import format_percent, listed

_FACTS = ["experiment_id", "model", "workload", "layout", "num_params", "attempt_id"]
_READ = dict.fromkeys((*READ_BY_PAIRS, *_FACTS))
NAMES = {"closed_form": "closed form", "rehearsed": "rehearsed"}


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Every prediction of a step time with its measurement (`results.statistics.grade.pairs_of_rows`), one row per
    depth."""
    points = measured_points(frame[[name for name in _READ if name in frame]])
    pairs = pairs_of_rows(points, only="step_time")
    facts = points.drop_duplicates("experiment_id")[_FACTS]
    shown = ["depth", "experiment_id", "world_size", "seq_len", "dp", "tp", "cp", "pp", "predicted", "low", "high"]
    shown.append("measured")
    return pairs[shown].merge(facts, on="experiment_id", how="left")


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """A panel for each depth, on equal scales. The diagonal is a perfect prediction."""
    pairs = data(frame)
    depths = [depth for depth in NAMES if (pairs["depth"] == depth).any()]
    if len(depths) < 2:
        raise style.NothingToDraw("no measured run was also rehearsed")
    figure = style.new_figure(5.4 * len(depths), 5.2)
    panels = figure.subplots(1, len(depths), squeeze=False)[0]
    models = models_of(pairs)
    ends = pairs[["predicted", "measured"]].min().min() * 0.9, pairs[["predicted", "measured"]].max().max() * 1.1
    for ax, depth in zip(panels, depths, strict=True):
        of_depth = pairs[pairs["depth"] == depth]
        draw_intervals(ax, of_depth, "low", "high", "measured")
        scatter(ax, of_depth, "predicted", "measured", 1, models)
        ax.set_title(f"{NAMES[depth].capitalize()}: {_in_short(of_depth)}")
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        finish(ax, "Predicted step time, s", "Step time, s" if ax is panels[0] else "")
        ax.tick_params(labelleft=ax is panels[0])
    style.bottom_legend(figure, panels[0].get_legend_handles_labels()[0])
    return figure


def _in_short(pairs: pd.DataFrame) -> str:
    statistics = summary(relative_errors(pairs["predicted"], pairs["measured"]))
    assert statistics is not None
    return f"mean error {format_percent(statistics.mape)}, p90 {format_percent(statistics.p90)}, n = {statistics.n:,}"


def _conclude(frame: pd.DataFrame) -> str | None:
    pairs = data(frame)
    if pairs["depth"].nunique() < 2:
        return None
    both = pairs[pairs["experiment_id"].isin(pairs.loc[pairs["depth"] == "rehearsed", "experiment_id"])]
    summaries = [f"{NAMES[str(depth)]} {_in_short(of_depth)}" for depth, of_depth in both.groupby("depth", sort=False)]
    return f"For the runs that were also rehearsed: {listed(summaries)}."


FIGURE = FigureSpec(
    name="prediction_depths",
    section="trust",
    title="Step time predicted in closed form and by rehearsal",
    caption=(
        "Each measured run against its predictions, in closed form before the run and by rehearsing single "
        "ranks on one device; the band is ± 10 %. Not every run was rehearsed. python -m sweep grade has the errors "
        "by axis."
    ),
    draw=draw,
    data=data,
    conclude=_conclude,
)
