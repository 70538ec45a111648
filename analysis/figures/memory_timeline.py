"""Memory over the first steps of one run, and its peak by category, measured beside the closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures import style
from analysis.figures.memory_axes import FILLS, draw_bars, handles, limits_of, look
from analysis.memory import moments as memory_timeline
from analysis.memory.axis_panels import Bar
from analysis.memory.moments import Timeline
from analysis.rows import labels

_MEASURED: dict[str, Any] = {"color": "black", "linewidth": 3.0, "solid_capstyle": "butt"}
_PREDICTED: dict[str, Any] = {"color": "#D55E00", "linewidth": 1.4, "linestyle": (0, (4, 2))}


def data(frame: pd.DataFrame) -> pd.DataFrame:
    return memory_timeline.table(memory_timeline.timeline(frame))


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: the first steps, one after another. Right: the highest moment by category."""
    found = memory_timeline.timeline(frame)
    if found is None:
        raise style.NothingToDraw("no finished run of a known shape and schedule has its memory by category")
    bars = [Bar("measured", found.measured, {**found.row, "repeats": 1}), Bar("closed\nform", found.predicted, None)]
    limits = limits_of(frame, bars)
    unit, unit_name = labels.memory_unit(found.measured.total)
    figure = style.new_figure(10.0, 4.3)
    left, right = figure.subplots(1, 2, width_ratios=[4, 1.3], sharey=True)
    draw_bars(right, bars, limits, unit)
    right.set_title("At the peak")
    _steps(left, found, unit)
    for limit in limits:
        left.axhline(limit / unit, color="#B00000", linestyle="--", linewidth=1.2)
    left.set_title(f"{found.row['workload']}: {found.row['layout']}")
    left.set(xlabel="Step, and the order of operations in it", ylabel=f"Memory of the fullest rank, {unit_name}")
    lines = [Line2D([], [], label="peak of a step, closed form", **_PREDICTED)]
    if found.measured_peaks:
        lines.insert(0, Line2D([], [], label="peak of a step, measured", **_MEASURED))
    style.bottom_legend(figure, [*handles(bars, limits, frame), *lines])
    return figure


def _steps(ax: Axes, found: Timeline, unit: int) -> None:
    at = [moment.step + moment.at for moment in found.moments]
    heights = np.array([moment.bytes for moment in found.moments]).T / unit
    edges = np.vstack([np.zeros(len(at)), np.cumsum(heights, axis=0)])
    for i, (colour, hatch) in enumerate(FILLS):
        ax.fill_between(at, edges[i], edges[i + 1], hatch=hatch, **look(colour, pale=True))
    for peaks, line in ((found.measured_peaks, _MEASURED), (tuple(map(sum, found.predicted_peaks)), _PREDICTED)):
        for step, peak in enumerate(peaks):
            ax.plot([step + 0.02, step + 0.98], [peak / unit] * 2, **line)
    for step in range(1, memory_timeline.STEPS):
        ax.axvline(step, color="#888888", linewidth=0.8, linestyle=":")
    ax.set_xticks(np.arange(memory_timeline.STEPS) + 0.5, [str(step) for step in range(memory_timeline.STEPS)])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(0, memory_timeline.STEPS)
    ax.grid(axis="y")
