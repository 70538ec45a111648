"""The look of every figure: readable in print and in grey, safe for the colour-blind, without global state.

Figures are made without pyplot, so nothing is global and no display is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox
from numpy.typing import ArrayLike

from analysis.drawing import both, raster
from analysis.drawing.copied_ticks import FigureOfCopiedTicks
from results.tables.schema import UNKNOWN_OUTCOME

P = ParamSpec("P")

RC: dict[str, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    # matplotlib walks through all of these for every text.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    **{f"font.{kind}": ["DejaVu Sans"] for kind in ("serif", "cursive", "fantasy", "monospace")},
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # only the title is above the axes: searching for its position takes a tenth of the time
    "axes.labelsize": 9,
    "axes.edgecolor": "#444444",
    "axes.labelcolor": "#222222",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "text.color": "#222222",
    "text.hinting": "none",
    "text.parse_math": False,  # a name may hold a $
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "ultrasweep",
    "svg.fonttype": "none",
    "figure.max_open_warning": 0,
}
PNG_DPI = 130
MOST_WIDTH_IN = 10.8
"""Panels go below each other rather than make a figure wider: shown 1,200 pixels wide its 8-point text is 12 high."""

CATEGORY_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
"""Palette of Okabe and Ito (2008), ordered so that neighbours also differ in grey."""
SERIES_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#4B3F9E", "#777777")
"""Colours of lines: the palette with indigo instead of vermilion, which means out of memory."""
CATEGORY_HATCHES = ("", "////", "", "....", "\\\\\\\\", "", "xx")
STEP_PARTS = {
    "forward and backward": ("#0072B2", ""),
    "compute, bubble and optimizer": ("#0072B2", ""),
    "exposed reduction": ("#E69F00", "////"),
    "modelled communication": ("#E69F00", "////"),
    "pipeline bubble": ("#DDDDDD", "...."),
    "optimizer": ("#009E73", "\\\\\\\\"),
    "rest": ("#999999", "xx"),
}
"""Colour and hatch of the parts of a step (`analysis.rows.step_parts`)."""
STEP_KINDS = {
    "matmul": ("#0072B2", ""),
    "attention": ("#56B4E9", ""),
    "memory-bound kernels": ("#CC79A7", "...."),
    "optimizer": ("#009E73", "\\\\\\\\"),
    "exposed tp": ("#E69F00", "////"),
    "exposed cp": ("#E69F00", ""),
    "exposed dp_shard": ("#D55E00", "////"),
    "exposed dp_replicate": ("#D55E00", ""),
    "exposed world": ("#8C5A00", ""),
    "exposed tied": ("#8C5A00", "////"),
    "exposed communication": ("#8C5A00", "...."),
    "bubble": ("#DDDDDD", "...."),
    "launch gaps": ("#999999", "xx"),
}
"""Colour and hatch of the kinds of kernels of a step (`analysis.figures.breakdown_by_kind`)."""
OUTCOME_COLOURS = {
    "ok": "#0072B2",
    "oom": "#D55E00",
    "hang": "#CC79A7",
    "timeout": "#F0E442",
    "crash": "#000000",
    "nccl_error": "#009E73",
    "node_failure": "#56B4E9",
    "preempted": "#AAAAAA",
    "diverged": "#E69F00",
    "cancelled": "#DDDDDD",
    UNKNOWN_OUTCOME: "#777777",
}
LIMIT_COLOUR = "#B00000"
"""Colour of the line at the device's memory."""
OUTCOME_HATCHES = {
    "oom": "////",
    "timeout": "....",
    "hang": "\\\\\\\\",
    "nccl_error": "xx",
    "diverged": "++",
    UNKNOWN_OUTCOME: "--",
}
OUTCOME_MARKERS = {
    "oom": "x",
    "hang": "s",
    "timeout": "d",
    "crash": "+",
    "nccl_error": "1",
    "node_failure": "^",
    "preempted": "<",
    "diverged": "v",
    "cancelled": "|",
    UNKNOWN_OUTCOME: "_",
}
MOST_VECTOR_MARKS = 6000
"""Largest number of marks drawn as shapes in an SVG; more become pixels, as shapes would take tens of megabytes."""
FAILURE_GREY = "#8a8a8a"
LEGEND_ROWS = 5
"""Rows of a legend below the axes that fit a figure's height."""
LEGEND_ROW_INCHES = 0.19
OUTLINED = frozenset("sd^<v")
"""Markers drawn as outlines, so that no kind of failure looks heavier than another."""


class NothingToDraw(Exception):
    """Raised if the rows lack what a figure needs; the message says in a sentence what is missing."""


def in_style() -> AbstractContextManager[None]:
    """Context in which matplotlib's settings are `RC`; nesting it costs nothing."""
    if matplotlib.rcParams["svg.hashsalt"] == RC["svg.hashsalt"]:
        return nullcontext()
    return matplotlib.rc_context(RC)


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: draw and lay out in this style, regardless of the caller's settings."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with in_style():
            return draw(*args, **kwargs)

    return wrapped


def new_figure(width_in: float, height_in: float) -> Figure:
    figure = FigureOfCopiedTicks(figsize=(width_in, height_in), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    raster.new_canvas(figure)
    return figure


def add_lines_across(ax: Axes, axis: str, places: ArrayLike, **look: Any) -> None:
    """Add lines across the whole of ``ax`` below its marks, at ``places`` of ``axis`` (x or y), as one artist; ``look``
    has the properties of a `LineCollection`."""
    upright = axis == "x"
    lines = [[(place, 0), (place, 1)] if upright else [(0, place), (1, place)] for place in np.asarray(places, float)]
    transform = ax.get_xaxis_transform() if upright else ax.get_yaxis_transform()
    ax.add_collection(LineCollection(lines, transform=transform, zorder=0, **look), autolim=False)


def bottom_legend(figure: Figure, handles: list[Any], title: str | None = None) -> None:
    """Add a legend below the axes, in as many columns as the figure's width allows.

    A legend with many rows makes the figure taller, so that the axes keep their size.
    """
    longest = [len(handle.get_label()) for handle in handles]
    columns = next(
        (count for count in range(len(handles), 1, -1) if _columns_in(longest, count) <= figure.get_figwidth() - 0.4), 1
    )
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_INCHES * max(rows - LEGEND_ROWS, 0))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(-(-len(handles) // rows), 1),
        title=title,
        handletextpad=0.5,
    )


def _columns_in(longest: list[int], columns: int) -> float:
    """Approximate width in inches of a legend in this many columns, which are filled one after the other."""
    parts = np.array_split(longest, -(-len(longest) // -(-len(longest) // columns)))
    return sum(0.068 * int(part.max()) + 0.6 for part in parts)


def lay_out(figure: Figure) -> None:
    """Lay the figure out, once for all of its files.

    Saving with a layout engine would measure every text again for each file, to find the same layout. Axis labels,
    which matplotlib keeps clear of the tick labels, would do the same; they are fixed at their positions.
    """
    with in_style():
        figure.set_dpi(PNG_DPI)
        axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
        for axis in axes:
            if not axis.label.get_text():
                axis.set_label_coords(0, 0)
        engine = figure.get_layout_engine()
        if engine is not None:
            with _measured_once(figure):
                engine.execute(figure)
            figure.set_layout_engine(None)
        for ax in figure.axes:
            ax.apply_aspect()  # axes of a fixed shape are smaller than their place
        for axis in axes:
            if axis.label.get_text():
                axis.get_tightbbox()  # moves the label to its final position
                place = axis.label.get_transform().transform(axis.label.get_position())
                x, y = figure.transFigure.inverted().transform(place)
                axis.set_label_coords(x, y, figure.transFigure)


@contextmanager
def _measured_once(figure: Figure) -> Iterator[None]:
    """Context in which the decorations of each axes are measured only once during layout.

    The engine places axes twice, since tick labels may change with the axes. On a plain grid they hardly ever do: the
    positions in all figures of the study and of the recorded sweeps agree to 1.5 pixels.
    """
    axes = figure.axes
    fixed = [ax for ax in axes if ax.get_aspect() != "auto" or ax.get_box_aspect() is not None]
    if fixed or any(ax.get_subplotspec() is None for ax in axes):
        yield
        return
    for ax in axes:
        ax.get_tightbbox = functools.partial(_around, ax, ax.get_tightbbox, [])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for ax in axes:
            del ax.get_tightbbox


def _around(ax: Axes, measure: Callable[..., Bbox | None], known: list[Bbox | None], *args: Any, **named: Any) -> Any:
    """The box around ``ax`` with its decorations as first measured, moved to its current position."""
    here = np.array(ax.get_window_extent().extents)
    if not known:
        box = measure(*args, **named)
        known.append(None if box is None else Bbox.from_extents(*(np.array(box.extents) - here)))
        return box
    return None if known[0] is None else Bbox.from_extents(*(known[0].extents + here))


def pictures(figure: Figure, formats: Collection[str]) -> dict[str, bytes]:
    """Files of a laid out figure for all of ``formats`` (png, svg), drawn once; equal figures give equal bytes.

    PNG is on white, without an alpha channel. Texts of an SVG stay texts: they can be searched, read aloud and edited.
    """
    with in_style():
        pixels, vector = both.draw(figure)
    files = {}
    if "png" in formats:
        files["png"] = raster.png(pixels, PNG_DPI)
    if "svg" in formats:
        files["svg"] = vector
    return files


def save(figure: Figure, *paths: Path) -> None:
    """Write a file for each path, PNG or SVG by its suffix."""
    lay_out(figure)
    made = pictures(figure, [path.suffix[1:] for path in paths])
    for path in paths:
        path.write_bytes(made[path.suffix[1:]])


def sequential(name: str) -> Colormap:
    return matplotlib.colormaps[name]


def norm_of(values: Iterable[float]) -> Normalize:
    """Colour range over the known values; a range around the value if there is only one."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return Normalize(0.0, 1.0)
    low, high = min(known), max(known)
    return Normalize(low, high) if high > low else Normalize(0.9 * low, 1.1 * high or 1.0)


def ink_on(colour: tuple[float, float, float, float]) -> str:
    """Black or white, whichever reads better on ``colour`` (relative luminance, WCAG 2.1)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"
