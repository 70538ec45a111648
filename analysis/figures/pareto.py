"""Throughput over peak memory, with the Pareto front: the layouts for which no other is as fast in less memory."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing import style
from analysis.figures import conclusions, panels
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import byte_unit

_VALUES = (
    *(*metrics.GROUP, "layout", "memory_bytes", "memory_kind", metrics.RANK_BY, "on_front"),
    *("device_memory_bytes", "attempt_id"),
)


_MOST_PANELS = 6
_COLUMNS = 3
_NAMED = 3
"""Number of layouts of a front that are named below the panel."""
_APART = 0.07
"""Smallest distance between named points, as a share of a panel's width or height."""
_COLOUR = "#0072B2"


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Every ranked run with known peak memory, `_VALUES`, by group and then by memory.

    ``on_front``: no run of the same model and number of devices is at least equal in both throughput and memory and
    better in one. Runs equal in both are on the front together.
    """
    memory = metrics.memory_column(frame)
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna() & rows[memory].notna()]
    rows = rows.assign(memory_bytes=rows[memory].astype(float), memory_kind=metrics.MEMORY_NAMES[memory])
    rows = rows.sort_values(["memory_bytes", metrics.RANK_BY], ascending=[True, False], kind="stable")
    groups = rows.groupby(metrics.GROUP, sort=False)
    rate = rows[metrics.RANK_BY]
    # Rows are sorted by memory, then fastest first, so the run on the front is the first to reach the running maximum.
    reached = groups[metrics.RANK_BY].cummax()
    before = reached.groupby([rows[name] for name in metrics.GROUP]).shift(fill_value=0.0)
    leads = rate > before
    leader = rows["memory_bytes"].where(leads).groupby([rows[name] for name in metrics.GROUP]).ffill()
    equal = (rate == reached) & (rows["memory_bytes"] == leader)
    rows = rows.assign(on_front=leads | equal)
    return labels.in_group_order(rows)[[*_VALUES]].reset_index(drop=True) if len(rows) else rows[[*_VALUES]]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """One panel per model and number of devices; the front is a line, its ends and knee are named below the panel."""
    rows = data(frame)
    if rows.empty:
        raise style.NothingToDraw("no finished run has both a throughput and a peak of memory")
    groups, left_out = panels.chosen_groups(rows, _MOST_PANELS)
    parts = [panels.rows_of(rows, group) for group in groups]
    named = [_named(part[part["on_front"]]) for part in parts]
    noun, kind = labels.device_noun(frame), rows["memory_kind"].iloc[0]
    titles = [
        f"{labels.group_name(*group, noun)} (n = {len(part):,})" for group, part in zip(groups, parts, strict=True)
    ]
    longest = max(len(layout) for part in named for layout in part["layout"])
    width = max(3.5, 0.062 * longest + 0.8, 0.09 * max(map(len, titles)) + 0.6)
    figure, axes = panels.grid(len(parts), _COLUMNS, (width, 3.5))
    unit, unit_name = byte_unit(rows["memory_bytes"].max())
    for ax, title, part, few in zip(axes, titles, parts, named, strict=True):
        _panel(ax, part, few, unit)
        ax.set_title(title)
        ax.set_xlabel(f"{kind[0].upper()}{kind[1:]}, {unit_name}")
        _key(ax, few)
    for ax in panels.leftmost(axes):
        ax.set_ylabel(labels.rate_unit(frame))
    style.bottom_legend(figure, _handles(rows), left_out)
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, named: pd.DataFrame, unit: int) -> None:
    others, front = rows[~rows["on_front"]], rows[rows["on_front"]]
    ax.plot(
        others["memory_bytes"] / unit,
        others[metrics.RANK_BY],
        linestyle="",
        marker="o",
        markersize=3.2,
        markeredgewidth=0,
        color=style.FAILURE_GREY,
        alpha=0.6,
        rasterized=len(others) > style.MOST_VECTOR_MARKS,
    )
    x, y = front["memory_bytes"] / unit, front[metrics.RANK_BY]
    ax.step(x, y, where="post", color=_COLOUR, linewidth=1.3)
    ax.plot(x, y, linestyle="", marker="D", markersize=4.5, color=_COLOUR)
    limit = rows["device_memory_bytes"].max() / unit
    right = float((rows["memory_bytes"] / unit).max())
    if np.isfinite(limit):
        ax.axvline(limit, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.2)
        right = max(right, float(limit))
    ax.set(xlim=(0, 1.05 * right), ylim=(0, 1.16 * float(rows[metrics.RANK_BY].max())))
    for letter, row in zip("abc", labels.records(named), strict=False):
        at = (row["memory_bytes"] / unit, row[metrics.RANK_BY])
        ax.annotate(letter, at, xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=9, weight="bold")
    ax.locator_params(nbins=5)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.grid()


def _named(front: pd.DataFrame) -> pd.DataFrame:
    """The leanest run of a front, the fastest, and the one farthest above the line through both, in the order of
    memory.

    A run too near another to be distinguished is left out.
    """
    front = front.sort_values(["memory_bytes", metrics.RANK_BY], kind="stable").reset_index(drop=True)
    x = front["memory_bytes"].to_numpy(dtype=float) / float(front["memory_bytes"].max())
    y = front[metrics.RANK_BY].to_numpy(dtype=float) / float(front[metrics.RANK_BY].max())
    run = np.where(x[-1] > x[0], x[-1] - x[0], 1.0)
    above = y - (y[0] + (y[-1] - y[0]) * (x - x[0]) / run)
    kept: list[int] = []
    for place in [len(front) - 1, 0, int(np.argmax(above))][:_NAMED]:
        if all(abs(x[place] - x[other]) > _APART or abs(y[place] - y[other]) > 2 * _APART for other in kept):
            kept.append(place)
    return front.iloc[sorted(kept)]


def _key(ax: Axes, named: pd.DataFrame) -> None:
    """Write the names below the axis label, where no point can be."""
    lines = [f"{letter}  {layout}" for letter, layout in zip("abc", named["layout"], strict=False)]
    ax.annotate(
        "\n".join(lines),
        (0, 0),
        xycoords="axes fraction",
        xytext=(0, -36),
        textcoords="offset points",
        va="top",
        fontsize=8,
        linespacing=1.35,
    )


def _handles(rows: pd.DataFrame) -> list[Line2D]:
    handles = [
        Line2D([], [], color=_COLOUR, marker="D", markersize=4.5, label="front: nothing is faster in less memory"),
        Line2D([], [], linestyle="", marker="o", markersize=3.5, color=style.FAILURE_GREY, label="other finished runs"),
    ]
    if rows["device_memory_bytes"].notna().any():
        handles.append(Line2D([], [], linestyle="--", color=style.LIMIT_COLOUR, label="memory of the device"))
    return handles


FIGURE = FigureSpec(
    name="pareto",
    section="best",
    title="Throughput against memory",
    caption=(
        "Each point is a finished layout, repeats counted once. For a layout on the front none is at least as fast "
        "in less "
        "memory; the leanest and the fastest run of the front and the knee between them are named."
    ),
    draw=draw,
    data=data,
    conclude=lambda frame: conclusions.of_front(data(frame), frame),
)
