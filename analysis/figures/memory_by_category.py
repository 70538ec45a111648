"""Where the memory goes: parameters, gradients, optimizer and activations at the peak, beside the device's limit."""

from __future__ import annotations

from typing import cast

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures import style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text import byte_unit

_BARS = 8
_MAX_PANELS = 8
_PANELS_PER_ROW = 2


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory by category of every finished run that has it, fastest first in each group."""
    rows = metrics.ranked(frame).dropna(subset=list(labels.MEMORY_CATEGORIES))
    kept = [
        *metrics.GROUP,
        "layout",
        *labels.MEMORY_CATEGORIES,
        "peak_reserved_bytes",
        "device_memory_bytes",
        "attempt_id",
    ]
    return rows[kept]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Stacked bars of the rank with the highest peak, for the fastest layouts of each group, one panel a group."""
    rows = metrics.ranked(frame).dropna(subset=list(labels.MEMORY_CATEGORIES))
    if rows.empty:
        raise style.NothingToDraw("no finished run has its memory by category")
    groups = [(cast("tuple[str, int]", key), group) for key, group in rows.groupby(metrics.GROUP)]
    order = {workload: i for i, workload in enumerate(labels.workload_order(rows))}
    total = len(groups)
    if total > _MAX_PANELS:
        groups = sorted(groups, key=lambda group: -len(group[1]))[:_MAX_PANELS]
    groups.sort(key=lambda group: (order[group[0][0]], group[0][1]))
    columns = min(len(groups), _PANELS_PER_ROW)
    lines = -(-len(groups) // columns)
    bars = max(min(len(group), _BARS) for _, group in groups)
    noun = labels.device_noun(frame)
    titles = [labels.group_name(*key, noun) for key, _ in groups]
    layouts = [layout for _, group in groups for layout in group["layout"].head(_BARS)]
    panel = 0.062 * max(map(len, layouts)) + max(0.09 * max(map(len, titles)), 3.2)
    figure = style.new_figure(max(panel * columns, 6.5), lines * (0.9 + 0.3 * bars) + 0.9)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    unit, name = byte_unit(rows[list(labels.MEMORY_CATEGORIES)].sum(axis=1).max())
    for ax, title, (_, group) in zip(axes, titles, groups, strict=False):
        _panel(ax, group.head(_BARS), unit)
        ax.set_title(title)
    for ax in axes[len(groups) :]:
        ax.set_visible(False)
    for ax in axes[max(len(groups) - columns, 0) : len(groups)]:
        ax.set_xlabel(f"Memory at the peak of the fullest rank, {name}")
    left_out = f"The {len(groups)} of {total} groups with most finished runs" if total > len(groups) else None
    style.bottom_legend(figure, _handles(rows), left_out)
    return figure


def _panel(ax: Axes, group: pd.DataFrame, unit: int) -> None:
    left = pd.Series(0.0, index=group.index)
    places = range(len(group))
    for (column, _), colour, hatch in zip(
        labels.MEMORY_CATEGORIES.items(), style.CATEGORY_COLOURS, style.CATEGORY_HATCHES, strict=False
    ):
        width = group[column] / unit
        ax.barh(places, width, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, height=0.72)
        left = left + width
    reserved = group["peak_reserved_bytes"] / unit
    ax.plot(reserved, places, linestyle="", marker="|", color="black", markersize=11, markeredgewidth=1.4)
    right = float(pd.concat([left, reserved]).max())
    limit = group["device_memory_bytes"].max() / unit
    if pd.notna(limit):
        ax.axvline(limit, color="#B00000", linestyle="--", linewidth=1.2)
        right = max(right, limit)
    ax.set_yticks(places, group["layout"], fontsize=8)
    ax.set(xlim=(0, 1.04 * right), ylim=(len(group) - 0.4, -0.6))
    ax.grid(axis="x")


def _handles(rows: pd.DataFrame) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for name, colour, hatch in zip(
            labels.MEMORY_CATEGORIES.values(), style.CATEGORY_COLOURS, style.CATEGORY_HATCHES, strict=False
        )
    ]
    if rows["peak_reserved_bytes"].notna().any():
        handles.append(
            Line2D(
                [], [], linestyle="", marker="|", color="black", markersize=10, label="peak reserved by the allocator"
            )
        )
    if rows["device_memory_bytes"].notna().any():
        handles.append(Line2D([], [], linestyle="--", color="#B00000", label="memory of the device"))
    return handles


FIGURE = FigureSpec(
    name="memory_by_category",
    section="why",
    title="Memory by category",
    caption="The fastest layouts of each model and size, fastest first: memory of the fullest rank at its peak.",
    draw=draw,
    data=data,
)
