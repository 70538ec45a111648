"""A figure of layouts that several engines ran: throughput of each engine, a line a layout."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures import style
from analysis.rows import labels

MOST_LAYOUTS = 40
"""Layouts that are drawn: the fastest of them."""
_MARKERS = ("o", "s", "D", "^", "v")


@style.styled
def draw(rows: pd.DataFrame, unit: str) -> Figure:
    """``rows`` are of `analysis.rows.engines.side_by_side`. Raises `NothingToDraw` where no layout has two rates."""
    rate = "tokens_per_s_per_gpu"
    known = rows[rows[rate].notna()]
    key = ["method", "cluster", "measurement_version", "workload", "world_size", "layout"]
    names = known[key].astype(str).agg("|".join, axis=1)
    known = known.assign(_key=names)[names.isin(names[names.duplicated()])]
    if known.empty:
        raise style.NothingToDraw("no layout finished with more than one engine")
    best = known.groupby("_key")[rate].max().sort_values(ascending=False)
    shown = list(best.index[:MOST_LAYOUTS])
    place = {name: len(shown) - 1 - at for at, name in enumerate(shown)}
    known = known[known["_key"].isin(place)]
    engines = list(dict.fromkeys(known["engine"]))
    figure = style.new_figure(7.2, 1.1 + 0.22 * len(shown))
    ax = figure.subplots()
    for name, group in known.groupby("_key"):
        ax.plot([group[rate].min(), group[rate].max()], [place[str(name)]] * 2, color="#bbbbbb", linewidth=1, zorder=1)
    handles = []
    for at, engine in enumerate(engines):
        own = known[known["engine"] == engine]
        color, marker = style.SERIES_COLOURS[at % 7], _MARKERS[at % 5]
        ax.plot(own[rate], own["_key"].map(place), linestyle="", markersize=5, zorder=2, color=color, marker=marker)
        version = ", ".join(sorted(own["engine_version"].dropna().astype(str).unique()))
        handles.append(
            Line2D([], [], linestyle="", markersize=5, label=f"{engine} {version}", color=color, marker=marker)
        )
    names_of = {
        row["_key"]: f"{row['workload']} · {row['world_size']:,} · {row['layout']}" for row in labels.records(known)
    }
    ax.set_yticks(
        [place[name] for name in shown],
        [names_of[name] for name in shown],
    )
    ax.set_ylim(-0.7, len(shown) - 0.3)
    ax.set_xlim(left=0)
    ax.set_xlabel(unit)
    style.bottom_legend(figure, handles)
    return figure
