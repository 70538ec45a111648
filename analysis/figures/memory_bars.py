"""Stacked bars of memory by category with the device's memory: measured values in full colour, closed forms in pale.

The figures of memory along an axis and over the first steps share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.drawing import bar_series, style
from analysis.memory.axis_panels import Bar
from analysis.memory.peak_split import PREDICTED, UNSPLIT
from analysis.rows import labels
from results.text.numbers import listed
from workloads.spec.experiment import ENGINE

_MOST_TIMES_THE_LIMIT = 3.0
"""Bars higher than this multiple of what fits are cut off, with their totals written on them; drawn in full they would
flatten all others."""
_OUTCOMES = {"ok": "", "oom": "OOM"}
_PALE = 0.68
_WIDTH = 0.62
_TWIN = 0.16
"""Width of the closed form's bar beside a measured one."""
_LINE_OF_TEXT = 0.095
"""Height of a bar's total as a share of an axis."""


def draw_bars(ax: Axes, bars: Sequence[Bar], limits: Sequence[float], unit: int) -> None:
    """Draw bars with their totals, marks of other measured peaks, and the device's memory."""
    top = _top(bars, limits) / unit
    wide_bars = [(place, bar.stack, _WIDTH) for place, bar in enumerate(bars)]
    beside = [(place, bar.closed_form) for place, bar in enumerate(bars)]
    twins = [(place + (_WIDTH + _TWIN) / 2, stack, _TWIN) for place, stack in beside if stack is not None]
    for fills, pale, sources in _LOOKS:
        some = [one for one in (*wide_bars, *twins) if one[1].source in sources]
        if not some:
            continue
        places, widths = [place for place, _, _ in some], [width for _, _, width in some]
        bottom = np.zeros(len(some))
        for i, (colour, hatch) in enumerate(fills):
            heights = np.array([stack.bytes[i] for _, stack, _ in some]) / unit
            bar_series.upright(ax, places, heights, bottom, widths, hatch=hatch, **look(colour, pale=pale))
            bottom += heights
    for name, marker in _MARKS.items():
        known = [(place, value) for place, bar in enumerate(bars) if (value := _mark(bar, name)) is not None]
        if known:
            ax.plot(*np.array([(place, value / unit) for place, value in known]).T, **_BLACK, **marker)
    for limit in limits:
        ax.axhline(limit / unit, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.2)
    for place, bar in enumerate(bars):
        _write_total(ax, place, bar, top, unit)
    ax.set_xticks(range(len(bars)), [_tick(bar) for bar in bars], fontsize=8)
    ax.set(xlim=(-0.6, len(bars) - 0.4), ylim=(0, 1.12 * top))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.grid(axis="y")


def _write_total(ax: Axes, place: int, bar: Bar, top: float, unit: int) -> None:
    """Write the total of a bar: above it, inside if a mark is in the way, or at the upper end if the bar is cut off."""
    total = bar.stack.total / unit
    mark = (_mark(bar, "peak_reserved_bytes") or 0) / unit
    inside = total > top or (0 < mark - total < _LINE_OF_TEXT * top and total > 1.5 * _LINE_OF_TEXT * top)
    ax.annotate(
        f"{'↑ ' if total > top else ''}{_short(total)}",
        (place, min(total if inside or mark - total >= _LINE_OF_TEXT * top else max(total, mark), top)),
        (0, -3 if inside else 3),
        textcoords="offset points",
        ha="center",
        va="top" if inside else "bottom",
        fontsize=7.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )


def handles(bars: Sequence[Bar], limits: Sequence[float], frame: pd.DataFrame) -> list[Patch | Line2D]:
    """Legend of the categories, of measured and predicted bars, and of the marks that these bars have."""
    sources = dict.fromkeys(bar.stack.source for bar in bars)
    entries: list[Patch | Line2D] = [
        Patch(hatch=hatch, label=name, **look(colour, pale=False))
        for name, (colour, hatch) in zip(labels.MEMORY_CATEGORIES.values(), FILLS, strict=True)
        if set(sources) != {UNSPLIT}
    ]
    if any(bar.closed_form is not None for bar in bars):
        sources[PREDICTED] = None
    others = listed(other_engines(frame))
    entries += [
        Patch(
            label=_source_name(source, others),
            **look(_WHOLE if source == UNSPLIT else "#555555", pale=source == PREDICTED),
        )
        for source in _SOURCE_NAMES
        if source in sources
    ]
    for name, marker in _MARKS.items():
        if any(_mark(bar, name) is not None for bar in bars):
            whose = f" by {others}" if others else ""
            entries.append(Line2D([], [], label=_MARK_NAMES[name] + whose, **_BLACK, **marker))
    if limits:
        names = sorted(frame["device_name"].dropna().unique())
        of = f" ({names[0]})" if len(names) == 1 else ""
        entries.append(Line2D([], [], linestyle="--", color=style.LIMIT_COLOUR, label=f"memory of the device{of}"))
    return entries


def other_engines(frame: pd.DataFrame) -> list[str]:
    """Engines of the rows other than this project's; the closed form is of this project's engine."""
    return sorted(set(frame["engine"].dropna().unique()) - {ENGINE})


def _source_name(source: str, others: str) -> str:
    """Legend text of a bar's source; for rows of other engines the closed form is named as this project's."""
    if source == PREDICTED and others:
        return f"pale: closed form of {ENGINE}'s engine, not {others}'s"
    if source == UNSPLIT:
        return f"{_SOURCE_NAMES[source]} by {others}"
    return _SOURCE_NAMES[source]


_SOURCE_NAMES = {
    "measured": "full colour: measured",
    "traced": "full colour: traced without a device",
    PREDICTED: "pale: closed form, not measured",
    UNSPLIT: "peak, measured",
}
_MARKS: dict[str, dict[str, Any]] = {
    "peak_reserved_bytes": {"marker": "_", "markersize": 15, "markeredgewidth": 1.6},
    "peak_allocated_bytes": {"marker": "D", "markersize": 4.5, "markerfacecolor": "white"},
}
_MARK_NAMES = {"peak_reserved_bytes": "peak reserved, measured", "peak_allocated_bytes": "peak allocated, measured"}
_BLACK: dict[str, Any] = {"linestyle": "", "color": "black", "zorder": 5}
FILLS = tuple(zip(style.CATEGORY_COLOURS, style.CATEGORY_HATCHES, strict=True))[: len(labels.MEMORY_CATEGORIES)]

_WHOLE = "#777777"
_LOOKS = (
    (FILLS, False, ("measured", "traced")),
    (FILLS, True, (PREDICTED,)),
    (((_WHOLE, ""),), False, (UNSPLIT,)),
)
"""Colours and hatches of a bar's parts, whether they are pale, and the sources of such bars."""


def look(colour: str, *, pale: bool) -> dict[str, Any]:
    if not pale:
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
    mixed = tuple(np.array(to_rgb(colour)) * (1 - _PALE) + _PALE)
    return {"facecolor": mixed, "edgecolor": colour, "linewidth": 0.9}


def limits_of(frame: pd.DataFrame, bars: Sequence[Bar]) -> list[float]:
    """Device memory in bytes of the drawn rows, otherwise of all rows: one line per kind of device."""
    drawn_limits = {value for bar in bars if (value := _known(bar, "device_memory_bytes")) is not None}
    return sorted(drawn_limits or {float(value) for value in frame["device_memory_bytes"].dropna().unique()})


def _top(bars: Sequence[Bar], limits: Sequence[float]) -> float:
    """Highest value of the axis in bytes, see `_MOST_TIMES_THE_LIMIT`."""
    reserved = [value for bar in bars if (value := _known(bar, "peak_reserved_bytes")) is not None]
    closed = [bar.closed_form.total for bar in bars if bar.closed_form is not None]
    highest = max([*(bar.stack.total for bar in bars), *closed, *reserved, *limits])
    fits = max([*limits, *reserved], default=highest)
    return min(highest, _MOST_TIMES_THE_LIMIT * fits)


def _known(bar: Bar, name: str) -> float | None:
    value = None if bar.row is None else bar.row[name]
    return None if value is None or pd.isna(value) else float(value)


def _mark(bar: Bar, name: str) -> float | None:
    """Value of a bar's mark; None for a peak that the bar itself shows."""
    if name == "peak_allocated_bytes" and bar.stack.source != PREDICTED:
        return None
    value = _known(bar, name)
    return None if bar.stack.source == UNSPLIT and value == bar.stack.total else value


def _tick(bar: Bar) -> str:
    if bar.row is None:
        return bar.label
    outcome = _OUTCOMES.get(bar.row["outcome"], "failed")
    repeats = int(bar.row["repeats"])
    return "\n".join(part for part in (bar.label, outcome, f"n = {repeats}" if repeats > 1 else "") if part)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
