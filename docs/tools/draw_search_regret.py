"""``python -m docs.tools.draw_search_regret FILE --out FIGURE``: draws how fast strategies find the best layout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing import style
from results.errors import UltrasweepError
from results.tables.files import read_parquet
from results.text import command_line

COLUMNS = ("fitted_on", "strategy", "draw", "cell", "run", "regret")
WITHIN = 0.01
_SHARE = 0.75
"""Quantile of the cells' regret shown in the upper panel."""
_MOST_RUNS = 32
_SIZE_IN = (6.4, 6.2)
_UNFITTED = "–"
_DASHES = {"nothing": (0, (4, 1.5)), _UNFITTED: (0, (1.5, 1.2))}
_PERCENT = 100.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 after a user's mistake."""
    parser = command_line.Parser(
        prog="python -m docs.tools.draw_search_regret",
        description="Draws the runs that python -m sweep search --replay TABLE --out FILE has written: how far the "
        "best layout found is from the best there is, after every run.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=command_line.path, metavar="FILE", help="Parquet file of a replay")
    parser.add_argument("--out", type=_picture, metavar="FIGURE", required=True, help="PNG or SVG file to write")
    try:
        options = parser.parse_args(argv)
        frame = read_parquet(options.file).to_pandas()
        if missing := [name for name in COLUMNS if name not in frame]:
            raise UltrasweepError(f"{options.file} is no replay: it has no column {missing[0]}")
        style.save(draw(frame), options.out)
        return 0
    except (UltrasweepError, style.NothingToDraw) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _picture(text: str) -> Path:
    path = command_line.path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png or .svg")
    return path


def regrets(frame: pd.DataFrame, runs: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Regret of every cell after each of the first ``runs`` runs, shape (cells, runs); infinite before the first
    success.

    The last regret of a cell fills the remaining runs.
    """
    regrets_of_cells = []
    for _, cell in frame.sort_values("run").groupby(["draw", "cell"], sort=True):
        values = cell["regret"].fillna(np.inf).to_numpy(float)[:runs]
        regrets_of_cells.append(np.concatenate([values, np.full(runs - len(values), values[-1])]))
    return np.array(regrets_of_cells)


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Draws two panels over runs per cell: the regret that three quarters of the cells are below, and the share within
    1 %."""
    if frame.empty:
        raise style.NothingToDraw("the file has no rows")
    figure = style.new_figure(*_SIZE_IN)
    above, below = figure.subplots(2, 1, sharex=True)
    runs = np.arange(1, _MOST_RUNS + 1)
    names = list(dict.fromkeys(frame["strategy"]))
    for (fitted_on, strategy), strategy_rows in frame.groupby(["fitted_on", "strategy"], sort=False):
        values = regrets(strategy_rows, _MOST_RUNS)
        colour = style.SERIES_COLOURS[names.index(strategy) % len(style.SERIES_COLOURS)]
        look = {"color": colour, "linestyle": _DASHES.get(str(fitted_on), "-"), "linewidth": 1.4}
        quantile = np.quantile(values, _SHARE, axis=0, method="higher")
        label = str(strategy) if fitted_on == _UNFITTED else f"{strategy}; fitted on {fitted_on}"
        above.plot(runs, np.where(np.isfinite(quantile), quantile, np.nan) * _PERCENT, **look)
        below.plot(runs, (values <= WITHIN).mean(axis=0) * _PERCENT, label=label, **look)
    _finish(above, below)
    return figure


def _finish(above: Axes, below: Axes) -> None:
    above.set_yscale("symlog", linthresh=1.0)
    above.set_ylim(0, None)
    above.set_ylabel("Regret of three\nquarters of the cells, %")
    above.set_title("How far the best layout found is from the best there is")
    below.set_ylabel("Cells within 1 %, %")
    below.set_xlabel("Runs of a cell, failures counted")
    below.set_xscale("log", base=2)
    below.set_xlim(1, _MOST_RUNS)
    below.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    below.set_ylim(0, 101)
    below.legend(loc="upper left", bbox_to_anchor=(0, -0.24), fontsize=7.5)
    for ax in (above, below):
        ax.grid(axis="y")


if __name__ == "__main__":
    sys.exit(main())
