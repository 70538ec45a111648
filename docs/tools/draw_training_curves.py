"""``python -m docs.tools.draw_training_curves FILE --out FIGURE``: draws training curves and how far they are apart."""

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

from analysis.figures import style
from docs.tools.curves.curve_bands import (
    FIRST_STEPS,
    LAYOUT_BANDS,
    LEAST_ENTROPY,
    ONE_RANK,
    PRECISION_BANDS,
    WINDOW,
    Band,
    distances,
)
from docs.tools.curves.curve_table import by_run, read_curves
from results.errors import UltrasweepError
from results.text import command_line

Rows = Sequence[Mapping[str, Any]]
_WIDTH_IN, _PANEL_IN = 5.2, 2.3
_LABEL_SIZE = 7.5
_LEAST_GAP = 0.085
"""Between the middles of two labels, over the height of a panel."""
_COLOURS = (*style.SERIES_COLOURS, "#222222")
_DASHES: Sequence[Any] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
"""So that lines also differ without their colours."""


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 after a user's mistake."""
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
    """One column a model: loss, precisions against fp32, layouts against one rank, and the routers' load."""
    runs = by_run(rows)
    models = list(dict.fromkeys(str(own[0]["model"]) for own in runs.values()))
    if not models:
        raise style.NothingToDraw("the file has no rows")
    panels = [panel for panel in _PANELS if any(panel(None, _of_model(runs, model)) for model in models)]
    figure = style.new_figure(_WIDTH_IN * len(models), _PANEL_IN * len(panels) + 0.4)
    axes = figure.subplots(len(panels), len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        own = _of_model(runs, model)
        for line, panel in enumerate(panels):
            ax = axes[line, column]
            if not panel(ax, own):
                ax.axis("off")
                axes[line - 1, column].tick_params(labelbottom=True)
        lowest = max(line for line in range(len(panels)) if axes[line, column].axison)
        axes[lowest, column].set_xlabel("Step")
        axes[0, column].set_title(f"Model {model}: {axes[0, column].get_title(loc='left')}", loc="left")
    return figure


def _of_model(runs: Mapping[str, Rows], model: str) -> dict[str, Rows]:
    return {name: own for name, own in runs.items() if own[0]["model"] == model}


def _find(runs: Mapping[str, Rows], precision: str, layout: str = ONE_RANK) -> Rows | None:
    for own in runs.values():
        if (own[0]["precision"], own[0]["layout"]) == (precision, layout):
            return own
    return None


def _loss(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    if ax is None:
        return bool(runs)
    for own in runs.values():
        ax.plot(_column(own, "step"), _column(own, "loss"), color="#0072B2", linewidth=0.7, alpha=0.5)
    held_out = [own[-1]["held_out_loss"] for own in runs.values() if own[-1]["held_out_loss"] is not None]
    shortest = min(_column(own, "step")[-1] for own in runs.values())
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
        str(own[0]["precision"]): own
        for own in runs.values()
        if own[0]["layout"] == ONE_RANK and own[0]["precision"] != "fp32"
    }
    if reference is None or not others:
        return False
    if ax is not None:
        _differences(ax, others, reference, PRECISION_BANDS)
        ax.set_title("One rank, loss minus that of fp32")
    return True


def _layouts(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    precision = next((str(own[0]["precision"]) for own in runs.values() if own[0]["layout"] != ONE_RANK), "")
    reference = _find(runs, precision)
    others = {
        str(own[0]["layout"]): own
        for own in runs.values()
        if own[0]["precision"] == precision and own[0]["layout"] != ONE_RANK
    }
    if reference is None or not others:
        return False
    if ax is not None:
        _differences(ax, others, reference, dict.fromkeys(others, LAYOUT_BANDS[precision]))
        ax.set_title(f"Layouts in {precision}, loss minus that of one rank")
    return True


def _loads(ax: Axes | None, runs: Mapping[str, Rows]) -> bool:
    own = next((own for own in runs.values() if own[-1]["load_entropy"]), None)
    own = _find(runs, "bf16") or own
    if own is None or not own[-1]["load_entropy"]:
        return False
    if ax is not None:
        lines = np.array([row["load_entropy"] for row in own], dtype=np.float64)
        ends = []
        for layer in range(lines.shape[1]):
            colour = _COLOURS[layer % len(_COLOURS)]
            dashes = _DASHES[layer % len(_DASHES)]
            ax.plot(_column(own, "step"), lines[:, layer], color=colour, linestyle=dashes, linewidth=1.0)
            ends.append((float(lines[-1, layer]), f"routed layer {layer + 1}", colour))
        ax.axhspan(0, LEAST_ENTROPY, color="#eeeeee", zorder=0)
        ax.set_ylim(0, 1.02)
        ax.set_title(f"Entropy of the experts' load, {own[0]['precision']} (grey: a collapse)")
        ax.set_ylabel("Entropy over\nan even load's")
        _label_ends(ax, ends)
    return True


_PANELS: tuple[Callable[[Axes | None, Mapping[str, Rows]], bool], ...] = (_loss, _precisions, _layouts, _loads)
"""Each draws one panel and says whether there is anything to draw; without axes it only says."""


def _differences(ax: Axes, others: Mapping[str, Rows], reference: Rows, bands: Mapping[str, Band]) -> None:
    """Means of differences over `WINDOW` steps, each single step faintly behind them, and the widest band in grey."""
    ends: list[tuple[float, str, str]] = []
    expected = _column(reference, "loss")
    for place, (name, own) in enumerate(others.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        dashes = _DASHES[place % len(_DASHES)]
        count = min(len(own), len(expected))
        apart = _column(own, "loss")[:count] - expected[:count]
        steps = _column(own, "step")[:count]
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
    """Names right of the axes, at the ends of their lines or as near as they fit."""
    low, high = ax.get_ylim()
    ends = sorted(ends)
    places = [(value - low) / (high - low) for value, _, _ in ends]
    for _ in range(200):  # neighbours push each other apart
        for k in range(len(places) - 1):
            if (lack := _LEAST_GAP - (places[k + 1] - places[k])) > 1e-6:
                places[k] -= lack / 2
                places[k + 1] += lack / 2
    too_high = max(max(places) - 0.95, 0.0)  # above it the title begins
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
    """Markdown: of every run its last losses, and how far it is from the run that it is held to."""
    held = {found.run: found for found in distances(rows)}
    lines = [
        f"| run | end | held out | against | first {FIRST_STEPS} steps (allowed) | mean of {WINDOW} (allowed) "
        "| end, held out (allowed) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in by_run(rows).items():
        last = own[-WINDOW:]
        end = sum(row["loss"] for row in last) / len(last)
        held_out = own[-1]["held_out_loss"]
        cells = [name, f"{end:.4f}", "" if held_out is None else f"{held_out:.4f}"]
        if (found := held.get(name)) is not None:
            apart = "" if found.held_out is None else f", {found.held_out:.3f}"
            cells += [
                found.reference,
                f"{found.first:.5f} ({found.band.first:g})",
                "" if found.mean is None else f"{found.mean:.3f} ({found.band.mean:g})",
                f"{found.end:.3f}{apart} ({found.band.end:g})",
            ]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
