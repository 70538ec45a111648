"""Nodes and network over the course of a sweep: what runs reached against what they should, clocks, heat, bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.data import drift
from analysis.figures import style
from analysis.rows import labels

_WIDTH_IN = 10.0
_PANEL_IN = 2.0
_PLAIN = "#0072B2"
_THROTTLED = "#B00000"
_REGIMES = {"fast": ("#009E73", "^"), "slow": ("#D55E00", "v")}
_OTHER = "fewer nodes"


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Panels over the order of start: throughput against expectation by node, clock, temperature, all-reduce."""
    rows = drift.table(frame)
    if rows.empty:
        raise style.NothingToDraw("no attempt says when it started")
    shown = [(column, panel) for column, panel in _PANELS.items() if rows[column].notna().any()]
    if not shown:
        raise style.NothingToDraw(
            "no run can be compared with another of its experiment or with a prediction, and none has its clocks, "
            "temperature or bandwidth"
        )
    figure = style.new_figure(_WIDTH_IN, _PANEL_IN * len(shown) + 1.5)
    axes = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    handles: list[Line2D] = []
    for ax, (_, panel) in zip(axes, shown, strict=True):
        handles += panel(ax, rows)
        _sweeps(ax, rows)
        for line in ax.lines:
            line.set_rasterized(len(rows) > style.MOST_VECTOR_MARKS)
    by = "start" if rows["started_at"].notna().any() else "job id"
    several = rows["sweep"].nunique()
    apart = f"; dotted: from one of {several} sweeps to the next" if several > 1 else ""
    axes[-1].set_xlabel(f"Attempts in the order of their {by}{apart}")
    axes[-1].set_xlim(0, len(rows) + 1)
    style.bottom_legend(figure, handles, _told(rows))
    return figure


def _relative(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    known = rows[rows["relative"].notna()]
    nodes = drift.by_node(rows)
    ax.axhline(1.0, color="#444444", linewidth=0.8)
    ax.set_ylabel("Throughput\nover expected")
    ax.grid(axis="y")
    if not 1 < len(nodes) <= len(style.CATEGORY_COLOURS):
        _marks(ax, known["order"], known["relative"], _PLAIN, "o")
        kinds = " and ".join(sorted(known["compared_with"].unique(), reverse=True))
        return [_handle(_PLAIN, "o", f"throughput against {kinds}")]
    handles = []
    for place, (node, (count, median)) in enumerate(nodes.items()):
        colour, marker = style.CATEGORY_COLOURS[place], "osD^vP*"[place]
        own = known[known["node"] == node]
        _marks(ax, own["order"], own["relative"], colour, marker)
        told = f"median {median.text()}" if median is not None else f"n = {count}, too few for a median"
        handles.append(_handle(colour, marker, f"{node}: {told}"))
    return handles


def _clock(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    ax.set_ylabel("SM clock,\nMHz")
    return _state(ax, rows, "sm_clock_mhz")


def _temperature(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    ax.set_ylabel("Highest\ntemperature, °C")
    handles = _state(ax, rows, "temperature_c")
    return handles if rows["sm_clock_mhz"].isna().all() else []  # else the clock's panel has named them


def _state(ax: Axes, rows: pd.DataFrame, column: str) -> list[Line2D]:
    known = rows[rows[column].notna()]
    reasons = known["throttle_reasons"]
    named = sorted({part.strip() for text in reasons.dropna() for part in str(text).split(",") if part.strip()})
    ax.grid(axis="y")
    handles = []
    for which, colour, marker, label in (
        (reasons.eq(""), "#009E73", "D", "no clock event seen"),
        (reasons.notna() & reasons.ne(""), _THROTTLED, "x", f"clocks held back ({labels.listed(named)})"),
        (reasons.isna(), "#999999", "s", "clock events not known"),
    ):
        own = known[which.fillna(False).astype(bool)]
        if len(own):
            _marks(ax, own["order"], own[column], colour, marker)
            handles.append(_handle(colour, marker, label))
    return handles


def _bandwidth(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    known = rows[rows["all_reduce_bytes_per_s"].notna()]
    ax.set(yscale="log", ylabel="All-reduce over\nall ranks, GB/s")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y")
    handles = []
    regime = known["network_regime"].fillna(_OTHER)
    for name, (colour, marker) in {_OTHER: ("#999999", "o"), **_REGIMES}.items():
        own = known[regime == name]
        if len(own):
            _marks(ax, own["order"], own["all_reduce_bytes_per_s"] / 1e9, colour, marker)
            label = f"{name} regime" if name in _REGIMES else "too few nodes for a regime"
            handles.append(_handle(colour, marker, f"{label} (n = {len(own):,})"))
    return handles


_PANELS: dict[str, Callable[[Axes, pd.DataFrame], list[Line2D]]] = {
    "relative": _relative,
    "sm_clock_mhz": _clock,
    "temperature_c": _temperature,
    "all_reduce_bytes_per_s": _bandwidth,
}


def _told(rows: pd.DataFrame) -> str:
    known = rows[rows["relative"].notna()]
    if known.empty:
        return "No run can be compared with a repeat or a prediction"
    short, found = drift.too_short(rows), drift.trend(rows)
    if short is not None:
        return short
    if found is None:
        return f"{len(known):,} comparable runs, all alike"
    correlation, chance = found
    text = f"{len(known):,} comparable runs: rank correlation with time {correlation:+.2f}".replace("-", "−")
    return f"{text} (p = {chance:.3f} without drift)"


def _sweeps(ax: Axes, rows: pd.DataFrame) -> None:
    change = rows["sweep"].ne(rows["sweep"].shift()) & (rows["order"] > 1)
    for order in rows.loc[change, "order"]:
        ax.axvline(order - 0.5, color="#888888", linestyle=":", linewidth=0.9, zorder=0)


def _marks(ax: Axes, x: pd.Series, y: pd.Series, colour: str, marker: str) -> None:
    ax.plot(x, y, linestyle="", marker=marker, markersize=3.5, color=colour, alpha=0.8)


def _handle(colour: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, markersize=5, color=colour, label=label)
