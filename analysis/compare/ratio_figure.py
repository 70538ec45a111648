"""Figure of B over A point by point, for throughput and peak memory, with intervals, sorted."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.compare import moved
from analysis.drawing import style
from analysis.rows import labels

MOST_LABELLED = 36
"""Largest number of points that are listed with names."""
_LOOK = {
    moved.FASTER: ("^", "#0072B2", "full"),
    moved.SLOWER: ("v", "#D55E00", "full"),
    moved.SAME: ("o", "#777777", "full"),
    moved.DIFFERS: ("D", "#8A6D00", "none"),
    moved.UNKNOWN: ("x", "#777777", "full"),
    "less": ("v", "#0072B2", "full"),
    "more": ("^", "#D55E00", "full"),
    "same": ("o", "#777777", "full"),
}
"""Marker, colour and fill: shapes distinguish the verdicts in grey as well."""


@style.styled
def draw(pairs: pd.DataFrame, noise: moved.Noise) -> Figure:
    """Figure of ``pairs`` from `moved.judged`. Raises `NothingToDraw` if no pair finished on both sides."""
    rows = pairs[(pairs["speed"] != moved.UNFINISHED) & pairs["ratio"].notna()]
    if rows.empty:
        raise style.NothingToDraw("no matched point has a throughput on both sides")
    rows = rows.sort_values("ratio", kind="stable").reset_index(drop=True)
    memory = moved.memory_kind(rows).name
    named = rows.rename(columns={"backend_a": "backend"})
    panels = 2 if rows["peak_ratio"].notna().any() else 1
    if len(rows) <= MOST_LABELLED:
        figure = style.new_figure(4.6 + 3.2 * panels, 1.8 + 0.24 * max(len(rows), 5))
        axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
        names = [_name(row) for row in labels.records(rows)]
        axes[0].set_yticks(range(len(rows)), names)
        axes[0].set_ylim(-0.7, len(rows) - 0.3)
        _lay(axes[0], rows, "ratio", "speed", upright=False)
        axes[0].set_ylabel(f"Model · {labels.device_noun(named)} · layout")
        if panels == 2:
            _lay(axes[1], rows, "peak_ratio", "memory", upright=False)
            axes[1].tick_params(left=False)
    else:
        figure = style.new_figure(9.0, 3.4 * panels + 0.5)
        axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
        _lay(axes[0], rows, "ratio", "speed", upright=True)
        axes[0].set_xlabel("Points, sorted by the change of throughput")
        if panels == 2:
            by_memory = rows[rows["peak_ratio"].notna()].sort_values("peak_ratio", kind="stable").reset_index(drop=True)
            _lay(axes[1], by_memory, "peak_ratio", "memory", upright=True)
            axes[1].set_xlabel("Points, sorted by the change of peak memory")
    unit = labels.rate_unit(named)
    _title(axes[0], "Throughput", f"B over A in {unit}, %", len(rows), upright=len(rows) > MOST_LABELLED)
    if panels == 2:
        known = int(rows["peak_ratio"].notna().sum())
        _title(axes[1], f"Peak {memory} memory", "B over A in bytes, %", known, upright=len(rows) > MOST_LABELLED)
    _shade(axes[0], noise, upright=len(rows) > MOST_LABELLED)
    style.bottom_legend(figure, _handles(rows, noise))
    return figure


def _lay(ax: Axes, rows: pd.DataFrame, column: str, verdict: str, *, upright: bool) -> None:
    """Draw each point's change in percent at its position, with its interval if known."""
    change = 100 * (rows[column].to_numpy(float) - 1)
    places = np.arange(len(rows))
    if column == "ratio":
        low, high = (100 * (rows[f"ratio_{end}"].to_numpy(float) - 1) for end in ("low", "high"))
        known = np.isfinite(low) & np.isfinite(high)
        bars = ax.vlines if upright else ax.hlines
        bars(places[known], low[known], high[known], color="#b5b5b5", linewidth=1.0, zorder=1)
    for name, (marker, colour, fill) in _LOOK.items():
        there = (rows[verdict] == name).to_numpy() & np.isfinite(change)
        if there.any():
            x, y = (places[there], change[there]) if upright else (change[there], places[there])
            ax.plot(x, y, linestyle="", marker=marker, color=colour, fillstyle=fill, markersize=4.5, zorder=2)
    zero = ax.axhline if upright else ax.axvline
    zero(0, color="#222222", linewidth=0.8, zorder=0)
    for line in ax.lines:
        line.set_rasterized(len(rows) > style.MOST_VECTOR_MARKS)


def _title(ax: Axes, title: str, label: str, count: int, *, upright: bool) -> None:
    ax.set_title(f"{title}, n = {count:,}")
    (ax.set_ylabel if upright else ax.set_xlabel)(label)
    ax.grid(visible=True, axis="y" if upright else "x")
    ax.margins(0.02 if upright else 0.08, 0.08)


def _shade(ax: Axes, noise: moved.Noise, *, upright: bool) -> None:
    span = ax.axhspan if upright else ax.axvspan
    span(-100 * noise.fraction, 100 * noise.fraction, color="#e8e8e8", zorder=-1, linewidth=0)


def _name(row: dict[str, object]) -> str:
    layout = row["layout_a"] if row["layout_a"] == row["layout_b"] else f"{row['layout_a']} → {row['layout_b']}"
    return f"{row['workload_a']} · {row['world_size_a']:,} · {layout}"


def _handles(rows: pd.DataFrame, noise: moved.Noise) -> list[Line2D | Patch]:
    """Legend of the verdicts that occur; a change of memory has the marker of its direction."""
    handles: list[Line2D | Patch] = []
    words = {"more": "needs more", "less": "needs less", "same": "the same memory"}
    for column in ("speed", "memory"):
        for name, (marker, colour, fill) in _LOOK.items():
            if (rows[column] == name).any():
                mark = Line2D([], [], label=words.get(name, name), linestyle="", marker=marker, color=colour)
                mark.set(fillstyle=fill, markersize=4.5)
                handles.append(mark)
    handles.append(Patch(color="#e8e8e8", label=f"noise, ± {moved.percent(noise.fraction)}"))
    return handles
