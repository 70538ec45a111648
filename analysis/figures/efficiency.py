"""Scaling efficiency of each model, and what its loss went to."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.data import efficiency
from analysis.figures import style
from analysis.rows import labels

_MOST_COLUMNS = 4
_SEEN = 1e-4
"""A part that takes less than this share of the time nowhere is not in the legend."""
_LINES = {
    ("pure data parallelism", "strong"): ("#D55E00", "s", "-", 7.0),
    ("pure data parallelism", "weak"): ("#D55E00", "s", ":", 7.0),
    ("best layout", "strong"): ("#0072B2", "o", "-", 4.5),
    ("best layout", "weak"): ("#0072B2", "o", ":", 4.5),
}
"""Pure data parallelism is often the best layout: its larger marks lie below."""
_BY_PREFERENCE = [(layouts, kind) for layouts in efficiency.LAYOUTS for kind in efficiency.KINDS]
_PARTS = {**style.STEP_PARTS, efficiency.UNATTRIBUTED: ("white", "--")}


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Above: efficiency against the smallest size. Below, where a run has its parts timed: the loss by part."""
    rows = efficiency.table(frame)
    if rows.empty:
        raise style.NothingToDraw("no model has finished runs of comparable batches on two numbers of devices")
    most = rows.groupby("workload", sort=False)["world_size"].nunique().sort_values(ascending=False, kind="stable")
    kept = set(most.index[:_MOST_COLUMNS])
    workloads = [str(name) for name in rows["workload"].unique() if name in kept]
    timed = [name for name in _PARTS if f"lost to {name}" in rows]
    attributed = len(timed) > 1 and bool((rows["lost"].ne(0) & rows[f"lost to {timed[0]}"].notna()).any())
    lines = 2 if attributed else 1
    figure = style.new_figure(max(2.9 * len(workloads), 6.4), 2.9 * lines + 1.0)
    axes = figure.subplots(lines, len(workloads), squeeze=False)
    noun = labels.device_noun(frame)
    for place, workload in enumerate(workloads):
        own = rows[rows["workload"] == workload]
        _efficiency(axes[0][place], own)
        axes[0][place].set_title(workload)
        if attributed:
            _losses(axes[1][place], own, timed)
        axes[-1][place].set_xlabel(f"Number of {noun}")
    axes[0][0].set_ylabel("Efficiency, % of the smallest")
    if attributed:
        axes[1][0].set_ylabel("Loss, % of the time a token")
    style.bottom_legend(figure, _handles(rows, timed if attributed else []), _note(rows, attributed, len(most)))
    return figure


def _efficiency(ax: Axes, rows: pd.DataFrame) -> None:
    sizes = labels.world_sizes(rows)
    for (layouts, kind), (colour, marker, dashes, size) in _LINES.items():
        line = rows[(rows["layouts"] == layouts) & (rows["kind"] == kind)].sort_values("world_size")
        places = [sizes.index(size) for size in line["world_size"]]
        values = (100 * line["efficiency"]).tolist()
        ax.plot(places, values, color=colour, linestyle=dashes, linewidth=1.4)
        for slow in (False, True):
            at = [place for place, regime in enumerate(line["network_regime"]) if (regime == "slow") == slow]
            face = "white" if slow else colour
            ax.plot(
                [places[i] for i in at],
                [values[i] for i in at],
                linestyle="",
                marker=marker,
                markersize=size,
                color=colour,
                markerfacecolor=face,
            )
    ax.axhline(100, color="#444444", linewidth=0.8)
    _sizes(ax, sizes)
    ax.set_ylim(0, 1.1 * max(100.0, 100 * float(rows["efficiency"].max())))
    ax.grid(axis="y")


def _losses(ax: Axes, rows: pd.DataFrame, parts: list[str]) -> None:
    """Diverging stacks of the series with the most sizes: what costs more than on the fewest devices, and what less."""
    series = [rows[(rows["layouts"] == layouts) & (rows["kind"] == kind)] for layouts, kind in _BY_PREFERENCE]
    line = max(series, key=len).sort_values("world_size")
    sizes = labels.world_sizes(rows)
    places = [sizes.index(size) for size in line["world_size"]]
    above, below = pd.Series(0.0, index=line.index), pd.Series(0.0, index=line.index)
    for name in parts:
        share = (100 * line[f"lost to {name}"]).fillna(0.0)
        base = above.where(share > 0, below)
        colour, hatch = _PARTS[name]
        edge = "#888888" if colour == "white" else "white"
        ax.bar(places, share, bottom=base, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.5, width=0.6)
        above, below = above + share.clip(lower=0), below + share.clip(upper=0)
    ax.plot(places, 100 * line["lost"], linestyle="", marker="D", markersize=5, color="black", markerfacecolor="white")
    ax.axhline(0, color="#444444", linewidth=0.8)
    ax.set_title(f"{line['layouts'].iloc[0]}, {line['kind'].iloc[0]}", fontsize=8.5, weight="normal")
    _sizes(ax, sizes)
    low, high = float(below.min()), float(above.max())
    ax.set_ylim(min(1.15 * low, -0.1 * high, -1.0), max(1.15 * high, -0.1 * low, 1.0))
    ax.grid(axis="y")


def _sizes(ax: Axes, sizes: list[int]) -> None:
    ax.set_xticks(range(len(sizes)), [f"{size}" for size in sizes])
    ax.set_xlim(-0.5, len(sizes) - 0.5)


def _note(rows: pd.DataFrame, attributed: bool, workloads: int) -> str | None:
    parts = []
    if not attributed:
        parts.append("the loss is not attributed: no run has the parts of its step timed")
    if workloads > _MOST_COLUMNS:
        parts.append(f"{_MOST_COLUMNS} of {workloads} models, those with most sizes")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] if text else None


def _handles(rows: pd.DataFrame, parts: list[str]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    for (layouts, kind), (colour, marker, dashes, size) in _LINES.items():
        if ((rows["layouts"] == layouts) & (rows["kind"] == kind)).any():
            label = f"{layouts}, {kind} scaling"
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle=dashes, markersize=size, label=label))
    if (rows["network_regime"] == "slow").any():
        label = "hollow: slow regime of the network"
        handles.append(
            Line2D(
                [], [], linestyle="", marker="o", color="#444444", markerfacecolor="white", markersize=5, label=label
            )
        )
    for name in parts:
        colour, hatch = _PARTS[name]
        if rows[f"lost to {name}"].abs().max() > _SEEN:
            edge = "#888888" if colour == "white" else "white"
            handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=edge, label=name))
    if parts:
        handles.append(
            Line2D([], [], linestyle="", marker="D", color="black", markerfacecolor="white", markersize=5, label="loss")
        )
    return handles
