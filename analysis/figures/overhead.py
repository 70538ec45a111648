"""Wall time of a point by phase, beyond the timed steps."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.drawing import bar_series, style
from analysis.figures import conclusions
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics

_MOST_GROUPS = 40
"""Largest number of bars: those with the most points; more do not fit a screen."""
_SHOWN = [*metrics.GROUP, "layout", "compile", *metrics.OVERHEAD, "gap_s", "attempt_id"]
_READ = [*dict.fromkeys((*labels.ORDERED_BY, *_SHOWN))]


def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase of every finished run that has them."""
    rows = frame.loc[frame["outcome"] == "ok", _READ]
    rows = rows.dropna(subset=list(metrics.OVERHEAD), how="all")
    return rows[_SHOWN]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Median seconds of each phase over the finished points of each group, and the gap between two points."""
    ok = frame.loc[frame["outcome"] == "ok", _READ]
    rows = ok.dropna(subset=list(metrics.OVERHEAD), how="all")
    if rows.empty:
        raise style.NothingToDraw("no finished run has its phases timed")
    keys = [*metrics.GROUP, "compile"] if rows["compile"].nunique() > 1 else metrics.GROUP
    medians = rows.groupby(keys)[[*metrics.OVERHEAD, "gap_s"]].median()
    counts = rows.groupby(keys).size()
    every = len(counts)
    counts = counts.sort_values(ascending=False, kind="stable").head(_MOST_GROUPS)
    medians = medians.loc[counts.index]
    order = {workload: i for i, workload in enumerate(labels.workload_order(rows))}
    medians = medians.loc[sorted(medians.index, key=lambda key: (order[key[0]], *key[1:]))]
    noun = labels.device_noun(frame)
    figure = style.new_figure(10.0, 0.32 * max(len(medians), 2) + 1.7)
    ax = figure.subplots()
    places = range(len(medians))
    left = pd.Series(0.0, index=medians.index)
    for column, colour, hatch in zip(metrics.OVERHEAD, _COLOURS, style.CATEGORY_HATCHES, strict=False):
        width = medians[column].fillna(0.0)
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        bar_series.lying(ax, places, width, left, 0.72, **look)
        left = left + width
    gaps = medians["gap_s"]
    ax.plot(gaps, places, linestyle="", marker="D", color="black", markersize=5, markerfacecolor="white")
    ax.set_yticks(places, [_name(key, noun, int(counts.loc[key])) for key in medians.index])
    ax.set(ylim=(len(medians) - 0.4, -0.6), xlabel="Median time of a point, s", title="Where a point's time goes")
    ax.set_xlim(0, 1.04 * max(float(left.max()), float(gaps.max()) if gaps.notna().any() else 0.0, 1e-3))
    ax.grid(axis="x")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for name, colour, hatch in zip(metrics.OVERHEAD.values(), _COLOURS, style.CATEGORY_HATCHES, strict=False)
    ]
    if gaps.notna().any():
        handles.append(
            Line2D(
                [],
                [],
                linestyle="",
                marker="D",
                color="black",
                markerfacecolor="white",
                markersize=5,
                label="gap between points",
            )
        )
    left_out = f"The {len(counts)} of {every} groups with most finished points" if every > len(counts) else None
    style.bottom_legend(figure, handles, left_out)
    return figure


_COLOURS = ("#999999", "#E69F00", "#56B4E9", "#CC79A7", "#0072B2", "#D55E00")


def _name(key: tuple[Any, ...], noun: str, count: int) -> str:
    workload, size, *rest = key
    compiled = ", compiled" if rest and rest[0] != "none" else ""
    return f"{labels.group_name(workload, size, noun)}{compiled} (n = {count})"


FIGURE = FigureSpec(
    name="overhead",
    section="trust",
    title="Overhead",
    caption="Median wall time of a finished point by phase; white diamonds: the time lost between two points.",
    draw=draw,
    data=data,
    conclude=lambda frame: conclusions.of_overhead(data(frame)),
)
