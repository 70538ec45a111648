"""Stacked bars in per cent of the step for the fastest layouts of each model and size, one panel each."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.drawing import bar_series, style
from analysis.figures import panels
from analysis.rows import labels, metrics
from results.text.numbers import format_number

Parts = Mapping[str, tuple[str, str]]
"""Colour and hatch of each part, in the order of the stack."""

_BARS = 6
_MOST_PANELS = 6
_COLUMNS = 2


def draw_shares(frame: pd.DataFrame, rows: pd.DataFrame, parts: Parts) -> Figure:
    """Figure of ``rows``, fastest first in each group, with fractions of the step in the columns of ``parts`` that they
    have. The throughput is right of each bar."""
    groups, left_out = panels.chosen_groups(rows, _MOST_PANELS)
    of_groups = [panels.rows_of(rows, group).head(_BARS) for group in groups]
    longest = max(len(layout) for part in of_groups for layout in part["layout"])
    height = 0.9 + 0.28 * max(len(part) for part in of_groups)
    figure, axes = panels.grid(len(of_groups), _COLUMNS, (0.062 * longest + 3.6, height))
    noun, unit = labels.device_noun(frame), labels.rate_unit(frame)
    for ax, group, part in zip(axes, groups, of_groups, strict=True):
        _bars(ax, part, parts)
        panels.set_title(ax, labels.group_name(*group, noun), beside_in=0.062 * longest + 0.6)
    for ax in panels.bottom_of_columns(axes):
        ax.set_xlabel("Share of the step, %")
    note = "; ".join(part for part in (f"Right of each bar: {unit}", left_out) if part)
    style.bottom_legend(figure, handles(rows, parts), note)
    return figure


def handles(rows: pd.DataFrame, parts: Parts) -> list[Patch]:
    """Legend entries of the parts that these rows have."""
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for name, (colour, hatch) in parts.items()
        if name in rows
    ]


def _bars(ax: Axes, rows: pd.DataFrame, parts: Parts) -> None:
    places = range(len(rows))
    left = pd.Series(0.0, index=rows.index)
    for name, (colour, hatch) in parts.items():
        if name in rows:
            width = 100 * rows[name].fillna(0.0).clip(lower=0)
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            bar_series.lying(ax, places, width, left, 0.72, **look)
            left = left + width
    for place, rate in zip(places, rows[metrics.RANK_BY], strict=True):
        ax.text(left.max() + 1.5, place, format_number(rate), va="center", fontsize=8)
    ax.set_yticks(places, rows["layout"], fontsize=8)
    ax.set(xlim=(0, 118), ylim=(len(rows) - 0.4, -0.6))
    ax.set_xticks(range(0, 101, 20))
    ax.grid(axis="x")
