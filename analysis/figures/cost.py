"""What the sweep held its devices for, and what a trillion tokens would take: hours, and money and energy if known.

Nothing is assumed: money is told only where whoever reads the report named a price, energy only where power was
measured. Power is that of the devices alone, without hosts, network and cooling.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.figures import style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from results.schema import OUTCOMES, UNKNOWN_OUTCOME
from results.text import format_number, format_percent, plural

TRILLION = 1e12
SPENT = ("model", *metrics.GROUP, "outcome", "attempts", "device_hours", "price", "attempts_without_duration")
TRAINING = (
    *(*metrics.GROUP, "layout", metrics.RANK_BY, "tie", "device_hours_per_trillion_tokens"),
    *("days_per_trillion_tokens", "price_per_trillion_tokens", "power_w", "wh_per_million_tokens", "attempt_id"),
)


_MOST_BARS = 40
_BAR = "#0072B2"
_LOGARITHMIC = 20
"""Values that differ by more than this factor stand on a logarithmic axis."""


def spent(frame: pd.DataFrame, price: float | None = None) -> pd.DataFrame:
    """Device-hours of all attempts, retries included, by model, number of devices and outcome: `SPENT`.

    ``price``: of one device for one hour, in whatever currency; without it the column ``price`` is not known.
    Attempts without a duration are counted beside the sum, which is over the others. Empty when none has one.
    """
    if frame["duration_s"].isna().all():
        return pd.DataFrame(columns=[*SPENT])
    rows = frame.assign(device_hours=metrics.held_hours(frame))
    groups = rows.groupby(["model", *metrics.GROUP, "outcome"], sort=False)
    found = groups.agg(
        attempts=("attempt_id", "size"), known=("device_hours", "count"), device_hours=("device_hours", "sum")
    )
    found = found.reset_index()
    found = found.assign(
        device_hours=found["device_hours"].where(found["known"] > 0),
        price=float("nan") if price is None else found["device_hours"] * price,
        attempts_without_duration=found["attempts"] - found["known"],
    )
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    found = found.sort_values(["workload", "world_size"], key=lambda column: column.map(order).fillna(column))
    return found[[*SPENT]].reset_index(drop=True)


def training(frame: pd.DataFrame, price: float | None = None) -> pd.DataFrame:
    """What a trillion tokens take with the fastest layout of each model and number of devices: `TRAINING`.

    hours = 1e12 / (tokens/s/GPU) / 3600 over all devices; days = 1e12 / (tokens/s/GPU × devices) / 86400;
    Wh per million tokens = W / (tokens/s/GPU) × 1e6 / 3600. At the speed of the timed steps: no restart, no
    evaluation, no failure is in it. ``tie``: other layouts are within the winner's noise. ``price`` as in
    `spent`.
    """
    best = metrics.best_configurations(frame)
    if best.empty:
        return pd.DataFrame(columns=[*TRAINING])
    best = labels.in_group_order(best)
    rate = best[metrics.RANK_BY]
    hours = TRILLION / rate / 3600
    found = best.assign(
        device_hours_per_trillion_tokens=hours,
        days_per_trillion_tokens=hours / best["world_size"] / 24,
        price_per_trillion_tokens=float("nan") if price is None else hours * price,
        wh_per_million_tokens=best["power_w"].astype(float) / rate * 1e6 / 3600,
    )
    return found[[*TRAINING]].reset_index(drop=True)


@style.styled
def draw_spent(frame: pd.DataFrame, price: float | None = None) -> Figure:
    """Stacked bars of device-hours by outcome, one bar a model and number of devices."""
    table = spent(frame, price)
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
            hatch=style.OUTCOME_HATCHES.get(kind),
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
    ax.set_title(
        f"{format_number(left.sum())} {unit}, {format_percent(failed / left.sum())} of them by attempts that failed"
    )
    ax.grid(axis="x")
    handles = [
        Patch(
            facecolor=style.OUTCOME_COLOURS[kind],
            hatch=style.OUTCOME_HATCHES.get(kind),
            edgecolor="white",
            label=labels.OUTCOME_NAMES[kind],
        )
        for kind in kinds
    ]
    style.bottom_legend(figure, handles, _note(table, float(left.sum()), price))
    return figure


def _note(table: pd.DataFrame, hours: float, price: float | None) -> str | None:
    parts = []
    if price is not None:
        parts.append(f"At {price:g} an hour and device: {format_number(hours * price)}")
    without = int(table["attempts_without_duration"].sum())
    if without:
        parts.append(f"{plural(without, 'attempt')} without a duration are not in it")
    return ". ".join(parts) or None


@style.styled
def draw_training(frame: pd.DataFrame, price: float | None = None) -> Figure:
    """Bars for a trillion tokens with the fastest layout of each group: device-hours, days, and money and energy."""
    table = training(frame, price)
    if table.empty:
        raise style.NothingToDraw("no run has finished with a throughput")
    left_out = len(table) - _MOST_BARS
    table = table.head(_MOST_BARS)
    noun = labels.device_noun(frame)
    hours = "GPU-hours" if noun == "GPUs" else "Process-hours"
    columns = {
        "device_hours_per_trillion_tokens": f"{hours} for 10¹² tokens",
        "days_per_trillion_tokens": "Days for 10¹² tokens",
    }
    if price is not None:
        columns["price_per_trillion_tokens"] = f"Price of 10¹² tokens, {price:g} an hour"
    if table["wh_per_million_tokens"].notna().any():
        columns["wh_per_million_tokens"] = "Device energy, Wh for 10⁶ tokens"
    names = [
        f"{labels.group_name(str(row['workload']), row['world_size'], noun)}: {row['layout']}"
        + " ≈" * metrics.is_tie(row["tie"])
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
    notes = ["≈: other layouts are within its noise"] if table["tie"].eq(True).any() else []
    notes += [f"{plural(left_out, 'more group')} in the table"] if left_out > 0 else []
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
                format_number(value),
                (value, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def _short(value: float) -> str:
    """``30k``, ``2M``; small values as they are."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def figures(price: float | None) -> tuple[FigureSpec, ...]:
    """The figures of cost, with money where the ``price`` of one device for one hour is known."""
    return (
        FigureSpec(
            name="device_hours",
            section="cost",
            title="What the sweep held its devices for",
            caption=(
                "Duration of every attempt, retries included, times its devices; a rehearsal holds one. Money only "
                "where a price was named."
            ),
            draw=partial(draw_spent, price=price),
            data=partial(spent, price=price),
        ),
        FigureSpec(
            name="training_cost",
            section="cost",
            title="What a trillion tokens would take",
            caption=(
                "The fastest layout of each model and size at the speed of its timed steps, without restarts, "
                "evaluation or failures. Energy is the devices' measured power alone; money only where a price was "
                "named."
            ),
            draw=partial(draw_training, price=price),
            data=partial(training, price=price),
        ),
    )


FIGURES = figures(None)
