"""Every finished run as a line over its degrees, batching, memory and throughput."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing import style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import GIB, format_number, plural

_MAX_PANELS = 6
_FEWEST = 5
"""Smallest number of finished runs with which a model gets a panel, unless none has more."""
_MOST_LINES = 250
"""Largest number of lines in a panel, chosen evenly from the best to the worst: more cover each other and take long to
draw."""
_BEST = 0.05
"""Share of the runs of a panel that are drawn in colour."""
_BEST_COLOUR = "#0072B2"
AXES = {
    "world_size": "devices",
    "dp": "dp",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "pp": "pp",
    "num_microbatches": "micro-\nbatches",
    "micro_batch_size": "micro-\nbatch size",
    "zero_stage": "ZeRO",
}
_ALWAYS = ("dp", "tp", "pp", "num_microbatches", "micro_batch_size")


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each line: the finished runs, best first in each model, with the columns of the axes."""
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna()].assign(memory_gib=lambda r: r[metrics.memory_column(r)] / GIB)
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    rows = rows.assign(_order=rows["workload"].map(order)).sort_values(
        ["_order", metrics.RANK_BY], ascending=[True, False], kind="stable"
    )
    kept = ["workload", *AXES, "memory_gib", metrics.RANK_BY, metrics.MFU, "layout", "attempt_id"]
    return rows[kept].reset_index(drop=True)


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """One panel per model, one line per run: the best ones in colour, all others in grey below them."""
    rows = data(frame)
    if rows.empty:
        raise style.NothingToDraw("no run has finished with a throughput")
    runs = rows["workload"].value_counts()
    names = list(runs[runs >= min(_FEWEST, int(runs.max()))].index[:_MAX_PANELS])
    if runs.max() < 2:
        raise style.NothingToDraw("no model has two finished runs to compare")
    names = [name for name in rows["workload"].unique() if name in names]
    rows = rows[rows["workload"].isin(names)]
    shown = [name for name in AXES if name in _ALWAYS or rows[name].nunique() > 1]
    memory = metrics.MEMORY_NAMES[metrics.memory_column(frame)].replace(" memory", "\nmemory, GiB")
    titles = [*(AXES[name] for name in shown), memory, labels.rate_unit(frame).replace("tokens/s/", "tokens/s\nper ")]
    figure = style.new_figure(10.5, 2.1 * len(names) + 0.7)
    axes = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    axes[-1].set_xlabel("Degrees and batching at equal distances, memory and throughput to scale")
    for ax, name in zip(axes, names, strict=True):
        runs_here = rows[rows["workload"] == name]
        drawn = runs_here.iloc[np.linspace(0, len(runs_here) - 1, min(len(runs_here), _MOST_LINES)).astype(int)]
        _panel(ax, drawn, [*shown, "memory_gib", metrics.RANK_BY], titles)
        cut = f", {len(drawn):,} of them drawn" if len(drawn) < len(runs_here) else ""
        ax.set_title(f"{name}: {plural(len(runs_here), 'finished run')}{cut}", pad=20)  # above the names of the axes
    style.bottom_legend(
        figure,
        [
            Line2D([], [], color=_BEST_COLOUR, linewidth=1.6, label=f"fastest {100 * _BEST:.0f} % of a panel"),
            Line2D([], [], color=style.FAILURE_GREY, linewidth=0.6, label="other finished runs"),
        ],
    )
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, columns: list[str], titles: list[str]) -> None:
    heights = np.column_stack([_heights(ax, place, rows[name], name) for place, name in enumerate(columns)])
    style.add_lines_across(ax, "x", range(len(columns)), color="#888888", linewidth=0.8)
    rates = rows[metrics.RANK_BY].to_numpy(dtype=float)
    # Runs with equal degrees would hide each other: each is shifted by a small offset that depends only on its
    # position.
    moved = np.linspace(-0.018, 0.018, len(rows))[:, None]
    heights = np.where(np.isnan(heights), np.nan, heights + moved * (np.arange(len(columns)) < len(columns) - 2))
    x = np.arange(len(columns), dtype=float)
    lines = [np.column_stack([x, line]) for line in heights[::-1]]
    best = rates[::-1] >= np.quantile(rates, 1 - _BEST)
    colours = [(_BEST_COLOUR, 1.0) if one else (style.FAILURE_GREY, 0.2) for one in best]
    widths = np.where(best, 1.6, 0.6)
    ax.add_collection(LineCollection(lines, colors=colours, linewidths=widths, rasterized=len(rows) > 300))
    ax.set(xlim=(-0.15, len(columns) - 0.75), ylim=(-0.06, 1.06))
    ax.set_yticks([])
    ax.set_xticks(x, titles, fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0, left=False, top=False)
    ax.spines[:].set_visible(False)


def _heights(ax: Axes, place: int, values: pd.Series, name: str) -> np.ndarray:
    """Heights between 0 and 1 of the values of one axis; draws its tick labels."""
    if name in AXES:
        ticks = sorted(float(value) for value in values.dropna().unique())
        where = {tick: i / max(len(ticks) - 1, 1) for i, tick in enumerate(ticks)}
        heights = values.astype(float).map(where)
        marks = [(where[tick], f"{tick:g}") for tick in ticks]
    else:
        low, high = 0.0, float(values.max()) if values.notna().any() else 1.0
        heights = (values.astype(float) - low) / ((high - low) or 1.0)
        marks = [(0.0, "0"), (0.5, format_number(high / 2)), (1.0, format_number(high))]
    for height, text in marks:
        # Excluded from the layout: measuring many texts takes time, and only those of the last axis reach beyond the
        # panel.
        inside = ax.text(place + 0.03, height, text, fontsize=7, va="center", zorder=5)
        inside.set_in_layout(name == metrics.RANK_BY)
    return heights.to_numpy(dtype=float)


FIGURE = FigureSpec(
    name="parallel_coordinates",
    section="best",
    title="Every finished run over its degrees",
    caption=(
        "One line per finished run, the fastest twentieth of each panel in colour. Degrees and batching are at "
        "equal distances; memory and throughput are to scale."
    ),
    draw=draw,
    data=data,
)
