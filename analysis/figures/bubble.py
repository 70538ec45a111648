"""Bubble sizes over micro-batches and virtual stages, and beside them what measured pipelines waited."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.data import bubble
from analysis.figures import style

_MARKERS = "osD^vP*X"


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: the closed form at p = 8, smallest first. Right, where waiting was timed: idle over busy against it."""
    sizes, waited = bubble.sizes(), bubble.waited(frame)
    panels = 2 if len(waited) else 1
    figure = style.new_figure(5.4 * panels + 0.6, 5.0)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _bars(axes[0], sizes)
    if panels == 2:
        _waited(axes[1], waited, bubble.order(frame))
        style.bottom_legend(figure, axes[1].get_legend_handles_labels()[0])
    return figure


def _bars(ax: Axes, sizes: pd.DataFrame) -> None:
    places = np.arange(len(sizes))
    colours = {v: style.CATEGORY_COLOURS[i] for i, v in enumerate(bubble.VIRTUAL_STAGES)}
    hatches = {v: style.CATEGORY_HATCHES[i] for i, v in enumerate(bubble.VIRTUAL_STAGES)}
    for v in bubble.VIRTUAL_STAGES:
        own = (sizes["v"] == v).to_numpy()
        ax.barh(
            places[own],
            sizes.loc[own, "bubble"],
            color=colours[v],
            hatch=hatches[v],
            edgecolor="white",
            linewidth=0.5,
            height=0.78,
            label=f"v = {v}",
        )
    for place, value in enumerate(sizes["bubble"]):
        ax.text(1.06 * value, place, f"{value:.3g}", va="center", fontsize=7.5)
    ax.set_yticks(places, [f"m = {m}, v = {v}" for m, v in zip(sizes["m"], sizes["v"], strict=True)], fontsize=8)
    ax.set(xscale="log", xlim=(0.02, 14), ylim=(-0.7, len(sizes) - 0.3))
    ax.set_xticks([0.03, 0.1, 0.3, 1, 3, 10], ["0.03", "0.1", "0.3", "1", "3", "10"])
    ax.set_xlabel("Idle over busy time, (p − 1) / (v m)")
    ax.set_title(f"Bubble of a pipeline of {bubble.DEPTH} stages")
    ax.grid(axis="x")


def _waited(ax: Axes, waited: pd.DataFrame, order: list[str]) -> None:
    for i, workload in enumerate(order):
        rows = waited[waited["workload"] == workload]
        ax.plot(
            rows["bubble"],
            rows["measured"],
            linestyle="",
            marker=_MARKERS[i % len(_MARKERS)],
            color=style.CATEGORY_COLOURS[i % len(style.CATEGORY_COLOURS)],
            markersize=5,
            alpha=0.8,
            markeredgewidth=0,
            label=workload,
        )
    highest = 1.1 * float(max(waited["bubble"].max(), waited["measured"].max()))
    ax.plot([0, highest], [0, highest], color="#444444", linewidth=1, label="measured = closed form")
    ax.set(
        xlim=(0, highest), ylim=(0, highest), xlabel="Closed form, (p − 1) / (v m)", ylabel="Measured, idle over busy"
    )
    ax.set_title(f"Waiting of measured pipelines, n = {len(waited):,}")
    ax.grid()
