"""``python -m docs.tools.draw_training_curves FILE --out FIGURE``: draws training curves and their differences."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing import style
from docs.tools.curves.curve_bands import (
    FIRST_STEPS,
    LAYOUT_BANDS,
    LEAST_ENTROPY,
    ONE_RANK,
    PRECISION_BANDS,
    WINDOW,
    CurveBand,
    distances,
)
from docs.tools.curves.curve_table import by_run, read_curves
from results.errors import UltrasweepError
from results.text import command_line

Rows = Sequence[Mapping[str, Any]]
_WIDTH_IN, _PANEL_IN = 5.2, 2.3
_LABEL_SIZE = 7.5
_LEAST_GAP = 0.085
"""Least distance between the middles of two labels, as a share of the panel's height."""
_COLOURS = (*style.SERIES_COLOURS, "#222222")
_DASHES: Sequence[Any] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
"""Line styles, so that lines also differ without colours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 after a user's mistake."""
    parser = command_line.Parser(
        prog="python -m docs.tools.draw_training_curves",
        description="Draws the training curves of a file of python -m docs.tools.curves, and prints how far they are "
        "apart as a Markdown table.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=command_line.path, metavar="FILE", help="Parquet file of training curves")
    parser.add_argument("--out", type=_picture, metavar="FIGURE", help="PNG or SVG file to write")
    try:
        options = parser.parse_args(argv)
        rows = read_curves(options.file)
        if options.out is not None:
            style.save(draw(rows), options.out)
        print(table(rows))
        return 0
    except (UltrasweepError, style.NothingToDraw) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _picture(text: str) -> Path:
    path = command_line.path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png or .svg")
    return path


@style.styled
def draw(rows: Rows) -> Figure:
    """Draws one column per model: loss, precisions against fp32, layouts against one rank, and the routers' load."""
    runs = by_run(rows)
    models = list(dict.fromkeys(str(rows_of_run[0]["model"]) for rows_of_run in runs.values()))
    if not models:
        raise style.NothingToDraw("the file has no rows")
    panels = [panel for panel in _PANELS if any(panel(None, _of_model(runs, model)) for model in models)]
    figure = style.new_figure(_WIDTH_IN * len(models), _PANEL_IN * len(panels) + 0.4)
    axes = figure.subplots(len(panels), len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        rows_of_run = _of_model(runs, model)
        for line, panel in enumerate(panels):
            ax = axes[line, column]
            if not panel(ax, rows_of_run):
                ax.axis("off")
                axes[line - 1, column].tick_params(labelbottom=True)
        lowest = max(line for line in range(len(panels)) if axes[line, column].axison)
        axes[lowest, column].set_xlabel("Step")
        axes[0, column].set_title(f"Model {model}: {axes[0, column].get_title(loc='left')}", loc="left")
    return figure


def _of_model(runs: Mapping[str, Rows], model: str) -> dict[str, Rows]:
    return {name: rows_of_run for name, rows_of_run in runs.items() if rows_of_run[0]["model"] == model}


def _find(runs: Mapping[str, Rows], precision: str, layout: str = ONE_RANK) -> Rows | None:
    for rows_of_run in runs.values():
        if (rows_of_run[0]["precision"], rows_of_run[0]["layout"]) == (precision, layout):
            return rows_of_run
    return None


def _loss(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    if ax is None:
        return bool(runs)
    for rows_of_run in runs.values():
        ax.plot(_column(rows_of_run, "step"), _column(rows_of_run, "loss"), color="#0072B2", linewidth=0.7, alpha=0.5)
    held_out = [
        rows_of_run[-1]["held_out_loss"]
        for rows_of_run in runs.values()
        if rows_of_run[-1]["held_out_loss"] is not None
    ]
    shortest = min(_column(rows_of_run, "step")[-1] for rows_of_run in runs.values())
    if held_out:
        ax.plot([shortest] * len(held_out), held_out, "o", color="#D55E00", markersize=3, clip_on=False, zorder=4)
        _label_ends(ax, [(sum(held_out) / len(held_out), "held out", "#D55E00")])
    ax.set_title(f"{len(runs)} runs on one another")
    ax.set_ylabel("Loss,\nnats a token")
    ax.set_xlim(0, shortest)
    ax.grid(axis="y")
    return True


def _precisions(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    reference = _find(runs, "fp32")
    others = {
        str(rows_of_run[0]["precision"]): rows_of_run
        for rows_of_run in runs.values()
        if rows_of_run[0]["layout"] == ONE_RANK and rows_of_run[0]["precision"] != "fp32"
    }
    if reference is None or not others:
        return False
    if ax is not None:
        _differences(ax, others, reference, PRECISION_BANDS)
        ax.set_title("One rank, loss minus that of fp32")
    return True


def _layouts(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    precision = next(
        (str(rows_of_run[0]["precision"]) for rows_of_run in runs.values() if rows_of_run[0]["layout"] != ONE_RANK), ""
    )
    reference = _find(runs, precision)
    others = {
        str(rows_of_run[0]["layout"]): rows_of_run
        for rows_of_run in runs.values()
        if rows_of_run[0]["precision"] == precision and rows_of_run[0]["layout"] != ONE_RANK
    }
    if reference is None or not others:
        return False
    if ax is not None:
        _differences(ax, others, reference, dict.fromkeys(others, LAYOUT_BANDS[precision]))
        ax.set_title(f"Layouts in {precision}, loss minus that of one rank")
    return True


def _loads(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    rows_of_run = next((rows_of_run for rows_of_run in runs.values() if rows_of_run[-1]["load_entropy"]), None)
    rows_of_run = _find(runs, "bf16") or rows_of_run
    if rows_of_run is None or not rows_of_run[-1]["load_entropy"]:
        return False
    if ax is not None:
        lines = np.array([row["load_entropy"] for row in rows_of_run], dtype=np.float64)
        ends = []
        for layer in range(lines.shape[1]):
            colour = _COLOURS[layer % len(_COLOURS)]
            dashes = _DASHES[layer % len(_DASHES)]
            ax.plot(_column(rows_of_run, "step"), lines[:, layer], color=colour, linestyle=dashes, linewidth=1.0)
            ends.append((float(lines[-1, layer]), f"routed layer {layer + 1}", colour))
        ax.axhspan(0, LEAST_ENTROPY, color="#eeeeee", zorder=0)
        ax.set_ylim(0, 1.02)
        ax.set_title(f"Entropy of the experts' load, {rows_of_run[0]['precision']} (grey: a collapse)")
        ax.set_ylabel("Entropy over\nan even load's")
        _label_ends(ax, ends)
    return True


_PANELS: tuple[Callable[[Axes | None, Mapping[str, Rows]], bool], ...] = (_loss, _precisions, _layouts, _loads)
"""Functions that draw one panel each. They return whether there is anything to draw; without axes they draw nothing."""


def _differences(ax: Axes, others: Mapping[str, Rows], reference: Rows, bands: Mapping[str, CurveBand]) -> None:
    """Draws means of differences over `WINDOW` steps, each single step faintly behind them, and the widest band in
    grey."""
    ends: list[tuple[float, str, str]] = []
    expected = _column(reference, "loss")
    for place, (name, rows_of_run) in enumerate(others.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        dashes = _DASHES[place % len(_DASHES)]
        count = min(len(rows_of_run), len(expected))
        apart = _column(rows_of_run, "loss")[:count] - expected[:count]
        steps = _column(rows_of_run, "step")[:count]
        ax.plot(steps, apart, color=colour, linewidth=0.4, alpha=0.25, zorder=1)
        width = min(WINDOW, count)
        means = np.convolve(apart, np.ones(width) / width, mode="valid")
        ax.plot(steps[width - 1 :], means, color=colour, linewidth=1.2, linestyle=dashes, zorder=3)
        ends.append((float(means[-1]), name, colour))
    limit = max((bands[name].mean for name in others if name in bands), default=0.0)
    if limit:
        ax.axhspan(-limit, limit, color="#eeeeee", zorder=0)
        ax.set_ylim(-1.4 * limit, 1.4 * limit)
    ax.axhline(0, color="#444444", linewidth=0.6, zorder=2)
    ax.set_ylabel("Difference,\nnats a token")
    _label_ends(ax, ends)


def _label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Puts names right of the axes, at the ends of their lines or as near as they fit."""
    low, high = ax.get_ylim()
    ends = sorted(ends)
    places = [(value - low) / (high - low) for value, _, _ in ends]
    for _ in range(200):  # neighbours push each other apart
        for k in range(len(places) - 1):
            if (lack := _LEAST_GAP - (places[k + 1] - places[k])) > 1e-6:
                places[k] -= lack / 2
                places[k + 1] += lack / 2
    too_high = max(max(places) - 0.95, 0.0)  # the title is above it
    for place, (value, name, colour) in zip(places, ends, strict=True):
        ax.annotate(
            name,
            xy=(1.0, min(max((value - low) / (high - low), 0.0), 1.0)),
            xytext=(1.05, place - too_high),
            xycoords="axes fraction",
            color=colour,
            fontsize=_LABEL_SIZE,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            annotation_clip=False,
        )


def _column(rows: Rows, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([math.nan if row[name] is None else row[name] for row in rows], dtype=np.float64)


def table(rows: Rows) -> str:
    """Markdown table with the last losses of every run, and its distance from its reference run."""
    held = {distance.run: distance for distance in distances(rows)}
    lines = [
        f"| run | end | held out | against | first {FIRST_STEPS} steps (allowed) | mean of {WINDOW} (allowed) "
        "| end, held out (allowed) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows_of_run in by_run(rows).items():
        last = rows_of_run[-WINDOW:]
        end = sum(row["loss"] for row in last) / len(last)
        held_out = rows_of_run[-1]["held_out_loss"]
        cells = [name, f"{end:.4f}", "" if held_out is None else f"{held_out:.4f}"]
        if (distance := held.get(name)) is not None:
            apart = "" if distance.held_out is None else f", {distance.held_out:.3f}"
            cells += [
                distance.reference,
                f"{distance.first:.5f} ({distance.band.first:g})",
                "" if distance.mean is None else f"{distance.mean:.3f} ({distance.band.mean:g})",
                f"{distance.end:.3f}{apart} ({distance.band.end:g})",
            ]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
