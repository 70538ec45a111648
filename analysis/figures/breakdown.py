"""Where a step's time goes: shares of the fastest layouts' steps, and time a token along tp, pp and dp."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.data import breakdown
from analysis.figures import panels, style
from analysis.rows import labels, metrics

_BARS = 6
_MOST_PANELS = 6
_COLUMNS = 2
_UNTIMED = "no finished run has the parts of its step timed"


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Stacked bars in per cent of the step for the fastest layouts of each group, their throughput beside them."""
    rows = breakdown.table(frame)
    if rows.empty:
        raise style.NothingToDraw(_UNTIMED)
    groups, left_out = panels.chosen_groups(rows, _MOST_PANELS)
    parts = [panels.rows_of(rows, group).head(_BARS) for group in groups]
    longest = max(len(layout) for part in parts for layout in part["layout"])
    height = 0.9 + 0.28 * max(len(part) for part in parts)
    figure, axes = panels.grid(len(parts), _COLUMNS, (0.062 * longest + 3.6, height))
    noun, unit = labels.device_noun(frame), labels.rate_unit(frame)
    for ax, group, part in zip(axes, groups, parts, strict=True):
        _shares(ax, part)
        ax.set_title(labels.group_name(*group, noun))
    for ax in axes[-min(_COLUMNS, len(axes)) :]:
        ax.set_xlabel("Share of the step, %")
    note = "; ".join(part for part in (f"Right of each bar: {unit}", left_out) if part)
    style.bottom_legend(figure, _handles(rows), note)
    return figure


def _shares(ax: Axes, rows: pd.DataFrame) -> None:
    places = range(len(rows))
    left = pd.Series(0.0, index=rows.index)
    for name, (colour, hatch) in style.STEP_PARTS.items():
        if name in rows:
            width = 100 * rows[name].clip(lower=0)
            ax.barh(places, width, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, height=0.72)
            left = left + width
    for place, rate in zip(places, rows[metrics.RANK_BY], strict=True):
        ax.text(left.max() + 1.5, place, labels.number(rate), va="center", fontsize=8)
    ax.set_yticks(places, rows["layout"], fontsize=8)
    ax.set(xlim=(0, 118), ylim=(len(rows) - 0.4, -0.6))
    ax.set_xticks(range(0, 101, 20))
    ax.grid(axis="x")


@style.styled
def draw_along_axes(frame: pd.DataFrame) -> Figure:
    """One panel an axis: device time a token of the longest family of runs that differ in that degree alone."""
    rows = breakdown.along_axes(frame)
    if rows.empty:
        if not breakdown.parts_of(frame):
            raise style.NothingToDraw(_UNTIMED)
        raise style.NothingToDraw("no two runs with the parts of their steps timed differ in tp, pp or dp alone")
    noun = labels.device_noun(frame)
    families = [(str(axis), family.reset_index(drop=True)) for axis, family in rows.groupby("axis", sort=False)]
    titles = [_title(axis, family, noun) for axis, family in families]
    width = max(3.4, 0.075 * max(len(line) for title in titles for line in title.split("\n")) + 0.5)
    figure, axes = panels.grid(len(families), len(families), (width, 3.6))
    for ax, (axis, family), title in zip(axes, families, titles, strict=True):
        _stacks(ax, family)
        ax.set_title(title, fontsize=8.5)
        ax.set_xlabel(f"{axis} degree")
    axes[0].set_ylabel(f"{'GPU' if noun == 'GPUs' else 'Process'} time a token, µs")
    style.bottom_legend(figure, _handles(rows), f"Above each bar: {labels.rate_unit(frame)}")
    return figure


def _stacks(ax: Axes, family: pd.DataFrame) -> None:
    bottom = pd.Series(0.0, index=family.index)
    for name, (colour, hatch) in style.STEP_PARTS.items():
        if name in family:
            height = family[name].clip(lower=0)
            ax.bar(
                family.index,
                height,
                bottom=bottom,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
                width=0.66,
            )
            bottom = bottom + height
    for place, rate in enumerate(family[metrics.RANK_BY]):
        ax.text(place, 1.015 * bottom[place], labels.number(rate), ha="center", va="bottom", fontsize=8)
    ax.set_xticks(family.index, [f"{degree}" for degree in family["degree"]])
    ax.set(ylim=(0, 1.12 * float(bottom.max())), xlim=(-0.6, len(family) - 0.4))
    ax.grid(axis="y")


def _title(axis: str, family: pd.DataFrame, noun: str) -> str:
    """The workload and devices, and from which layout to which."""
    sizes = labels.world_sizes(family)
    place = family["workload"].iloc[0] + (f", {labels.devices(sizes[0], noun)}" if len(sizes) == 1 else "")
    return f"{place}\n{family['layout'].iloc[0]}\nto {family['layout'].iloc[-1]}"


def _handles(rows: pd.DataFrame) -> list[Patch]:
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for name, (colour, hatch) in style.STEP_PARTS.items()
        if name in rows
    ]
