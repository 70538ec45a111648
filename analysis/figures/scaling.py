"""Throughput over one degree of parallelism: data, tensor, pipeline. One panel per model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from analysis.drawing import style
from analysis.figures import conclusions, panels
from analysis.figures.spec import FigureSpec
from analysis.rows import by_degree, labels, metrics
from analysis.rows.by_degree import PLACE

_MAX_PANELS = 6
_COLUMNS = 3
_BAR = "#56B4E9"
_LINE = "#D55E00"
_LOSS = "#7a2f00"
_SERIES_STYLES = {
    by_degree.PP_SERIES[0]: ("#D55E00", "s", ":"),
    by_degree.PP_SERIES[1]: ("#CC79A7", "^", "--"),
    by_degree.PP_SERIES[2]: ("#0072B2", "o", "-"),
}


@style.styled
def draw_data_parallel(frame: pd.DataFrame) -> Figure:
    """Pure data parallelism: throughput by degree with the loss of each doubling, and the memory of the same runs."""
    rows = _with_several(
        by_degree.data_parallel(frame),
        "no model has runs of pure data parallelism at two degrees with the same tokens per step",
    )
    kind = rows["memory_kind"].iloc[0]
    line = ("memory_gib", f"{kind[0].upper()}{kind[1:]}, GiB", kind)
    return _bars(rows, "Data-parallel degree", labels.rate_unit(frame), line)


@style.styled
def draw_tensor_parallel(frame: pd.DataFrame) -> Figure:
    """Tensor parallelism without a pipeline: throughput by degree, and the largest micro-batch that was run."""
    if "rehearsed" in set(frame["method"].unique()):
        raise style.NothingToDraw(
            "rehearsed times are not comparable across tp: the steps come out too short where tp is above 1"
        )
    rows = _with_several(
        by_degree.tensor_parallel(frame),
        "no model has runs at two tensor-parallel degrees without pp and with the same tokens per step",
    )
    line = ("largest_micro_batch", "Micro-batch, sequences", "largest micro-batch that finished (larger ones may fit)")
    return _bars(rows, "Tensor-parallel degree", labels.rate_unit(frame), line)


@style.styled
def draw_pipeline_parallel(frame: pd.DataFrame) -> Figure:
    """Pipelines without tensor parallelism: throughput by depth, with few micro-batches and with 32. One panel per
    model, all on one number of devices in one network regime."""
    rows, place = _one_place(by_degree.pipeline_parallel(frame), labels.device_noun(frame))
    figure, panels = _panels(rows)
    for ax, (_, group) in panels:
        depths = sorted(group["degree"].unique())
        top = float(group[metrics.RANK_BY].max())
        for series, (colour, marker, dashes) in _SERIES_STYLES.items():
            line = group[group["series"] == series]
            places = [depths.index(degree) for degree in line["degree"]]
            ax.plot(places, line[metrics.RANK_BY], color=colour, marker=marker, linestyle=dashes, markersize=5)
            for x, rate, lost in zip(places, line[metrics.RANK_BY], line["lost_share"], strict=True):
                if pd.notna(lost):
                    _lost(ax, x, rate + 0.05 * top, lost)
        ax.set_xticks(range(len(depths)), [f"{int(depth)}" for depth in depths])
        ax.set(ylim=(0, 1.2 * top), xlabel="Pipeline depth p", xlim=(-0.4, len(depths) - 0.6))
        ax.grid(axis="y")
        _thousands(ax)
    _label_left(panels, labels.rate_unit(frame))
    shown = [name for name in by_degree.PP_SERIES if (rows["series"] == name).any()]
    style.bottom_legend(
        figure,
        [
            Line2D([], [], color=colour, marker=marker, linestyle=dashes, label=f"{name} micro-batches")
            for name in shown
            for colour, marker, dashes in [_SERIES_STYLES[name]]
        ],
        f"All on {place}; in per cent: against the depth before",
    )
    return figure


def _bars(rows: pd.DataFrame, xlabel: str, unit: str, line: tuple[str, str, str]) -> Figure:
    """Bars of throughput with the loss against the previous bar above each, and a line on its own axis."""
    column, line_label, legend = line
    figure, panels = _panels(rows)
    for ax, (_, group) in panels:
        group = group.reset_index(drop=True)
        ax.bar(group.index, group[metrics.RANK_BY], color=_BAR, edgecolor="#1b6a94", linewidth=0.6, width=0.72)
        top = float(group[metrics.RANK_BY].max())
        for place, (rate, lost) in enumerate(zip(group[metrics.RANK_BY], group["lost_share"], strict=True)):
            if pd.notna(lost):
                _lost(ax, place, rate + 0.015 * top, lost)
        ax.set_xticks(group.index, _with_counts(group))
        ax.set(xlabel=xlabel, ylim=(0, 1.5 * top), xlim=(-0.6, len(group) - 0.4))
        _thousands(ax)
        ax.set_yticks([tick for tick in ax.get_yticks() if tick <= 1.02 * top])
        beside = ax.twinx()
        beside.plot(group.index, group[column], color=_LINE, marker="D", markersize=4, linewidth=1.3)
        highest = float(np.nanmax(group[column])) if group[column].notna().any() else 1.0
        # The line stays in the upper part, clear of the numbers above the bars.
        beside.set_ylim(-2.6 * highest, 1.12 * highest)
        beside.set_yticks([0, highest / 2, highest], ["0", f"{highest / 2:.3g}", f"{highest:.3g}"])
        beside.tick_params(axis="y", colors=_LINE, labelcolor=_LINE, labelsize=8)
        beside.spines["right"].set_visible(False)
        beside.set_ylabel("")
    _label_left(panels, unit)
    style.bottom_legend(
        figure,
        [
            Patch(
                facecolor=_BAR,
                edgecolor="#1b6a94",
                label=f"{unit}, fastest run of each degree; loss against the bar before",
            ),
            Line2D(
                [],
                [],
                color=_LINE,
                marker="D",
                markersize=4,
                label=f"{legend} (right axis: {line_label.split(', ')[-1]})",
            ),
        ],
    )
    return figure


Panels = list[tuple[Axes, tuple[str, pd.DataFrame]]]


def _panels(rows: pd.DataFrame) -> tuple[Figure, Panels]:
    groups = [(str(name), group) for name, group in rows.groupby("workload", sort=False)][:_MAX_PANELS]
    columns = min(len(groups), _COLUMNS)
    lines = -(-len(groups) // columns)
    figure = style.new_figure(max(3.6 * columns, 5.6), 2.9 * lines + 0.5)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax in axes[len(groups) :]:
        ax.set_visible(False)
    for ax, (name, group) in zip(axes, groups, strict=False):
        series = group["series"].unique()
        panels.set_title(ax, f"{name}, {series[0]}" if len(series) == 1 and "ZeRO" in series[0] else name)
    return figure, list(zip(axes, groups, strict=False))


def _label_left(panels: Panels, unit: str) -> None:
    for place, (ax, _) in enumerate(panels):
        if place % _COLUMNS == 0:
            ax.set_ylabel(unit)


def _one_place(rows: pd.DataFrame, noun: str) -> tuple[pd.DataFrame, str]:
    """Rows of one number of devices and one network regime, and the name of that place.

    The place is the one where most workloads have a series of two depths, then with the most depths, then the most
    runs; only those series are kept. Raises `style.NothingToDraw` if no workload has one.
    """
    rows = rows.assign(network_regime=rows["network_regime"].astype(object).fillna(""))
    rows = rows[rows.groupby([*PLACE, "series"])["degree"].transform("nunique") > 1]
    series = rows.groupby(PLACE).agg(depths=("degree", "nunique"), runs=("candidates", "sum")).reset_index()
    if series.empty:
        raise style.NothingToDraw(
            "no model was run at two pipeline depths on as many devices with m = p − 1, p or 32 and tp = 1"
        )
    places = series.groupby(PLACE[1:]).agg(models=("depths", "size"), depths=("depths", "sum"), runs=("runs", "sum"))
    size, regime = places.sort_values([*places.columns], ascending=False, kind="stable").index[0]
    chosen = rows.merge(series[(series["world_size"] == size) & (series["network_regime"] == regime)][PLACE], on=PLACE)
    return chosen, labels.devices(size, noun) + (f", {regime} network regime" if regime else "")


def _with_several(rows: pd.DataFrame, otherwise: str) -> pd.DataFrame:
    """Rows of workloads that have at least two degrees. Raises `style.NothingToDraw` if there are none."""
    kept = rows[rows.groupby("workload")["degree"].transform("nunique") > 1] if len(rows) else rows
    if kept.empty:
        raise style.NothingToDraw(otherwise)
    return kept


def _with_counts(group: pd.DataFrame) -> list[str]:
    """Tick labels: a degree, and the number of runs of which its bar is the fastest."""
    return [f"{int(row['degree'])}\nn = {int(row['candidates'])}" for row in labels.records(group)]


def _lost(ax: Axes, x: float, y: float, share: float) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    ax.text(x, y, _signed(-share), ha="center", va="bottom", fontsize=7.5, color=_LOSS, bbox=box)


def _signed(share: float) -> str:
    percent = round(100 * share)
    return f"{'+' if percent > 0 else '−' if percent < 0 else '±'}{abs(percent)} %"


def _thousands(ax: Axes) -> None:
    formatter: Callable[[float, int], str] = lambda value, _: f"{value:,.0f}"  # noqa: E731
    ax.yaxis.set_major_formatter(FuncFormatter(formatter))


def _conclude_tensor_parallel(frame: pd.DataFrame) -> str | None:
    """Sentence on tensor parallelism; None for rehearsed rows, whose times are not comparable across tp."""
    if "rehearsed" in set(frame["method"].unique()):
        return None
    return conclusions.of_degrees(by_degree.tensor_parallel(frame), "tp")


def _conclude_pipelines(frame: pd.DataFrame) -> str | None:
    try:
        rows, place = _one_place(by_degree.pipeline_parallel(frame), labels.device_noun(frame))
    except style.NothingToDraw:
        return None
    return conclusions.of_degrees(rows[rows["series"] != by_degree.PP_SERIES[2]], "pp", f" on {place}")


FIGURES = (
    FigureSpec(
        name="dp_scaling",
        section="scaling",
        title="Scaling of data parallelism",
        caption=(
            "Data parallelism alone, at the ZeRO stage with the most degrees: the fastest of the n runs of each degree "
            "and its memory, at the tokens per step that most runs of the model have."
        ),
        draw=draw_data_parallel,
        data=by_degree.data_parallel,
        conclude=lambda frame: conclusions.of_degrees(by_degree.data_parallel(frame), "dp"),
    ),
    FigureSpec(
        name="tp_scaling",
        section="scaling",
        title="Scaling of tensor parallelism",
        caption=(
            "Tensor parallelism without a pipeline, each degree on the fewest devices it was run on: the fastest of "
            "its n runs, and the largest micro-batch of a finished run, at the tokens per step that most runs of the "
            "model have. Larger ones may fit but were not run."
        ),
        draw=draw_tensor_parallel,
        data=by_degree.tensor_parallel,
        conclude=_conclude_tensor_parallel,
    ),
    FigureSpec(
        name="pp_scaling",
        section="scaling",
        title="Scaling of pipelines",
        caption=(
            "Pipelines without tensor parallelism, with few micro-batches (m = p − 1, or m = p where those are powers "
            "of two) and with 32: the fastest run of each depth. All panels are of one number of devices and one "
            "network regime, where most models have a series of two depths; the table has the others."
        ),
        draw=draw_pipeline_parallel,
        data=by_degree.pipeline_parallel,
        conclude=_conclude_pipelines,
    ),
)
