"""Device-hours of the sweep, and the cost of a trillion tokens: hours, and price and energy if known.

Nothing is assumed: prices appear only if the user gave one, energy only if power was measured. Power is that of the
devices alone, without hosts, network and cooling.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from analysis.drawing import bar_series, direct_labels, style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from results.tables.schema import OUTCOMES, UNKNOWN_OUTCOME
from results.text.numbers import format_number, format_percent, plural

TRILLION = 1e12
SPENT = ("model", *metrics.GROUP, "outcome", "attempts", "device_hours", "price", "attempts_without_duration")
TRAINING = (
    *(*metrics.GROUP, "layout", metrics.RANK_BY, "tie", "device_hours_per_trillion_tokens"),
    *("days_per_trillion_tokens", "price_per_trillion_tokens", "power_w", "wh_per_million_tokens", "attempt_id"),
)


_CURVES_IN = (8.4, 5.4)
_MOST_LINES = 10
_MOST_BARS = 40
"""Largest number of bars: those of the most hours; more do not fit a screen."""
_MARKERS = "osD^vPX"


def spent(frame: pd.DataFrame, price: float | None = None) -> pd.DataFrame:
    """Device-hours of all attempts, retries included, by model, number of devices and outcome: `SPENT`.

    ``price``: price of one device-hour in any currency; without it the column ``price`` is unknown. Attempts without a
    duration are counted separately and are not in the sums. The table is empty if no attempt has a duration.
    """
    if frame["duration_s"].isna().all():
        return pd.DataFrame(columns=[*SPENT])
    rows = frame.assign(device_hours=metrics.held_hours(frame))
    groups = rows.groupby(["model", *metrics.GROUP, "outcome"], sort=False)
    hours = groups.agg(
        attempts=("attempt_id", "size"), known=("device_hours", "count"), device_hours=("device_hours", "sum")
    )
    hours = hours.reset_index()
    hours = hours.assign(
        device_hours=hours["device_hours"].where(hours["known"] > 0),
        price=float("nan") if price is None else hours["device_hours"] * price,
        attempts_without_duration=hours["attempts"] - hours["known"],
    )
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    hours = hours.sort_values(["workload", "world_size"], key=lambda column: column.map(order).fillna(column))
    return hours[[*SPENT]].reset_index(drop=True)


def training(frame: pd.DataFrame, price: float | None = None) -> pd.DataFrame:
    """Cost of a trillion tokens with the fastest layout of each model and number of devices: `TRAINING`.

    hours = 1e12 / (tokens/s/GPU) / 3600 over all devices; days = 1e12 / (tokens/s/GPU × devices) / 86400; Wh per
    million tokens = W / (tokens/s/GPU) × 1e6 / 3600. The speed is that of the timed steps, without restarts, evaluation
    or failures. ``tie``: other layouts are within the winner's noise. ``price`` as in `spent`.
    """
    best = metrics.best_configurations(frame)
    if best.empty:
        return pd.DataFrame(columns=[*TRAINING])
    best = labels.in_group_order(best)
    rate = best[metrics.RANK_BY]
    hours = TRILLION / rate / 3600
    costs = best.assign(
        device_hours_per_trillion_tokens=hours,
        days_per_trillion_tokens=hours / best["world_size"] / 24,
        price_per_trillion_tokens=float("nan") if price is None else hours * price,
        wh_per_million_tokens=best["power_w"].astype(float) / rate * 1e6 / 3600,
    )
    return costs[[*TRAINING]].reset_index(drop=True)


@style.styled
def draw_spent(frame: pd.DataFrame, price: float | None = None) -> Figure:
    """Stacked bars of device-hours by outcome, one bar per model and number of devices."""
    table = spent(frame, price)
    if table.empty:
        raise style.NothingToDraw("no attempt has a recorded duration")
    hours = table.pivot_table(
        index=metrics.GROUP, columns="outcome", values="device_hours", aggfunc="sum", fill_value=0, sort=False
    )
    kinds = [kind for kind in (*OUTCOMES, UNKNOWN_OUTCOME) if kind in hours]
    longest = (-hours.sum(axis=1)).to_numpy().argsort(kind="stable")[:_MOST_BARS]
    shown = hours.iloc[sorted(longest)]
    noun = labels.device_noun(frame)
    unit = "GPU-hours" if noun == "GPUs" else "Process-hours"
    figure = style.new_figure(8.5, 0.3 * max(len(shown), 2) + 1.9)
    ax = figure.subplots()
    left = pd.Series(0.0, index=shown.index)
    for kind in kinds:
        look = {"facecolor": style.OUTCOME_COLOURS[kind], "hatch": style.OUTCOME_HATCHES.get(kind)}
        bar_series.lying(ax, range(len(shown)), shown[kind], left, 0.75, edgecolor="white", linewidth=0.5, **look)
        left = left + shown[kind]
    for place, length in enumerate(left):
        ax.text(length, place, f" {length:,.3g}" if length < 1000 else f" {length:,.0f}", va="center", fontsize=8)
    ax.set_yticks(range(len(shown)), [labels.group_name(str(name), size, noun) for name, size in shown.index])
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.12 * max(float(left.max()), 1e-9)), xlabel=unit)
    total = float(hours.to_numpy().sum())
    failed = total - (hours["ok"].sum() if "ok" in hours else 0.0)
    ax.set_title(f"{format_number(total)} {unit}, {format_percent(failed / total)} of them by attempts that failed")
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
    left_out = len(hours) - len(shown)
    style.bottom_legend(figure, handles, _note(table, total, price, left_out))
    return figure


def _note(table: pd.DataFrame, hours: float, price: float | None, left_out: int) -> str | None:
    parts = []
    if left_out:
        parts.append(f"{plural(left_out, 'more bar')} of fewer hours: see the table")
    if price is not None:
        parts.append(f"At {price:g} an hour and device: {format_number(hours * price)}")
    without = int(table["attempts_without_duration"].sum())
    if without:
        parts.append(f"{plural(without, 'attempt')} without a duration are not included")
    return ". ".join(parts) or None


@style.styled
def draw_training(frame: pd.DataFrame, price: float | None = None) -> Figure:
    """Days over the device-hours of a trillion tokens, or over their price with a ``price``: one line per model over
    its numbers of devices, each point with the fastest layout of its number."""
    table = training(frame, price)
    if table.empty:
        raise style.NothingToDraw("no run has finished with a throughput")
    noun = labels.device_noun(frame)
    sizes = table.groupby("workload", sort=False).size().sort_values(ascending=False, kind="stable")
    most = {str(name) for name in sizes.index[:_MOST_LINES]}
    models = [str(name) for name in table["workload"].unique()]
    shown = [name for name in models if name in most]
    table = table[table["workload"].isin(shown)]
    column = "device_hours_per_trillion_tokens" if price is None else "price_per_trillion_tokens"
    x, y = table[column].astype(float), table["days_per_trillion_tokens"].astype(float)
    figure = style.new_figure(*_CURVES_IN)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log", xlim=(x.min() / 1.5, x.max() * 1.9), ylim=(y.min() / 1.5, y.max() * 1.5))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 3) if axis is ax.xaxis else (1, 2, 5), numticks=12))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    names = direct_labels.Labels(ax, _CURVES_IN)
    names.keep_clear(x, y)
    colours = {name: style.SERIES_COLOURS[i % len(style.SERIES_COLOURS)] for i, name in enumerate(shown)}
    for i, (name, colour) in enumerate(colours.items()):
        line = table.index[table["workload"] == name]
        marker = _MARKERS[i % len(_MARKERS)]
        ax.plot(x[line], y[line], label=name, color=colour, marker=marker, markersize=4.5, linewidth=1.4)
        names.keep_line_clear(x[line].tolist(), y[line].tolist())
    for size, across, up in zip(table["world_size"], x, y, strict=True):
        names.write(f"{int(size)}", across, up, "#444444")
    ax.set_ylabel("Days for 10¹² tokens")
    hours = "GPU-hours" if noun == "GPUs" else "Process-hours"
    ax.set_xlabel(f"{hours} for 10¹² tokens" if price is None else f"Price of 10¹² tokens, {price:g} an hour")
    ax.grid()
    more = f"; {plural(len(models) - len(shown), 'more model')} in the table" if len(models) > len(shown) else ""
    style.bottom_legend(figure, ax.get_legend_handles_labels()[0], f"Numbers beside points: {noun}{more}")
    return figure


def conclude_training(frame: pd.DataFrame, price: float | None = None) -> str | None:
    """Sentence on the model with the most sizes: days saved by its fastest size, and extra cost over its cheapest."""
    table = training(frame, price)
    if table.empty:
        return None
    column = "device_hours_per_trillion_tokens" if price is None else "price_per_trillion_tokens"
    sizes = table.groupby("workload", sort=False)["world_size"].transform("size")
    of_model = table[sizes == sizes.max()]
    of_model = of_model[of_model["workload"] == of_model["workload"].iloc[0]]
    if len(of_model) < 2:
        return None
    cheap, quick = (of_model.sort_values(name).iloc[0] for name in (column, "days_per_trillion_tokens"))
    if cheap["world_size"] == quick["world_size"]:
        return None
    noun, what = labels.device_noun(frame), "device-hours" if price is None else "money"
    more = quick[column] / cheap[column] - 1
    return (
        f"{of_model['workload'].iloc[0]}: {labels.devices(quick['world_size'], noun)} instead of "
        f"{int(cheap['world_size'])} "
        f"take {format_number(quick['days_per_trillion_tokens'])} days instead of "
        f"{format_number(cheap['days_per_trillion_tokens'])}, for {format_percent(more, 0)} more {what} "
        f"(n = {len(of_model)} sizes)."
    )


def conclude_spent(frame: pd.DataFrame) -> str | None:
    """Sentence on the hours of all attempts, and the share of those that failed."""
    table = spent(frame)
    hours = table["device_hours"].sum()
    if not hours:
        return None
    failed = table.loc[table["outcome"] != "ok", "device_hours"].sum()
    known = int((table["attempts"] - table["attempts_without_duration"]).sum())
    return (
        f"{plural(known, 'attempt')} held devices for {format_number(hours)} device-hours, "
        f"{format_percent(failed / hours, 0)} of them in attempts that failed."
    )


def _short(value: float) -> str:
    """Short form of a number, e.g. ``30k``, ``2M``; small values stay."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def figures(price: float | None) -> tuple[FigureSpec, ...]:
    """The figures of cost, with prices if the ``price`` of one device-hour is known."""
    return (
        FigureSpec(
            name="device_hours",
            section="cost",
            title="What the sweep held its devices for",
            caption=(
                "Duration of every attempt, retries included, times its devices; a rehearsal holds one. A price only "
                "if one was given."
            ),
            draw=partial(draw_spent, price=price),
            data=partial(spent, price=price),
            conclude=conclude_spent,
        ),
        FigureSpec(
            name="training_cost",
            section="cost",
            title="What a trillion tokens would take",
            caption=(
                "The fastest layout of each model and size at the speed of its timed steps, without restarts, "
                "evaluation or failures: days against device-hours, or against the price if one was given. The "
                "table has the layouts, and the energy of the devices alone if their power was measured."
            ),
            draw=partial(draw_training, price=price),
            data=partial(training, price=price),
            conclude=partial(conclude_training, price=price),
        ),
    )


FIGURES = figures(None)
