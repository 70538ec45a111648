"""Memory over the first steps of one run, and its peak by category, measured and by the closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing import style
from analysis.figures.memory_bars import FILLS, draw_bars, handles, limits_of, look
from analysis.figures.spec import FigureSpec
from analysis.memory.axis_panels import Bar
from analysis.memory.moments import SCHEDULES, STEPS, Bytes, Moment, moments, peak_of_step
from analysis.memory.peak_split import PREDICTED, READ, Stack, categories, experiment_of, stack_of
from analysis.rows import labels, metrics
from analysis.rows.step_peaks import FIRST_PEAKS
from results.text.numbers import byte_unit
from workloads.costs.memory.estimate import estimate_memory

_MEASURED: dict[str, Any] = {"color": "black", "linewidth": 3.0, "solid_capstyle": "butt"}
_PREDICTED: dict[str, Any] = {"color": "#D55E00", "linewidth": 1.4, "linestyle": (0, (4, 2))}


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """One run: the memory held between its operations, and the peaks of its steps."""

    row: Mapping[str, Any]
    measured: Stack
    """Split at the highest moment of the timed steps."""
    predicted: Stack
    moments: tuple[Moment, ...]
    predicted_peaks: tuple[Bytes, ...]
    """Peak of the fullest stage by category, for each step."""
    measured_peaks: tuple[int, ...]
    """Peak allocated bytes of each step; empty if the steps were not kept."""


_RAN = "cuda_graph_run"
"""Column that says whether a run's later steps were captured: then the optimizer's state is allocated at its start."""


def timeline(frame: pd.DataFrame) -> MemoryTimeline | None:
    """First steps of the fastest finished run, of the largest model, that has its memory by category.

    None if there is no such run with a known shape and schedule.
    """
    peak_columns = [name for name in (*FIRST_PEAKS, _RAN) if name in frame]
    read = dict.fromkeys([*READ, "layout", "workload", "num_params", metrics.RANK_BY, "attempt_id", *peak_columns])
    rows = frame.loc[(frame["outcome"] == "ok") & frame["pp_schedule"].isin(SCHEDULES), [*read]]
    rows = rows.dropna(subset=list(labels.MEMORY_CATEGORIES))
    order = rows.assign(_kept=rows.filter(items=list(FIRST_PEAKS)).notna().any(axis=1)).sort_values(
        ["num_params", "_kept", metrics.RANK_BY, "attempt_id"], ascending=[False, False, False, True]
    )
    for row in labels.records(order[[*READ, "layout", "workload", *peak_columns]].head(1)):
        experiment, measured = experiment_of(row), stack_of(row)
        if experiment is not None and measured is not None:
            estimate, captured = estimate_memory(experiment), row.get(_RAN) == "step"
            peaks = row.get("first_steps_peak_allocated_bytes")
            return MemoryTimeline(
                row=row,
                measured=measured,
                predicted=Stack(PREDICTED, categories(estimate.stages[estimate.peak_stage])),
                moments=tuple(moments(experiment, estimate.peak_stage, state_at_start=captured)),
                predicted_peaks=tuple(peak_of_step(experiment, max(step, captured)) for step in range(STEPS)),
                measured_peaks=tuple(peaks[:STEPS]) if isinstance(peaks, list) else (),
            )
    return None


def data(frame: pd.DataFrame) -> pd.DataFrame:
    """One line per moment: ``held`` between operations and ``peak`` of a step, measured or predicted."""
    run = timeline(frame)
    columns = ["model", "layout", "split", "step", "moment", *labels.MEMORY_CATEGORIES, "total_bytes", "attempt_id"]
    if run is None:
        return pd.DataFrame(columns=columns)
    lines: list[tuple[str, int | None, str, tuple[int | None, ...], int]] = [
        (PREDICTED, moment.step, f"held after {moment.name}", moment.bytes, sum(moment.bytes)) for moment in run.moments
    ]
    lines += [(PREDICTED, step, "peak", peak, sum(peak)) for step, peak in enumerate(run.predicted_peaks)]
    unknown = (None,) * len(labels.MEMORY_CATEGORIES)
    source = run.measured.source
    lines += [(source, step, "peak", unknown, peak) for step, peak in enumerate(run.measured_peaks)]
    lines.append((source, None, "peak of the timed steps", run.measured.bytes, run.measured.total))
    row = run.row
    return pd.DataFrame(
        [
            (row["model"], row["layout"], split, step, name, *parts, total, row["attempt_id"])
            for split, step, name, parts, total in lines
        ],
        columns=columns,
    ).astype({"step": "Int64"})


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: the first steps, one after another. Right: the highest moment by category."""
    run = timeline(frame)
    if run is None:
        raise style.NothingToDraw("no finished run of a known shape and schedule has its memory by category")
    bars = [Bar("measured", run.measured, {**run.row, "repeats": 1}), Bar("closed\nform", run.predicted, None)]
    limits = limits_of(frame, bars)
    unit, unit_name = byte_unit(run.measured.total)
    figure = style.new_figure(10.0, 4.3)
    left, right = figure.subplots(1, 2, width_ratios=[4, 1.3], sharey=True)
    draw_bars(right, bars, limits, unit)
    right.set_title("At the peak")
    _steps(left, run, unit)
    for limit in limits:
        left.axhline(limit / unit, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.2)
    left.set_title(f"{run.row['workload']}: {run.row['layout']}")
    left.set(xlabel="Step, and the order of operations in it", ylabel=f"Memory of the fullest rank, {unit_name}")
    lines = [Line2D([], [], label="peak of a step, closed form", **_PREDICTED)]
    if run.measured_peaks:
        lines.insert(0, Line2D([], [], label="peak of a step, measured", **_MEASURED))
    style.bottom_legend(figure, [*handles(bars, limits, frame), *lines])
    return figure


def _steps(ax: Axes, found: MemoryTimeline, unit: int) -> None:
    at = [moment.step + moment.at for moment in found.moments]
    heights = np.array([moment.bytes for moment in found.moments]).T / unit
    edges = np.vstack([np.zeros(len(at)), np.cumsum(heights, axis=0)])
    for i, (colour, hatch) in enumerate(FILLS):
        ax.fill_between(at, edges[i], edges[i + 1], hatch=hatch, **look(colour, pale=True))
    for peaks, line in ((found.measured_peaks, _MEASURED), (tuple(map(sum, found.predicted_peaks)), _PREDICTED)):
        for step, peak in enumerate(peaks):
            ax.plot([step + 0.02, step + 0.98], [peak / unit] * 2, **line)
    for step in range(1, STEPS):
        ax.axvline(step, color="#888888", linewidth=0.8, linestyle=":")
    ax.set_xticks(np.arange(STEPS) + 0.5, [str(step) for step in range(STEPS)])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(0, STEPS)
    ax.grid(axis="y")


FIGURE = FigureSpec(
    name="memory_timeline",
    section="why",
    title="Memory over the first steps",
    caption=(
        "The fastest run of the largest model. Areas: memory held between operations by the closed form; operations "
        "are "
        "drawn in order, not to scale in time. Lines: the highest moment of each step, with the working memory of "
        "operations. The optimizer's state appears with the first optimizer step. Right: the highest moment "
        "of the timed steps by category."
    ),
    draw=draw,
    data=data,
)
