"""What one choice does by itself: median ratios over matched pairs of runs, with their intervals."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.data import effects
from analysis.figures import style
from analysis.rows import labels

_COLOUR = "#0072B2"
_TICKS = (1.0, 0.5, 2.0, 0.2, 5.0, 0.1, 10.0, 0.8, 1.2, 0.9, 1.1, 1.5, 0.7, 0.3, 3.0, 0.05, 20.0)
"""Those that come first are kept first."""
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
    """Throughput (left) and peak memory (right) after over before, one line an effect; too few pairs are named."""
    table = effects.table(frame)
    known = table[table["enough"]].reset_index(drop=True)
    if known.empty:
        most = int(table["pairs"].max()) if len(table) else 0
        raise style.NothingToDraw(
            f"no choice has {effects.FEWEST} pairs of runs that agree in everything else; the most there are is {most}"
        )
    figure = style.new_figure(_WIDTH_IN, 0.27 * len(known) + 1.9)
    axes = figure.subplots(1, 2, sharey=True)
    kind = str(known["memory_kind"].iloc[0])
    for ax, name, label in (
        (axes[0], "throughput", f"Ratio of {labels.rate_unit(frame)}"),
        (axes[1], "memory", f"Ratio of {kind}"),
    ):
        _panel(ax, known, name)
        ax.set_xlabel(label)
    names = [f"{effect} (n = {pairs:,})" for effect, pairs in zip(known["effect"], known["pairs"], strict=True)]
    axes[0].set_yticks(range(len(known)), names, fontsize=8.5)
    style.bottom_legend(figure, _handles(), _note(frame, table))
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    places = np.arange(len(rows))
    ax.hlines(places, rows[f"{name}_q05"], rows[f"{name}_q95"], color="#b5cfe3", linewidth=4.5)
    ax.hlines(places, rows[f"{name}_low"], rows[f"{name}_high"], color=_COLOUR, linewidth=1.8)
    ax.plot(rows[f"{name}_ratio"], places, linestyle="", marker="o", markersize=4.5, color=_COLOUR)
    ax.axvline(1.0, color="#444444", linewidth=1)
    for place, (choice, before) in enumerate(zip(rows["choice"], rows["choice"].shift(), strict=True)):
        if place and choice != before:
            ax.axhline(place - 0.5, color="#e2e2e2", linewidth=0.8, zorder=0)
    values = rows[[f"{name}_q05", f"{name}_q95"]].to_numpy(dtype=float)
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if np.isfinite(values).any() else (0.9, 1.1)
    low, high = min(0.95 * low, 0.9), max(1.05 * high, 1.1)
    ax.set(xscale="log", xlim=(low, high), ylim=(len(rows) - 0.4, -0.6))
    ax.xaxis.set_major_locator(FixedLocator(_spaced([tick for tick in _TICKS if low <= tick <= high], high / low)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"× {value:g}"))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def _spaced(ticks: list[float], span: float) -> list[float]:
    """Ticks far enough from each other on a logarithmic axis over ``span`` to be read, the first ones first."""
    kept: list[float] = []
    for tick in ticks:
        if all(abs(np.log(tick / other)) > 0.1 * np.log(span) for other in kept):
            kept.append(tick)
    return sorted(kept)


def _note(frame: pd.DataFrame, table: pd.DataFrame) -> str | None:
    """Which effects have too few pairs, and what the pairs of one median do not share with each other."""
    parts = []
    few = table[~table["enough"]]
    if len(few):
        shown = few["effect"].str.replace(" ", "\N{NO-BREAK SPACE}")  # a line never breaks inside a name
        named = ", ".join(f"{effect} ({pairs})" for effect, pairs in zip(shown, few["pairs"], strict=True))
        parts.append(f"Too few pairs, fewer than {effects.FEWEST}, for a number: {named}.")
    ok = frame[frame["outcome"] == "ok"]
    pooled = [f"{name} ({labels.listed(values)})" for name, values in _several(ok)]
    if pooled:
        parts.append(f"Both runs of a pair share them, but one median has pairs of several {labels.listed(pooled)}.")
    return "\n".join(line for part in parts for line in textwrap.wrap(part, int(_WIDTH_IN / 0.078))) or None


def _several(rows: pd.DataFrame) -> list[tuple[str, list[str]]]:
    found = []
    for column, name in _POOLED.items():
        values = sorted(str(value) for value in rows[column].dropna().unique()) if column in rows else []
        if len(values) > 1:
            found.append((name, values))
    return found


def _handles() -> list[Line2D]:
    return [
        Line2D([], [], color=_COLOUR, marker="o", markersize=4.5, linewidth=1.8, label="median, 95 % interval"),
        Line2D([], [], color="#b5cfe3", linewidth=4.5, label="5 to 95 % of the pairs"),
    ]
