"""Which groups get a panel when there are too many, and the grid that panels stand in."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures import style
from analysis.rows import metrics

Group = tuple[str, int]
"""A workload and a number of devices."""


def chosen_groups(rows: pd.DataFrame, most: int) -> tuple[list[Group], str | None]:
    """At most ``most`` groups of rows in group order, and a line that says so when some are left out.

    Every workload in turn gives the group with most of its rows, so that one with many sizes does not take all panels.
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


def grid(count: int, columns: int, panel_in: tuple[float, float], extra_in: float = 0.8) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels of a size in inches, ``columns`` beside each other, and room below them."""
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = style.new_figure(max(panel_in[0] * columns, 6.0), panel_in[1] * lines + extra_in)
    axes = list(figure.subplots(lines, columns, squeeze=False).ravel())
    for ax in axes[count:]:
        ax.set_visible(False)
    return figure, axes[:count]
