"""What each choice costs, drawn: the throughput and memory ratios of `analysis.rows.choice_costs`, which the page shows
as a matrix."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.drawing import style
from analysis.figures import conclusions
from analysis.figures.spec import FigureSpec
from analysis.rows import choice_costs, labels, metrics
from results.text.numbers import listed

_COLOUR = "#0072B2"
_TICKS = (1.0, 0.5, 2.0, 0.2, 5.0, 0.1, 10.0, 0.8, 1.2, 0.9, 1.1, 1.5, 0.7, 0.3, 3.0, 0.05, 20.0, 0.01, 100.0)
"""Candidate ticks in order of priority."""
_WIDTH_IN = 10.5
_POOLED = {
    "engine_version": "engine versions",
    "network_regime": "network regimes",
    "device_name": "devices",
    "driver_version": "drivers",
    "torch_version": "PyTorch versions",
}


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Throughput (left) and peak memory (right) with a value over those with the first of its axis, one line for each
    value that has a pair."""
    table = choice_costs.table(frame)
    known = table[table["pairs"] > 0].reset_index(drop=True)
    if known.empty:
        raise style.NothingToDraw("no two runs agree in everything but one choice")
    figure = style.new_figure(_WIDTH_IN, 0.27 * len(known) + 1.9)
    axes = figure.subplots(1, 2, sharey=True)
    peak = metrics.MEMORY_NAMES[metrics.memory_column(frame)]
    _panel(axes[0], known, "", f"Ratio of {labels.rate_unit(frame)}")
    _panel(axes[1], known, "memory_", f"Ratio of {peak}")
    axes[0].hlines(range(len(known)), *_ends(known, "interval_"), color=_COLOUR, linewidth=1.8)
    names = [conclusions.choice(row) + f" (n = {row['pairs']:,})" for row in labels.records(known)]
    axes[0].set_yticks(range(len(known)), names, fontsize=8.5)
    style.bottom_legend(figure, _handles(), _note(frame))
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, prefix: str, label: str) -> None:
    """Medians and ranges of the columns with this prefix."""
    places = np.arange(len(rows))
    low, high = _ends(rows, prefix)
    ax.hlines(places, low, high, color="#b5cfe3", linewidth=4.5)
    ax.plot(rows[f"{prefix}median"], places, linestyle="", marker="o", markersize=4.5, color=_COLOUR)
    ax.axvline(1.0, color="#444444", linewidth=1)
    for place, (axis, before) in enumerate(zip(rows["axis"], rows["axis"].shift(), strict=True)):
        if place and axis != before:
            ax.axhline(place - 0.5, color="#e2e2e2", linewidth=0.8, zorder=0)
    least, most = np.nanmin([0.95 * low.min(), 0.9]), np.nanmax([1.05 * high.max(), 1.1])
    ax.set(xscale="log", xlim=(least, most), ylim=(len(rows) - 0.4, -0.6), xlabel=label)
    ticks = [tick for tick in _TICKS if least <= tick <= most]
    ax.xaxis.set_major_locator(FixedLocator(_spaced(ticks, most / least)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"× {value:g}"))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def _ends(rows: pd.DataFrame, prefix: str) -> tuple[pd.Series, pd.Series]:
    return rows[f"{prefix}low"].astype(float), rows[f"{prefix}high"].astype(float)


def _spaced(ticks: list[float], span: float) -> list[float]:
    """Ticks far enough apart to be read on a logarithmic axis over ``span``; earlier ticks have priority."""
    kept: list[float] = []
    for tick in ticks:
        if all(abs(np.log(tick / other)) > 0.1 * np.log(span) for other in kept):
            kept.append(tick)
    return sorted(kept)


def _note(frame: pd.DataFrame) -> str | None:
    """Note on settings in which the pairs of one median differ."""
    parts = []
    if "rehearsed" in set(frame["method"].unique()):
        parts.append("Not computed for rehearsed rows: tp, whose steps come out too short; memory by tp has a figure.")
    pooled = [f"{name} ({listed(values)})" for name, values in _several(frame[frame["outcome"] == "ok"])]
    if pooled:
        parts.append(f"The runs of a pair agree in them, but one median has pairs from several {listed(pooled)}.")
    return "\n".join(line for part in parts for line in textwrap.wrap(part, int(_WIDTH_IN / 0.078))) or None


def _several(rows: pd.DataFrame) -> list[tuple[str, list[str]]]:
    pooled = []
    for column, name in _POOLED.items():
        values = sorted(str(value) for value in rows[column].dropna().unique()) if column in rows else []
        if len(values) > 1:
            pooled.append((name, values))
    return pooled


def _handles() -> list[Line2D]:
    return [
        Line2D([], [], color=_COLOUR, marker="o", markersize=4.5, linewidth=1.8, label="median, its 95 % interval"),
        Line2D([], [], color="#b5cfe3", linewidth=4.5, label="range of the pairs"),
    ]


FIGURE = FigureSpec(
    name="effects",
    section="why",
    title="What each choice costs",
    caption=(
        "Median and range of the ratio, with a value over with the first of its axis, over pairs of runs that agree in "
        "everything else, including devices, driver and versions: the page's matrix. A degree takes ranks from data "
        "parallelism on the same devices at the same batch, a larger micro-batch takes micro-batches. Pairs that "
        "share a run are not independent: intervals are too narrow."
    ),
    draw=draw,
    data=choice_costs.table,
    conclude=lambda frame: conclusions.of_choices(choice_costs.table(frame)),
)
