"""Memory by category at the peak (parameters, gradients, optimizer, activations), with the device's limit."""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from analysis.drawing import bar_series, style
from analysis.figures import panels
from analysis.figures.memory_bars import FILLS, look
from analysis.figures.spec import FigureSpec
from analysis.memory.peak_split import Stack, experiment_of, predicted
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import byte_unit, format_percent, plural

_BARS = 8
_BAR, _TWIN = 0.56, 0.18
"""Heights of a bar and of the closed form's bar below it."""
_MAX_PANELS = 5
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
    """Stacked bars of the rank with the highest peak, for the fastest layouts of each group, one panel per group."""
    rows = metrics.ranked(frame).dropna(subset=list(labels.MEMORY_CATEGORIES))
    if rows.empty:
        raise style.NothingToDraw("no finished run has its memory by category")
    groups = [(cast("tuple[str, int]", key), group) for key, group in rows.groupby(metrics.GROUP)]
    order = {workload: i for i, workload in enumerate(labels.workload_order(rows))}
    total = len(groups)
    if total > _MAX_PANELS:
        groups = sorted(groups, key=lambda group: -len(group[1]))[:_MAX_PANELS]
    groups.sort(key=lambda group: (order[group[0][0]], group[0][1]))
    bars = max(min(len(group), _BARS) for _, group in groups)
    noun = labels.device_noun(frame)
    titles = [labels.group_name(*key, noun) for key, _ in groups]
    layouts = [layout for _, group in groups for layout in group["layout"].head(_BARS)]
    panel = 0.062 * max(map(len, layouts)) + max(0.09 * max(map(len, titles)), 3.2)
    figure, axes = panels.grid(len(groups), _PANELS_PER_ROW, (panel, 0.9 + 0.3 * bars), extra_in=0.9)
    unit, name = byte_unit(rows[list(labels.MEMORY_CATEGORIES)].sum(axis=1).max())
    closed = [_closed_forms(group.head(_BARS)) for _, group in groups]
    for ax, title, (_, group), forms in zip(axes, titles, groups, closed, strict=False):
        _panel(ax, group.head(_BARS), unit, forms)
        ax.set_title(title)
    for ax in panels.bottom_of_columns(axes):
        ax.set_xlabel(f"Memory at the peak of the fullest rank, {name}")
    left_out = f"The {len(groups)} of {total} groups with most finished runs" if total > len(groups) else None
    style.bottom_legend(figure, _handles(rows, any(form is not None for forms in closed for form in forms)), left_out)
    return figure


def _closed_forms(group: pd.DataFrame) -> list[Stack | None]:
    """The planner's closed form of each row that stores its full experiment."""
    experiments = [experiment_of(row) if row.get("config_json") else None for row in labels.records(group)]
    return [None if experiment is None else predicted(experiment) for experiment in experiments]


def _panel(ax: Axes, group: pd.DataFrame, unit: int, closed: list[Stack | None]) -> None:
    left = pd.Series(0.0, index=group.index)
    known = [(place, stack.bytes) for place, stack in enumerate(closed) if stack is not None]
    end: NDArray[np.float64] = np.zeros(len(known))
    for i, (colour, hatch) in enumerate(FILLS if known else ()):
        predicted_widths = np.array([split[i] for _, split in known]) / unit
        below = [place + (_BAR + _TWIN) / 2 for place, _ in known]
        bar_series.lying(ax, below, predicted_widths, end, _TWIN, hatch=hatch, **look(colour, pale=True))
        end = end + predicted_widths
    places = range(len(group))
    for (column, _), colour, hatch in zip(
        labels.MEMORY_CATEGORIES.items(), style.CATEGORY_COLOURS, style.CATEGORY_HATCHES, strict=False
    ):
        width = group[column] / unit
        bar_series.lying(ax, places, width, left, _BAR, hatch=hatch, **look(colour, pale=False))
        left = left + width
    reserved = group["peak_reserved_bytes"] / unit
    ax.plot(reserved, places, linestyle="", marker="|", color="black", markersize=11, markeredgewidth=1.4)
    right = max([float(pd.concat([left, reserved]).max()), *end])
    limit = group["device_memory_bytes"].max() / unit
    if pd.notna(limit):
        ax.axvline(limit, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.2)
        right = max(right, limit)
    ax.set_yticks(places, group["layout"], fontsize=8)
    ax.set(xlim=(0, 1.04 * right), ylim=(len(group) - 0.4, -0.6))
    ax.grid(axis="x")


def _handles(rows: pd.DataFrame, closed: bool) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for name, colour, hatch in zip(
            labels.MEMORY_CATEGORIES.values(), style.CATEGORY_COLOURS, style.CATEGORY_HATCHES, strict=False
        )
    ]
    handles.append(Patch(label="full colour: measured by category", **look("#555555", pale=False)))
    if closed:
        handles.append(Patch(label="pale, below it: closed form, not measured", **look("#555555", pale=True)))
    if rows["peak_reserved_bytes"].notna().any():
        handles.append(
            Line2D(
                [], [], linestyle="", marker="|", color="black", markersize=10, label="peak reserved by the allocator"
            )
        )
    if rows["device_memory_bytes"].notna().any():
        names = sorted(rows["device_name"].dropna().unique())
        of = f" ({names[0]})" if len(names) == 1 else ""
        label = f"memory of the device{of}"
        handles.append(Line2D([], [], linestyle="--", color=style.LIMIT_COLOUR, label=label))
    return handles


def conclude(frame: pd.DataFrame) -> str | None:
    """Sentence on the largest part of the fastest layouts' memory, and on the reserved share of the device."""
    rows = data(frame)
    rows = rows.drop_duplicates(metrics.GROUP) if len(rows) else rows
    if rows.empty:
        return None
    shares = rows[list(labels.MEMORY_CATEGORIES)].div(rows[list(labels.MEMORY_CATEGORIES)].sum(axis=1), axis=0).median()
    sentence = (
        f"In the fastest layouts (n = {plural(len(rows), 'model and size', 'models and sizes')}) "
        f"{labels.MEMORY_CATEGORIES[str(shares.idxmax())]} take {format_percent(shares.max(), 0)} of the peak"
    )
    full = (rows["peak_reserved_bytes"] / rows["device_memory_bytes"]).dropna()
    return sentence + (
        f", and {format_percent(full.median(), 0)} of the device is reserved (medians)." if len(full) else " (median)."
    )


FIGURE = FigureSpec(
    name="memory_by_category",
    section="why",
    title="Memory by category",
    caption=(
        "The fastest layouts of each model and size, fastest first: memory of the fullest rank at its peak, as "
        "measured by category, and the planner's closed form of the same layout below it."
    ),
    draw=draw,
    data=data,
    conclude=conclude,
)
