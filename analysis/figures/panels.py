"""Selection of the groups that get a panel when there are too many, and the grid of panels."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.rows import metrics

Group = tuple[str, int]
"""A workload and a number of devices."""


def chosen_groups(rows: pd.DataFrame, most: int) -> tuple[list[Group], str | None]:
    """At most ``most`` groups of rows in group order, and a line that says so if some are left out.

    Workloads take turns, each with its group of most rows, so that one with many sizes does not take all panels.
    """
    sizes = rows.groupby(metrics.GROUP).size().rename("rows").reset_index()
    sizes = sizes.sort_values(["rows", "world_size"], ascending=[False, True], kind="stable")
    sizes["turn"] = sizes.groupby("workload").cumcount()
    kept = sizes.sort_values(["turn", "rows"], ascending=[True, False], kind="stable").head(most)
    order = {workload: place for place, workload in enumerate(rows["workload"].unique())}
    groups = [(str(name), int(size)) for name, size in zip(kept["workload"], kept["world_size"], strict=True)]
    groups.sort(key=lambda group: (order[group[0]], group[1]))
    left_out = f"{len(kept)} of {len(sizes)} models and sizes, those with most finished runs of each model"
    return groups, left_out if len(sizes) > len(kept) else None


def rows_of(rows: pd.DataFrame, group: Group) -> pd.DataFrame:
    return rows[(rows["workload"] == group[0]) & (rows["world_size"] == group[1])]


_NO_BREAK = "\N{NO-BREAK SPACE}"
_CHARACTER_EM = 0.66
"""Approximate width of a character of a bold title, in em."""
_BESIDE_IN = 0.6
"""Approximate width of the tick labels beside a panel, in inches."""


def set_title(ax: Axes, text: str, size: float = 10.0, *, weight: str = "bold", beside_in: float = _BESIDE_IN) -> None:
    """Set a title that stays inside its panel: wrapped to the panel's width, with line breaks after commas.

    ``beside_in`` is the width in inches that labels left of the panel take.
    """
    place, figure = ax.get_subplotspec(), ax.figure.figure
    assert place is not None and isinstance(figure, Figure)
    _, columns = place.get_gridspec().get_geometry()
    width = figure.get_figwidth() * len(place.colspan) / columns - beside_in
    characters = max(int(72 * width / (_CHARACTER_EM * size)), 12)
    # "seq 4096" stays together: lines end at commas.
    parts = text.replace(" ", _NO_BREAK).replace(f",{_NO_BREAK}", ", ")
    lines = textwrap.wrap(parts, characters, break_long_words=False, break_on_hyphens=False)
    ax.set_title("\n".join(lines).replace(_NO_BREAK, " "), fontsize=size, weight=weight)


def columns_within(panel_in: float) -> int:
    """Number of panels of a width in inches that stand side by side in the widest figure, at least 1."""
    return max(1, int(style.MOST_WIDTH_IN / panel_in))


def bottom_of_columns(axes: Sequence[Axes]) -> list[Axes]:
    """The panels of a `grid` that have no other below them."""
    by_column = {place.colspan.start: ax for ax in axes if (place := ax.get_subplotspec()) is not None}
    return list(by_column.values())


def leftmost(axes: Sequence[Axes]) -> list[Axes]:
    """The panels in the first column of a `grid`."""
    return [ax for ax in axes if (place := ax.get_subplotspec()) is not None and place.is_first_col()]


def grid(count: int, columns: int, panel_in: tuple[float, float], extra_in: float = 0.8) -> tuple[Figure, list[Axes]]:
    """Figure with ``count`` panels of a size in inches, ``columns`` side by side or as many as `style.MOST_WIDTH_IN`
    allows, with room below them."""
    columns = min(columns, count, columns_within(panel_in[0]))
    lines = -(-count // columns)
    figure = style.new_figure(max(panel_in[0] * columns, 6.0), panel_in[1] * lines + extra_in)
    axes = list(figure.subplots(lines, columns, squeeze=False).ravel())
    for ax in axes[count:]:
        ax.set_visible(False)
    return figure, axes[:count]
