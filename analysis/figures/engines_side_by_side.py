"""Figure of layouts that several engines ran: throughput of each engine, one line per layout."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing import style
from results.text.numbers import plural

MOST_LAYOUTS = 40
"""Number of layouts drawn over all panels: the fastest of each panel, then the second of each, and so on."""
_PANEL = ["method", "cluster", "measurement_version", "workload", "world_size"]
"""Columns that layouts of one panel share."""
_RATE = "tokens_per_s_per_gpu"
_MARKERS = ("o", "s", "D", "^", "v")


@style.styled
def draw(rows: pd.DataFrame, unit: str) -> Figure:
    """A panel for each workload and number of devices. ``rows`` come from `analysis.rows.engines.side_by_side`. Raises
    `NothingToDraw` if no layout has two rates."""
    known = rows[rows[_RATE].notna()]
    known = known.assign(_panel=known.groupby(_PANEL, dropna=False).ngroup())
    known = known[known.groupby(["_panel", "layout"])["engine"].transform("nunique") > 1]
    if known.empty:
        raise style.NothingToDraw("no layout finished with more than one engine")
    best = known.sort_values(_RATE, ascending=False, kind="stable").drop_duplicates(["_panel", "layout"])
    turns = best.groupby("_panel").cumcount().sort_values(kind="stable")
    best = best.loc[best.index.isin(turns.index[:MOST_LAYOUTS])]
    known = known.merge(best[["_panel", "layout"]])
    panels = [panel for _, panel in best.groupby("_panel", sort=False)]
    looks: dict[str, dict[str, Any]] = {
        engine: {"linestyle": "", "markersize": 5, "color": style.SERIES_COLOURS[at % 7], "marker": _MARKERS[at % 5]}
        for at, engine in enumerate(dict.fromkeys(known["engine"]))
    }
    titles_in = 0.55 * len(panels) - 0.3 if len(panels) > 1 else 0
    figure = style.new_figure(7.2, 1.1 + 0.22 * len(best) + titles_in)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(panel) + 0.4 for panel in panels])[:, 0]
    several = [name for name in _PANEL[:3] if best[name].nunique(dropna=False) > 1]
    for ax, panel in zip(axes, panels, strict=True):
        first = panel.iloc[0]
        _draw_panel(ax, known[known["_panel"] == first["_panel"]], list(panel["layout"]), looks)
        if len(panels) > 1:
            devices = plural(int(first["world_size"]), unit.rpartition("/")[2])
            ax.set_title(", ".join([first["workload"], devices, *(str(first[name]) for name in several)]), fontsize=9)
        else:
            named = f"{first['workload']} · {first['world_size']:,} · "
            ax.set_yticklabels([named + layout for layout in panel["layout"]])
    axes[-1].set_xlabel(unit)
    handles = []
    for engine, of_engine in known.groupby("engine", sort=False):
        version = ", ".join(sorted(of_engine["engine_version"].dropna().astype(str).unique()))
        handles.append(Line2D([], [], label=f"{engine} {version}", **looks[str(engine)]))
    style.bottom_legend(figure, handles)
    return figure


def _draw_panel(ax: Axes, rows: pd.DataFrame, layouts: list[str], looks: dict[str, dict[str, Any]]) -> None:
    """Draw ``layouts`` from the top, with the marker of each engine that has a rate."""
    place = {layout: len(layouts) - 1 - at for at, layout in enumerate(layouts)}
    for layout, group in rows.groupby("layout"):
        ends = [group[_RATE].min(), group[_RATE].max()]
        ax.plot(ends, [place[str(layout)]] * 2, color="#bbbbbb", linewidth=1, zorder=1)
    for engine, look in looks.items():
        of_engine = rows[rows["engine"] == engine]
        ax.plot(of_engine[_RATE], of_engine["layout"].map(place), zorder=2, **look)
    ax.set_yticks(list(place.values()), layouts)
    ax.set_ylim(-0.7, len(layouts) - 0.3)
    ax.set_xlim(0, 1.03 * rows[_RATE].max())
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.locator_params(axis="x", nbins=7)
