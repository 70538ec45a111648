"""Draws two heatmaps of one configuration per model and number of devices, side by side or stacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.rows import labels, metrics

_CELL_IN = (1.62, 0.92)
_CHARACTER_IN, _USUAL_NAME, _LONG_NAME = 0.085, 19, 26
"""Width of a character of a workload's name in inches; number of characters that fit without extra width; number of
characters above which a name takes two lines."""
_SIDE_BY_SIDE = 2
"""Largest number of columns for which the two heatmaps stand side by side; with more they are stacked."""
_SMALLEST = 5.8
"""Smallest font size in a cell, in points."""


def draw_pair(
    best: pd.DataFrame,
    counts: pd.DataFrame,
    places: tuple[list[str], list[int]],
    shown_pair: tuple[dict[str, Any], dict[str, Any]],
    noun: str,
) -> Figure:
    """Draw the configurations of ``best`` twice. ``places``: models and numbers of devices. Each of ``shown_pair`` has
    the columns with values and texts of the cells, the title, the name of its scale and the colours; ``noun``: what
    devices are called."""
    workloads, sizes = places
    longest = max(len(line) for name in workloads for line in _in_lines(name).splitlines())
    width = max(len(sizes) * _CELL_IN[0], 2.4) + 2.4 + _CHARACTER_IN * max(0, longest - _USUAL_NAME)
    height = max(len(workloads) * _CELL_IN[1], 1.6) + 1.0
    stacked = len(sizes) > _SIDE_BY_SIDE or 2 * width > style.MOST_WIDTH_IN
    rows, columns = (2, 1) if stacked else (1, 2)
    figure = style.new_figure(columns * width, rows * height)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, shown in zip(axes, shown_pair, strict=True):
        _heatmap(ax, best.assign(**shown["columns"]), counts, workloads, sizes, shown)
        ax.set_xlabel(f"Number of {noun}")
    return figure


def _in_lines(workload: str) -> str:
    """A long name in two lines, broken after the model."""
    return workload if len(workload) <= _LONG_NAME else workload.replace(", ", ",\n", 1)


def _heatmap(
    ax: Axes, best: pd.DataFrame, counts: pd.DataFrame, workloads: list[str], sizes: list[int], shown: dict[str, Any]
) -> None:
    norm, colours = _from_zero(best["_value"], shown), style.sequential(shown["colours"])
    by_outcome: dict[tuple[str, int], dict[str, int]] = counts.to_dict("index")  # type: ignore[assignment]
    cells = {(row["workload"], int(row["world_size"])): row for row in labels.records(best)}
    faces: list[Any] = []
    for y, workload in enumerate(workloads):
        for x, size in enumerate(sizes):
            row = cells.get((workload, size))
            if row is None:
                faces.append("#f4f4f4")
                _write_inside(
                    ax, x, y, _why_empty(by_outcome, workload, size), color="#666666", fontsize=8, style="italic"
                )
                continue
            unknown = np.isnan(row["_value"])
            face = (0.93, 0.93, 0.93, 1.0) if unknown else colours(norm(row["_value"]))
            faces.append(face)
            batching = row["batching"].replace(", ", " " if row["batch"] else "\n", 1) + row["batch"]
            if _size_inside(batching, 7.5) < _SMALLEST:
                batching = batching.replace(", ", "\n", 1)
            crowded = batching.count("\n") > 1
            tied = f"≈ {int(row['tied'])} more" if metrics.is_tie(row["tie"]) else ""
            ink = style.ink_on(face)
            for up, text, size_pt, look in (
                (-0.41, tied, 6.5, {}),
                (-0.22, row["_text"], 11.0, {"fontweight": "bold"}),
                (0.0 if crowded else 0.05, row["degrees"], 7.0 if crowded else 8.0, {}),
                (0.28, batching, 6.2 if crowded else 7.5, {"linespacing": 1.1}),
            ):
                if text:
                    fitting = max(_size_inside(text, size_pt), _SMALLEST)
                    _write_inside(ax, x, y + up, text, color=ink, fontsize=fitting, **look)
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    squares = [np.add(corners, (x, y)) for y in range(len(workloads)) for x in range(len(sizes))]
    # One artist for all cells: matplotlib takes longer for a hundred than the picture for its pixels.
    ax.add_collection(PolyCollection(squares, facecolors=faces, edgecolors="white", linewidths=1.5), autolim=False)
    ax.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(workloads) - 0.5, -0.5))
    ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    ax.set_yticks(range(len(workloads)), list(map(_in_lines, workloads)))
    ax.tick_params(length=0, left=False, bottom=False)
    ax.spines[:].set_visible(False)
    ax.set_title(shown["title"])
    if best["_value"].notna().any():
        bar = ax.figure.colorbar(ScalarMappable(norm, colours), ax=ax, pad=0.01, aspect=25, fraction=0.05)
        bar.set_label(shown["label"])
        bar.outline.set_visible(False)


def _size_inside(text: str, size: float) -> float:
    """Font size in points, at most ``size``, at which the longest line fits its cell; a character is about half as wide
    as high."""
    longest = max(map(len, text.splitlines()), default=0)
    return min(size, 72 * _CELL_IN[0] / (0.53 * longest)) if longest else size


def _from_zero(values: pd.Series, shown: dict[str, Any]) -> Normalize:
    """Colours from 0, so that a small difference looks small, up to the highest value or the device's memory."""
    highest = values.max()
    if pd.notna(shown.get("most")):
        highest = max(highest, shown["most"] / shown["unit"])
    return Normalize(0.0, highest if highest > 0 else 1.0)


def _why_empty(counts: dict[tuple[str, int], dict[str, int]], workload: str, size: int) -> str:
    row = counts.get((workload, size))
    if row is None:
        return "not run"
    tried = sum(row.values())
    return f"none of {tried} fits" if row.get("oom", 0) == tried else f"none of {tried}\nfinished"


def _write_inside(ax: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Write into a cell; the layout does not measure such a text, which takes time."""
    ax.text(x, y, text, ha="center", va="center", in_layout=False, **look)
