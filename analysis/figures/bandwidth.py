"""Collective bandwidth over the number of nodes, with bands, and the two network regimes separately."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.drawing import style
from analysis.figures.spec import FigureSpec
from analysis.rows import collective_bandwidth
from results.text.numbers import plural

_REGIMES = {"fast": ("#009E73", "^"), "slow": ("#D55E00", "v")}
_COLOUR = "#0072B2"


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """One panel per collective: mean and median over runs with the 5 to 95 % band, and the median of each regime."""
    table = collective_bandwidth.by_nodes(frame)
    if table.empty:
        raise style.NothingToDraw("no run measured the bandwidth of its collectives")
    shown = [name for name in collective_bandwidth.COLLECTIVES if (table["collective"] == name).any()]
    figure = style.new_figure(3.4 * len(shown) + 0.6, 3.6)
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for ax, name in zip(axes, shown, strict=True):
        _panel(ax, table[(table["collective"] == name) & (table["scope"] == "world")])
        ax.set_title(collective_bandwidth.COLLECTIVES[name])
    axes[0].set_ylabel("Bus bandwidth over all ranks, GB/s")
    axes[0].set_ylim(bottom=0)
    style.bottom_legend(figure, _handles(table), f"{_counted(table)}, 1 GiB of fp32 before training")
    return figure


def _panel(ax: Axes, table: pd.DataFrame) -> None:
    whole = table[table["regime"] == "all"].sort_values("nodes")
    places = {nodes: place for place, nodes in enumerate(whole["nodes"])}
    x = list(places.values())
    ax.fill_between(x, whole["q05"], whole["q95"], color=_COLOUR, alpha=0.15, linewidth=0)
    ax.plot(x, whole["mean"], color=_COLOUR, marker="o", markersize=4.5)
    ax.plot(x, whole["median"], color="black", linestyle=":", marker="_", markersize=9)
    for regime, (colour, marker) in _REGIMES.items():
        part = table[table["regime"] == regime]
        where = [places[nodes] for nodes in part["nodes"]]
        ax.plot(where, part["median"], linestyle="", marker=marker, color=colour, markersize=6)
    ax.set_xticks(x, [f"{int(nodes)}" for nodes in places])
    ax.set(xlabel="Nodes", xlim=(-0.4, len(x) - 0.6))
    ax.grid(axis="y")


def _handles(table: pd.DataFrame) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=_COLOUR, marker="o", markersize=4.5, label="mean"),
        Line2D([], [], color="black", linestyle=":", marker="_", markersize=9, label="median"),
        Patch(facecolor=_COLOUR, alpha=0.15, label="5 to 95 % of the runs"),
    ]
    for regime, (colour, marker) in _REGIMES.items():
        if (table["regime"] == regime).any():
            label = f"median of the {regime} regime"
            handles.append(Line2D([], [], linestyle="", marker=marker, color=colour, markersize=6, label=label))
    return handles


def _counted(table: pd.DataFrame) -> str:
    """Number of runs behind the figure, in words."""
    world = table[(table["scope"] == "world") & (table["regime"] == "all") & (table["collective"] == "all_reduce")]
    return plural(int(world["runs"].sum()), "run")


FIGURE = FigureSpec(
    name="bandwidth",
    section="scaling",
    title="Collective bandwidth",
    caption=(
        "Bus bandwidth that runs measured before training. Fast and slow are two regimes of one network, separated by "
        "their all-reduce from 8 nodes on (at 120 GB/s)."
    ),
    draw=draw,
    data=collective_bandwidth.by_nodes,
)
