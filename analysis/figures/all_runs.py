"""Every point at once: one mark each, in a grid of models and numbers of devices."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing import style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import decided

_CELL_IN = (1.55, 1.25)
_FILL = 0.86
"""Share of a cell's width and height that its marks may fill."""
_LARGEST_IN = 0.16
"""Largest width of a mark, in inches."""


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each mark: the attempt that decided its point."""
    kept = ["workload", "world_size", "layout", "outcome", metrics.RANK_BY, metrics.MFU, "attempt_id"]
    rows = decided(frame, [*dict.fromkeys((*labels.ORDERED_BY, *kept))])
    return labels.in_group_order(rows)[kept].reset_index(drop=True) if len(rows) else rows[kept]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """One mark for each point, fastest first in its cell.

    The area of a finished run is its tokens/s/GPU relative to the best of its row; its colour is the MFU (the
    throughput if no peak rate is known). Every kind of failure has its own grey marker.
    """
    read = [*labels.ORDERED_BY, "outcome", metrics.RANK_BY, metrics.MFU]
    rows, note = labels.under_study_labels(
        decided(frame, [*read, *(name for name in ("study_label",) if name in frame)])
    )
    rows = rows[read]
    workloads, sizes = labels.workload_order(rows), labels.world_sizes(rows)
    if rows.empty or not workloads or not sizes:
        raise style.NothingToDraw("there is no attempt")
    if rows[metrics.RANK_BY].isna().all() and (rows["outcome"] == "ok").all():
        raise style.NothingToDraw("no point has a throughput, and none failed")
    noun = labels.device_noun(frame)
    has_mfu = rows[metrics.MFU].notna().any()
    value, title = (100 * rows[metrics.MFU], f"{metrics.MFU_NAME}, % of peak")
    if not has_mfu:
        value, title = rows[metrics.RANK_BY], labels.rate_unit(frame)
    # A rehearsal that ran out of memory may still have a throughput.
    best_of_row = rows[metrics.RANK_BY].where(rows["outcome"] == "ok").groupby(rows["workload"]).transform("max")
    rows = rows.assign(_value=value, _share=rows[metrics.RANK_BY] / best_of_row)
    norm, colours = style.norm_of(rows["_value"]), style.sequential("viridis")

    width = max(len(sizes) * _CELL_IN[0], 4.2) + 2.6
    figure = style.new_figure(width, len(workloads) * _CELL_IN[1] + 1.5)
    ax = figure.subplots()
    most = int(rows.groupby(metrics.GROUP).size().max())
    order = {workload: y for y, workload in enumerate(workloads)}
    columns = {size: x for x, size in enumerate(sizes)}
    cells = []
    for key, cell in rows.groupby(metrics.GROUP):
        workload, size = cast("tuple[str, int]", key)
        cell = cell.sort_values([metrics.RANK_BY, "outcome"], ascending=[False, True], na_position="last")
        where = _places(len(cell), most) + np.array([columns[int(size)], order[workload]])
        cells.append(cell.assign(_x=where[:, 0], _y=where[:, 1]))
    _draw_marks(ax, pd.concat(cells), _mark_area(most), norm, colours)
    if rows["_value"].notna().any():
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=ax, pad=0.01, aspect=28, fraction=0.04)
        bar.set_label(title)
        bar.outline.set_visible(False)
    for collection in ax.collections:
        collection.set_rasterized(len(rows) > style.MOST_VECTOR_MARKS)
    _frame_axes(ax, workloads, sizes, noun)
    kinds = [kind for kind in style.OUTCOME_MARKERS if (rows["outcome"] == kind).any()]
    handles = _handles(kinds, bool(rows["_share"].notna().any()), _mark_area(most))
    style.bottom_legend(figure, handles, note)
    return figure


def _draw_marks(ax: Axes, rows: pd.DataFrame, area: float, norm: Normalize, colours: Colormap) -> None:
    finished = rows["_share"].notna()
    ok = rows[finished]
    ax.scatter(
        ok["_x"],
        ok["_y"],
        s=area * ok["_share"].clip(lower=0.04),
        c=ok["_value"],
        norm=norm,
        cmap=colours,
        plotnonfinite=True,
        edgecolors="#333333",
        linewidths=0.3,
    )
    for kind, marker in style.OUTCOME_MARKERS.items():
        failed = rows[(rows["outcome"] == kind) & ~finished]
        if failed.empty:
            continue
        outlined = marker in style.OUTLINED
        ax.scatter(
            failed["_x"],
            failed["_y"],
            s=0.3 * area,
            marker=marker,
            facecolors="none" if outlined else style.FAILURE_GREY,
            edgecolors=style.FAILURE_GREY if outlined else None,
            linewidths=0.9,
        )


def _places(count: int, most: int) -> np.ndarray:
    """Offsets of ``count`` marks from the middle of a cell, row by row on a grid large enough for the fullest cell."""
    columns, pitch_x, pitch_y = _grid(most)
    index = np.arange(count)
    x = (index % columns - (columns - 1) / 2) * pitch_x
    y = -_FILL / 2 + pitch_y * (0.5 + index // columns)
    return np.column_stack([x, y])


def _grid(most: int) -> tuple[int, float, float]:
    columns = max(math.ceil(math.sqrt(most * _CELL_IN[0] / _CELL_IN[1])), 3)
    rows = max(math.ceil(most / columns), 2)
    return columns, _FILL / columns, _FILL / rows


def _mark_area(most: int) -> float:
    """Area in points squared of the largest mark that does not touch its neighbours."""
    _, pitch_x, pitch_y = _grid(most)
    side_in = min(pitch_x * _CELL_IN[0], pitch_y * _CELL_IN[1], _LARGEST_IN)
    return (0.95 * side_in * 72) ** 2


def _frame_axes(ax: Axes, workloads: list[str], sizes: list[int], noun: str) -> None:
    for axis, count in (("x", len(sizes)), ("y", len(workloads))):
        style.add_lines_across(ax, axis, np.arange(count + 1) - 0.5, color="#e2e2e2", linewidth=0.8)
    ax.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(workloads) - 0.5, -0.5), xlabel=f"Number of {noun}")
    ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    ax.set_yticks(range(len(workloads)), workloads)
    ax.tick_params(length=0, left=False, bottom=False)
    ax.spines[:].set_visible(False)
    ax.set_title("All runs, fastest first in each cell")


def _handles(kinds: list[str], any_finished: bool, area: float) -> list[Line2D]:
    def mark(marker: str, area: float, colour: str, label: str) -> Line2D:
        face = "none" if marker in style.OUTLINED else colour
        size = math.sqrt(area)
        return Line2D(
            [], [], linestyle="", marker=marker, markersize=size, color=colour, markerfacecolor=face, label=label
        )

    shares = {1.0: "best throughput of the row", 0.5: "half of it", 0.25: "a quarter"} if any_finished else {}
    dots = [mark("o", area * share, "#4f8f8b", label) for share, label in shares.items()]
    failures = [mark(style.OUTCOME_MARKERS[kind], 36, style.FAILURE_GREY, labels.OUTCOME_NAMES[kind]) for kind in kinds]
    return dots + failures


FIGURE = FigureSpec(
    name="all_runs",
    section="best",
    title="All runs",
    caption=(
        "One mark for each point, fastest first. Area: throughput relative to the best of the row. Grey markers: "
        "failures. " + metrics.MFU_PEAKS
    ),
    draw=draw,
    data=data,
)
