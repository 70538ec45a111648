"""Whether nodes and network stayed the same over a sweep: each run's throughput over its expectation, in order.

A repeated run is compared with the median of its experiment. Any other is compared with its prediction, scaled by the
median error of predictions for runs of the same model and degrees (`FEWEST_ALIKE` or more). Grids run in a fixed order:
without the scaling, a prediction that suits one layout better than the next would look like drift.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from analysis.drawing import style
from analysis.figures.spec import FigureSpec
from analysis.rows import metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MedianInterval, chance_of_rank_correlation, rank_correlation, supported_median
from results.text.numbers import listed

FEWEST_ALIKE = 3
FEWEST_RUNS = 20
SHORTEST_S = 3600.0
"""Shortest span of start times, in seconds; with a shorter span or fewer than `FEWEST_RUNS` runs, drift and chance
cannot be separated."""
COLUMNS = (
    *("order", "sweep", "started_at", "job_id", "node", "workload", "layout", "relative", "compared_with"),
    *("sm_clock_mhz", "temperature_c", "throttle_reasons", "all_reduce_bytes_per_s", "network_regime", "node_count"),
    "git_commit",
    "attempt_id",
)


_READ = (
    *("outcome", "method", "experiment_id", "engine_version", "world_size", "degrees", "nodes", "hosts"),
    *("predicted_step_time_s", "step_time_s", metrics.RANK_BY),
)
"""Columns that `data` reads in addition to those that it gives."""
_WIDTH_IN = 10.0
_PANEL_IN = 2.0
_PLAIN = "#0072B2"
_THROTTLED = "#B00000"
_REGIMES = {"fast": ("#009E73", "^"), "slow": ("#D55E00", "v")}
_OTHER = "fewer nodes"


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Every attempt with a known position in time, `COLUMNS`, in order of start (of job id if no start is known).

    ``relative`` is throughput over its expectation, for finished runs that have one; ``compared_with`` names it:
    ``repeats`` or ``prediction``. ``node`` names all nodes of the run, null if unknown.
    """
    rows = frame.reindex(columns=list(dict.fromkeys([*COLUMNS, *_READ])))
    by = "started_at" if rows["started_at"].notna().any() else "job_id"
    rows = rows[rows[by].notna()].sort_values(by, kind="stable").reset_index(drop=True)
    relative, compared = _relative(rows)
    rows = rows.assign(order=range(1, len(rows) + 1), node=_node(rows), relative=relative, compared_with=compared)
    return rows[[*COLUMNS]]


def too_short(rows: pd.DataFrame) -> str | None:
    """Reason why the runs of `data` cannot separate drift from chance; None if they can."""
    known = rows[rows["relative"].notna()]
    span = (known["started_at"].max() - known["started_at"].min()).total_seconds() if len(known) else 0.0
    if len(known) < FEWEST_RUNS:
        return f"{len(known)} comparable runs, fewer than {FEWEST_RUNS}: too few to tell drift from chance"
    if span < SHORTEST_S:
        return f"{len(known)} comparable runs within {span / 60:.0f} minutes: too short a time to tell drift"
    return None


def trend(rows: pd.DataFrame) -> tuple[float, float] | None:
    """Rank correlation of ``relative`` with the order of start, and its probability without drift; None if there are
    too few runs (`too_short`)."""
    known = rows[rows["relative"].notna()]
    if too_short(rows) is not None:
        return None
    correlation = rank_correlation(known["order"], known["relative"])
    chance = chance_of_rank_correlation(known["order"], known["relative"])
    return None if correlation is None or chance is None else (correlation, chance)


def by_node(rows: pd.DataFrame) -> dict[str, tuple[int, MedianInterval | None]]:
    """Number of comparable runs of each node (or set of nodes) and the median of ``relative``; the median is None with
    too few."""
    known = rows[rows["relative"].notna() & rows["node"].notna()]
    return {str(node): (len(of_node), supported_median(of_node["relative"])) for node, of_node in known.groupby("node")}


def _relative(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    ok = rows[(rows["outcome"] == "ok") & rows[metrics.RANK_BY].notna()]
    repeats = ok.groupby([ok["experiment_id"], ok["engine_version"].fillna("–")])[metrics.RANK_BY]
    repeated = (ok[metrics.RANK_BY] / repeats.transform("median")).where(repeats.transform("size") > 1)
    ratio = ok["predicted_step_time_s"].astype(float) / ok["step_time_s"]
    # The time of a row traced without a device is the prediction itself.
    ratio = ratio.where(ok["method"] != "rehearsed_fake")
    alike = ratio.groupby([ok["workload"], ok["world_size"], ok["degrees"]])
    predicted = (ratio / alike.transform("median")).where(alike.transform("count") >= FEWEST_ALIKE)
    relative = repeated.fillna(predicted)
    compared = pd.Series("prediction", index=ok.index).where(repeated.isna(), "repeats").where(relative.notna())
    return relative.reindex(rows.index), compared.reindex(rows.index)


def _node(rows: pd.DataFrame) -> pd.Series:
    def named(value: object) -> str | None:
        names = sorted({str(name) for name in value}) if hasattr(value, "__iter__") and len(list(value)) else []
        return "+".join(names) or None

    def names_of(lists: pd.Series) -> pd.Series:
        one_of_each = {id(value): value for value in lists}  # most rows share a list
        names = {place: named(value) for place, value in one_of_each.items()}
        return pd.Series([names[id(value)] for value in lists], index=lists.index, dtype=object)

    nodes = names_of(rows["nodes"])
    return nodes.where(nodes.notna(), names_of(rows["hosts"])) if nodes.isna().any() else nodes


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Panels over the order of start: throughput against expectation by node, clock, temperature, all-reduce."""
    rows = data(frame)
    if rows.empty:
        raise style.NothingToDraw("no attempt has a start time")
    shown = [(column, panel) for column, panel in _PANELS.items() if rows[column].notna().any()]
    if not shown:
        raise style.NothingToDraw(
            "no run has a repeat or a prediction to compare with, and none has recorded clocks, "
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
    style.bottom_legend(figure, handles, _trend_note(rows))
    return figure


def _throughput(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    known = rows[rows["relative"].notna()]
    nodes = by_node(rows)
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
        of_node = known[known["node"] == node]
        _marks(ax, of_node["order"], of_node["relative"], colour, marker)
        median_text = f"median {median.text()}" if median is not None else f"n = {count}, too few for a median"
        handles.append(_handle(colour, marker, f"{node}: {median_text}"))
    return handles


def _clock(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    ax.set_ylabel("SM clock,\nMHz")
    return _state(ax, rows, "sm_clock_mhz")


def _temperature(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    ax.set_ylabel("Highest\ntemperature, °C")
    handles = _state(ax, rows, "temperature_c")
    return handles if rows["sm_clock_mhz"].isna().all() else []  # otherwise the clock's panel has named them


def _state(ax: Axes, rows: pd.DataFrame, column: str) -> list[Line2D]:
    known = rows[rows[column].notna()]
    reasons = known["throttle_reasons"]
    named = sorted(
        {part.strip() for text in reasons.dropna().unique() for part in str(text).split(",") if part.strip()}
    )
    ax.grid(axis="y")
    handles = []
    for which, colour, marker, label in (
        (reasons.eq(""), "#009E73", "D", "no clock event seen"),
        (reasons.notna() & reasons.ne(""), _THROTTLED, "x", f"clocks throttled ({listed(named)})"),
        (reasons.isna(), "#999999", "s", "clock events not known"),
    ):
        of_kind = known[which.fillna(False).astype(bool)]
        if len(of_kind):
            _marks(ax, of_kind["order"], of_kind[column], colour, marker)
            handles.append(_handle(colour, marker, label))
    return handles


def _bandwidth(ax: Axes, rows: pd.DataFrame) -> list[Line2D]:
    known = rows[rows["all_reduce_bytes_per_s"].notna()]
    ax.set(yscale="log", ylabel="All-reduce over\nall ranks, GB/s")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.grid(axis="y")
    handles = []
    regime = known["network_regime"].fillna(_OTHER)
    for name, (colour, marker) in {_OTHER: ("#999999", "o"), **_REGIMES}.items():
        of_regime = known[regime == name]
        if len(of_regime):
            _marks(ax, of_regime["order"], of_regime["all_reduce_bytes_per_s"] / 1e9, colour, marker)
            label = f"{name} regime" if name in _REGIMES else "too few nodes for a regime"
            handles.append(_handle(colour, marker, f"{label} (n = {len(of_regime):,})"))
    return handles


_PANELS: dict[str, Callable[[Axes, pd.DataFrame], list[Line2D]]] = {
    "relative": _throughput,
    "sm_clock_mhz": _clock,
    "temperature_c": _temperature,
    "all_reduce_bytes_per_s": _bandwidth,
}


def _trend_note(rows: pd.DataFrame) -> str:
    known = rows[rows["relative"].notna()]
    if known.empty:
        return "No run can be compared with a repeat or a prediction"
    short, drift = too_short(rows), trend(rows)
    if short is not None:
        return short
    if drift is None:
        return f"{len(known):,} comparable runs, all equal"
    correlation, chance = drift
    text = f"{len(known):,} comparable runs: rank correlation with time {correlation:+.2f}".replace("-", "−")
    text += " (p < 0.001 without drift)" if chance < 0.0005 else f" (p = {chance:.3f} without drift)"
    if (known["compared_with"] == "prediction").any() and (mixed := _versions(rows)):
        text += f"\nPredictions are of {mixed}: a change of the planner between them also shows as a trend"
    return text


def _versions(rows: pd.DataFrame) -> str:
    """Number of commits, otherwise of sweeps, among the compared runs, in words; empty for one."""
    known = rows[rows["relative"].notna()]
    for column, name in (("git_commit", "commits"), ("sweep", "sweeps")):
        if (count := known[column].nunique()) > 1:
            return f"{count} {name}"
    return ""


def _sweeps(ax: Axes, rows: pd.DataFrame) -> None:
    change = rows["sweep"].ne(rows["sweep"].shift()) & (rows["order"] > 1)
    style.add_lines_across(ax, "x", rows.loc[change, "order"] - 0.5, color="#888888", linestyle=":", linewidth=0.9)


def _marks(ax: Axes, x: pd.Series, y: pd.Series, colour: str, marker: str) -> None:
    ax.plot(x, y, linestyle="", marker=marker, markersize=3.5, color=colour, alpha=0.8)


def _handle(colour: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, markersize=5, color=colour, label=label)


FIGURE = FigureSpec(
    name="drift",
    section="trust",
    title="Throughput against expectation, clocks and network in the order of the runs",
    caption=(
        "A repeated run is compared with the median of its experiment; any other with its prediction, scaled by the "
        "median "
        "over three or more runs of the same model and degrees, so that a layout does not look like drift. Predictions "
        "of several commits or sweeps may differ because the planner changed; then a trend does not show that nodes "
        "did. Clocks and temperature are over the timed steps, bandwidth is from before training."
    ),
    draw=draw,
    data=data,
)
