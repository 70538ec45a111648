"""The closed-form prediction made before each run against its measurement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from analysis.drawing import style
from analysis.figures import conclusions
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.load import last_attempts
from results.statistics.grade import INTERVAL
from results.text.numbers import byte_unit

_TOGETHER = 100
"""Number of predicted intervals in one path."""


def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Predictions and measurements of every point that has a prediction."""
    rows = last_attempts(frame)
    pairs = ["predicted_peak_bytes", "peak_allocated_bytes", "predicted_step_time_s", *INTERVAL, "step_time_s"]
    rows = rows[rows["predicted_peak_bytes"].notna() | rows["predicted_step_time_s"].notna()]
    return rows[["workload", "world_size", "layout", "outcome", *pairs, "device_memory_bytes", "attempt_id"]]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: peak memory of the fullest rank. Right: step time. The diagonal is a perfect prediction.

    Runs that ran out of memory have no peak: they are drawn at the device's limit over their predicted memory.
    """
    pairs = ["predicted_peak_bytes", "peak_allocated_bytes", "predicted_step_time_s", *INTERVAL, "step_time_s"]
    rows = last_attempts(frame)[["model", *labels.ORDERED_BY, "outcome", "method", *pairs, "device_memory_bytes"]]
    memory = rows[(rows["outcome"] == "ok") & rows["predicted_peak_bytes"].notna() & (rows["peak_allocated_bytes"] > 0)]
    times = metrics.prediction_errors(rows, "predicted_step_time_s", "step_time_s")
    panels = [panel for panel, data in ((_memory, memory), (_times, times)) if len(data)]
    if not panels:
        raise style.NothingToDraw("no finished run has a prediction to compare with")
    figure = style.new_figure(5.4 * len(panels), 5.2)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, rows)
        for line in ax.lines:
            line.set_rasterized(len(rows) > style.MOST_VECTOR_MARKS)
    style.bottom_legend(figure, _legend(axes))
    return figure


def _legend(axes: Sequence[Axes]) -> list[Artist]:
    """One entry for each label of any panel; only the panel of step times has intervals."""
    handle_of_label: dict[str, Artist] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handle_of_label.setdefault(label, handle)
    return list(handle_of_label.values())


def _memory(ax: Axes, rows: pd.DataFrame) -> None:
    finished = rows[(rows["outcome"] == "ok") & rows["predicted_peak_bytes"].notna()]
    oom = rows[(rows["outcome"] == "oom") & rows["predicted_peak_bytes"].notna()]
    unit, name = byte_unit(finished["peak_allocated_bytes"].max())
    scatter(ax, finished, "predicted_peak_bytes", "peak_allocated_bytes", unit)
    limit = rows["device_memory_bytes"].max()
    if len(oom) and pd.notna(limit):
        ax.plot(
            oom["predicted_peak_bytes"] / unit,
            np.full(len(oom), limit / unit),
            linestyle="",
            marker="x",
            color=style.FAILURE_GREY,
            label="out of memory",
        )
        ax.axhline(limit / unit, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1, label="memory of the device")
    finish(ax, f"Predicted peak memory, {name}", f"Peak allocated memory, {name}")
    errors = metrics.prediction_errors(rows, "predicted_peak_bytes", "peak_allocated_bytes")
    ax.set_title(f"Memory: {_summary(errors)}")


def _times(ax: Axes, rows: pd.DataFrame) -> None:
    finished = rows[(rows["outcome"] == "ok") & rows["predicted_step_time_s"].notna()]
    draw_intervals(ax, finished, *INTERVAL, "step_time_s")
    scatter(ax, finished, "predicted_step_time_s", "step_time_s", 1)
    finish(ax, "Predicted step time, s", "Step time, s")
    errors = metrics.prediction_errors(rows, "predicted_step_time_s", "step_time_s")
    ax.set_title(f"Step time: {_summary(errors)}")


def scatter(
    ax: Axes, rows: pd.DataFrame, predicted: str, found: str, unit: float, models: Sequence[str] | None = None
) -> None:
    """Draw the points of each model, in units of ``unit``. ``models``: all that have a colour; None: those of the
    rows."""
    markers = "osD^vP*X"
    groups = dict(iter(rows.groupby("model")))
    for i, model in enumerate(models or models_of(rows)):
        group = groups.get(model, rows.head(0))
        ax.plot(
            group[predicted] / unit,
            group[found] / unit,
            linestyle="",
            marker=markers[i % len(markers)],
            color=style.CATEGORY_COLOURS[i % len(style.CATEGORY_COLOURS)],
            markersize=4.5,
            alpha=0.75,
            markeredgewidth=0,
            label=model,
        )


def models_of(rows: pd.DataFrame) -> list[str]:
    """Models from the smallest to the largest."""
    return list(rows.groupby("model")["num_params"].max().sort_values(kind="stable").index)


def draw_intervals(ax: Axes, rows: pd.DataFrame, low: str, high: str, found: str) -> None:
    """Draw a thin line over the interval of each prediction, in seconds; rows without a recorded interval get none."""
    known = rows.dropna(subset=[low, high, found])
    if known.empty:
        return
    ends = known[[low, high, found]].to_numpy(dtype=float)
    gap = np.full(len(ends), np.nan)
    across = np.column_stack([ends[:, 0], ends[:, 1], gap]).reshape(-1)
    up = np.column_stack([ends[:, 2], ends[:, 2], gap]).reshape(-1)
    points = np.column_stack([across, up])
    # One path for many intervals: a path for each takes matplotlib as long as the rest of the figure.
    pieces = [points[first : first + 3 * _TOGETHER] for first in range(0, len(points), 3 * _TOGETHER)]
    lines = LineCollection(
        pieces,
        colors=style.FAILURE_GREY,
        linewidths=0.7,
        alpha=0.6,
        zorder=1,
        label="predicted interval, 90 %",
        rasterized=len(rows) > style.MOST_VECTOR_MARKS,
    )
    ax.add_collection(lines, autolim=False)
    ax.update_datalim([np.nanmin(points, axis=0), np.nanmax(points, axis=0)])


def finish(ax: Axes, xlabel: str, ylabel: str) -> None:
    """Set equal logarithmic axes and draw the diagonal with its band."""
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    ends = np.array([low, high])
    ax.plot(ends, ends, color="#444444", linewidth=1, label="predicted = measured")
    ax.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#444444", alpha=0.12, linewidth=0, label="± 10 %")
    ax.set(xlim=(low, high), ylim=(low, high))
    ax.set_box_aspect(1)
    for axis in (ax.xaxis, ax.yaxis):
        few = high / low < 2000
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axis.set_minor_locator(NullLocator() if few else LogLocator(subs=(2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.grid()


def _summary(errors: pd.Series) -> str:
    if len(errors) < 2:
        return f"n = {len(errors)}"
    low, middle, high = errors.quantile([0.05, 0.5, 0.95])
    return f"off by {_signed(middle)} % ({_signed(low)} to {_signed(high)} %), n = {len(errors):,}"


def _signed(share: float) -> str:
    """Per cent with its sign, with one decimal below 10 %; a value that rounds to 0 has no sign."""
    value = round(100 * share, 1)
    if value == 0:
        return "0.0"
    return f"{value:+.{0 if abs(value) >= 10 else 1}f}".replace("-", "−")


FIGURE = FigureSpec(
    name="predicted_vs_found",
    section="trust",
    title="Prediction and measurement",
    caption="The closed-form prediction made before the run against the measurement; the band is ± 10 %.",
    draw=draw,
    data=data,
    conclude=lambda frame: conclusions.of_predictions(last_attempts(frame)),
)
