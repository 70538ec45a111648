"""The pipeline bubble by its closed form over micro-batches and virtual stages, with the measured waiting of
pipelines."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from analysis.drawing import style
from analysis.figures.spec import FigureSpec
from analysis.rows import pipeline_bubble
from analysis.rows.frame_cache import cache_per_frame

DEPTH = 8
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
VIRTUAL_STAGES = (1, 2, 4, 8)


DEPTHS = (2, 4, 8, 16)
"""Depths of the closed form's lines if the rows have no pipeline."""
_MOST_DEPTHS = 6
_APART = 5.5
"""Smallest distance between the names of two lines, in per cent."""
_MARKERS = "osD^vP"
_PLAIN = ("1f1b", "gpipe")
"""Schedules for which the closed form with v = 1 holds."""


def sizes(depth: int = DEPTH) -> pd.DataFrame:
    """The closed form at one depth, smallest first: columns ``p``, ``m``, ``v``, ``bubble``."""
    rows = [
        {"p": depth, "m": m, "v": v, "bubble": pipeline_bubble.closed_form(depth, m, v)}
        for m, v in itertools.product(MICRO_BATCHES, VIRTUAL_STAGES)
    ]
    return pd.DataFrame(rows).sort_values(["bubble", "v", "m"], ascending=[True, False, True], ignore_index=True)


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """`sizes` and `pipeline_bubble.waited` in one table; ``source`` is ``closed form`` or ``measured``.

    ``percent_of_step`` is drawn: idle time over the whole step, 100 b / (1 + b) for an idle over busy time b.
    """
    formula = sizes()
    parts = [formula.assign(source="closed form", percent_of_step=percent_of_step(formula["bubble"]))]
    measured = pipeline_bubble.waited(frame)
    if len(measured):
        parts.append(measured.assign(source="measured", percent_of_step=percent_of_step(measured["measured"])))
    return pd.concat(parts, ignore_index=True)


def percent_of_step(bubble: pd.Series) -> pd.Series:
    """Idle time in per cent of the step, from idle over busy time."""
    return 100 * bubble / (1 + bubble)


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: the closed form over micro-batches, one line per depth, with a mark for every run whose waiting was timed.
    Right: the closed form of one depth, one line per number of virtual stages."""
    waited = pipeline_bubble.waited(frame)
    waited = waited.assign(percent=percent_of_step(waited["measured"]))
    most = max([MICRO_BATCHES[-1], *waited["m"].astype(int)])
    figure = style.new_figure(10.6, 4.1)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    depths = _depths(frame, waited)
    for i, p in enumerate(depths):
        colour = style.CATEGORY_COLOURS[i % len(style.CATEGORY_COLOURS)]
        _line(left, p, 1, most, colour)
        of_depth = waited[waited["p"] == p]
        for plain in (True, False):
            runs = of_depth[of_depth["schedule"].isin(_PLAIN) == plain]
            if len(runs):
                left.plot(
                    runs["m"],
                    runs["percent"],
                    linestyle="",
                    marker=_MARKERS[i % len(_MARKERS)],
                    markersize=5,
                    color=colour,
                    markerfacecolor=colour if plain else "white",
                    alpha=0.85,
                )
    for i, v in enumerate(VIRTUAL_STAGES):
        _line(right, DEPTH, v, MICRO_BATCHES[-1], style.CATEGORY_COLOURS[i])
    _name_lines(left, {f"p = {p}": float(p - 1) for p in depths})
    _name_lines(right, {f"v = {v}": (DEPTH - 1) / v for v in VIRTUAL_STAGES})
    left.set_title(f"1F1B and waiting of measured pipelines, n = {len(waited):,}" if len(waited) else "1F1B or GPipe")
    right.set_title(f"Interleaved, {DEPTH} stages, v on each rank")
    left.set_ylabel("Idle, % of the step")
    for ax in (left, right):
        ax.set_xlabel("Micro-batches m of a step")
    if len(waited):
        style.bottom_legend(figure, _handles(waited))
    return figure


def _depths(frame: pd.DataFrame, waited: pd.DataFrame) -> list[int]:
    """Depths with a line: those with timed waiting, most runs first, otherwise those of finished pipelines."""
    counts = waited["p"].value_counts()
    if not len(counts):
        pipelines = frame.loc[(frame["outcome"] == "ok") & (frame["pp"] > 1), "pp"]
        counts = pipelines.value_counts()
    return sorted(int(p) for p in counts.index[:_MOST_DEPTHS]) or list(DEPTHS)


def _name_lines(ax: Axes, bubbles: dict[str, float]) -> None:
    """Write names at the left ends of the lines, given their idle over busy times, pushed apart so that none touch."""
    lowest = -_APART
    order = sorted(enumerate(bubbles.items()), key=lambda one: one[1][1])
    for i, (name, bubble) in order:
        lowest = max(lowest + _APART, 100 * bubble / (1 + bubble))
        colour = style.CATEGORY_COLOURS[i % len(style.CATEGORY_COLOURS)]
        ax.annotate(name, (1, lowest), (-4, 0), textcoords="offset points", ha="right", va="center", color=colour)


def _line(ax: Axes, p: int, v: int, most: int, colour: str) -> None:
    """Draw the closed form over micro-batches as a curve."""
    m = np.geomspace(1, most, 60)
    bubble = (p - 1) / (v * m)
    percent = 100 * bubble / (1 + bubble)
    ax.plot(m, percent, color=colour, linewidth=1.5)
    ax.set_xscale("log", base=2)
    ticks = [2**k for k in range(int(np.log2(most)) + 1)]
    ax.set_xticks(ticks, [f"{tick}" for tick in ticks])
    ax.set(xlim=(0.5, 1.12 * most), ylim=(0, 100))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="y")


def _handles(waited: pd.DataFrame) -> list[Line2D]:
    handles = [Line2D([], [], color="#444444", label="equal ranks by the closed form, (p − 1) / (m v + p − 1)")]
    plain = waited["schedule"].isin(_PLAIN)
    mark: dict[str, Any] = {"linestyle": "", "marker": "o", "color": "#444444", "markersize": 5}
    if plain.any():
        handles.append(Line2D([], [], **mark, label="measured: 1F1B or GPipe"))
    if not plain.all():
        handles.append(Line2D([], [], **mark, markerfacecolor="white", label="measured: other schedules"))
    return handles


def conclude(frame: pd.DataFrame) -> str | None:
    """Sentence that compares the measured waiting of pipelines with that of equal ranks."""
    waited = pipeline_bubble.waited(frame)
    if waited.empty:
        return None
    measured, equal = percent_of_step(waited["measured"]).median(), percent_of_step(waited["bubble"]).median()
    return (
        f"Pipelines waited {measured:.0f} % of a step, where equal ranks would wait {equal:.0f} % "
        f"(medians, n = {len(waited):,})."
    )


FIGURE = FigureSpec(
    name="bubble",
    section="scaling",
    title="Pipeline bubble",
    caption=(
        "Idle share of a step by the closed form of equal ranks over m micro-batches, for pipelines of p stages and "
        "for v virtual stages on each rank; marks are the measured waiting, which includes waiting for stages of "
        "unequal length."
    ),
    draw=draw,
    data=data,
    conclude=conclude,
)
