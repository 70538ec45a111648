"""The pipeline bubble by its closed form over micro-batches and virtual stages, and what measured pipelines waited."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures import style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, pipeline_bubble
from analysis.rows.frame_cache import cache_per_frame

DEPTH = 8
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
VIRTUAL_STAGES = (1, 2, 4, 8)


_MARKERS = "osD^vP*X"


def sizes(depth: int = DEPTH) -> pd.DataFrame:
    """The closed form at one depth, smallest first: columns ``p``, ``m``, ``v``, ``bubble``."""
    rows = [
        {"p": depth, "m": m, "v": v, "bubble": pipeline_bubble.closed_form(depth, m, v)}
        for m, v in itertools.product(MICRO_BATCHES, VIRTUAL_STAGES)
    ]
    return pd.DataFrame(rows).sort_values(["bubble", "v", "m"], ascending=[True, False, True], ignore_index=True)


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """`sizes` and `pipeline_bubble.waited` in one table, told apart by ``source``: ``closed form`` or ``measured``."""
    parts = [sizes().assign(source="closed form")]
    measured = pipeline_bubble.waited(frame)
    if len(measured):
        parts.append(measured.assign(source="measured"))
    return pd.concat(parts, ignore_index=True)


def _order(frame: pd.DataFrame) -> list[str]:
    """Workloads that have a timed pipeline, smallest first."""
    have = set(pipeline_bubble.waited(frame)["workload"])
    return [name for name in labels.workload_order(frame) if name in have]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: the closed form at p = 8, smallest first. Right, where waiting was timed: idle over busy, measured."""
    formula, waited = sizes(), pipeline_bubble.waited(frame)
    panels = 2 if len(waited) else 1
    figure = style.new_figure(5.4 * panels + 0.6, 5.0)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _bars(axes[0], formula)
    if panels == 2:
        _waited(axes[1], waited, _order(frame))
        style.bottom_legend(figure, axes[1].get_legend_handles_labels()[0])
    return figure


def _bars(ax: Axes, sizes: pd.DataFrame) -> None:
    places = np.arange(len(sizes))
    colours = {v: style.CATEGORY_COLOURS[i] for i, v in enumerate(VIRTUAL_STAGES)}
    hatches = {v: style.CATEGORY_HATCHES[i] for i, v in enumerate(VIRTUAL_STAGES)}
    for v in VIRTUAL_STAGES:
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
    ax.set_title(f"Bubble of a pipeline of {DEPTH} stages")
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
    ax.plot([0, highest], [0, highest], color="#444444", linewidth=1, label="measured = equal ranks")
    ax.set(
        xlim=(0, highest),
        ylim=(0, highest),
        xlabel="Idle over busy of equal ranks; 1F1B: (p − 1) / m",
        ylabel="Measured, idle over busy",
    )
    ax.set_title(f"Waiting of measured pipelines, n = {len(waited):,}")
    ax.grid()


FIGURE = FigureSpec(
    name="bubble",
    section="scaling",
    title="Pipeline bubble",
    caption=(
        "Idle over busy time by the closed form for m micro-batches and v virtual stages; where waiting was timed, "
        "what pipelines really waited against what their schedule does with equal ranks."
    ),
    draw=draw,
    data=data,
)
