"""What the sweep held its devices for, and what a trillion tokens would take."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.data import cost
from analysis.figures import outcomes, style
from analysis.rows import labels, metrics
from results.schema import OUTCOMES, UNKNOWN_OUTCOME

_MOST_BARS = 40
_BAR = "#0072B2"
_LOGARITHMIC = 20
"""Values that differ by more than this factor stand on a logarithmic axis."""


@style.styled
def draw_spent(frame: pd.DataFrame) -> Figure:
    """Stacked bars of device-hours by outcome, one bar a model and number of devices."""
    table = cost.spent(frame)
    if table.empty:
        raise style.NothingToDraw("no attempt has its duration recorded")
    hours = table.pivot_table(
        index=metrics.GROUP, columns="outcome", values="device_hours", aggfunc="sum", fill_value=0, sort=False
    )
    kinds = [kind for kind in (*OUTCOMES, UNKNOWN_OUTCOME) if kind in hours]
    noun = labels.device_noun(frame)
    unit = "GPU-hours" if noun == "GPUs" else "Process-hours"
    figure = style.new_figure(8.5, 0.3 * max(len(hours), 2) + 1.9)
    ax = figure.subplots()
    left = pd.Series(0.0, index=hours.index)
    for kind in kinds:
        ax.barh(
            range(len(hours)),
            hours[kind],
            left=left,
            color=style.OUTCOME_COLOURS[kind],
            hatch=outcomes.HATCHES.get(kind),
            edgecolor="white",
            linewidth=0.5,
            height=0.75,
        )
        left = left + hours[kind]
    for place, total in enumerate(left):
        ax.text(total, place, f" {total:,.3g}" if total < 1000 else f" {total:,.0f}", va="center", fontsize=8)
    ax.set_yticks(range(len(hours)), [labels.group_name(str(name), size, noun) for name, size in hours.index])
    ax.set(ylim=(len(hours) - 0.4, -0.6), xlim=(0, 1.12 * max(float(left.max()), 1e-9)), xlabel=unit)
    failed = left.sum() - (hours["ok"].sum() if "ok" in hours else 0.0)
    ax.set_title(f"{_amount(left.sum())} {unit}, {labels.percent(failed / left.sum())} of them by attempts that failed")
    ax.grid(axis="x")
    handles = [
        Patch(
            facecolor=style.OUTCOME_COLOURS[kind],
            hatch=outcomes.HATCHES.get(kind),
            edgecolor="white",
            label=labels.OUTCOME_NAMES[kind],
        )
        for kind in kinds
    ]
    style.bottom_legend(figure, handles, _note(frame, table, float(left.sum())))
    return figure


def _note(frame: pd.DataFrame, table: pd.DataFrame, hours: float) -> str | None:
    parts = []
    price = cost.price_per_device_hour(frame)
    if price is not None:
        parts.append(f"At {price:g} an hour and device: {_amount(hours * price)}")
    without = int(table["attempts_without_duration"].sum())
    if without:
        parts.append(f"{labels.plural(without, 'attempt')} without a duration are not in it")
    return ". ".join(parts) or None


@style.styled
def draw_training(frame: pd.DataFrame) -> Figure:
    """Bars for a trillion tokens with the fastest layout of each group: device-hours, days, and money and energy."""
    table = cost.training(frame)
    if table.empty:
        raise style.NothingToDraw("no run has finished with a throughput")
    left_out = len(table) - _MOST_BARS
    table = table.head(_MOST_BARS)
    noun = labels.device_noun(frame)
    hours = "GPU-hours" if noun == "GPUs" else "Process-hours"
    price = cost.price_per_device_hour(frame)
    columns = {
        "device_hours_per_trillion_tokens": f"{hours} for 10¹² tokens",
        "days_per_trillion_tokens": "Days for 10¹² tokens",
    }
    if price is not None:
        columns["price_per_trillion_tokens"] = f"Price of 10¹² tokens, {price:g} an hour"
    if table["wh_per_million_tokens"].notna().any():
        columns["wh_per_million_tokens"] = "Device energy, Wh for 10⁶ tokens"
    names = [
        f"{labels.group_name(str(row['workload']), row['world_size'], noun)}: {row['layout']}" + " ≈" * bool(row["tie"])
        for row in labels.records(table)
    ]
    width = 2.5 * len(columns) + 0.062 * max(map(len, names)) + 0.4
    figure = style.new_figure(max(width, 7.5), 0.27 * max(len(table), 2) + 1.5)
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for ax, (column, label) in zip(axes, columns.items(), strict=True):
        _values(ax, table[column].astype(float))
        ax.set_xlabel(label)
    axes[0].set_yticks(range(len(table)), names, fontsize=8)
    axes[0].set_ylim(len(table) - 0.4, -0.6)
    notes = ["≈: the next layout's steps overlap"] if table["tie"].any() else []
    notes += [f"{labels.plural(left_out, 'more group')} in the table"] if left_out > 0 else []
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=8.5, x=0.02, ha="left")
    return figure


def _values(ax: Axes, values: pd.Series) -> None:
    """Bars from 0, or points on a logarithmic axis where values differ by orders of magnitude; each written beside."""
    low, high = float(values.min()), float(values.max())
    places = range(len(values))
    if high > _LOGARITHMIC * low:
        ax.plot(values, places, linestyle="", marker="o", markersize=5, color=_BAR)
        start, end = low / 1.6, high * (high / low) ** 0.45
        ax.set(xscale="log", xlim=(start, end))
        ax.xaxis.set_major_locator(LogLocator(subs=(1,), numticks=6))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.barh(places, values, color=_BAR, height=0.7)
        ax.set_xlim(0, 1.4 * high)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    for place, value in enumerate(values):
        if pd.notna(value):
            ax.annotate(
                _amount(value), (value, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5
            )
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(value: float) -> str:
    """``30k``, ``2M``; small values as they are."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
