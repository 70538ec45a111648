"""Scaling efficiency of each model: throughput per device relative to the most efficient size, and the loss by part.

Strong scaling keeps the tokens of a step, weak scaling those of a rank. Device time per token is 1 / (tokens/s/GPU); it
is the sum of the step's parts per token: by kind of kernel if as many runs of the model have a profiled step
(`analysis.figures.breakdown_by_kind`), otherwise as in `analysis.rows.step_parts`. With t0 of the most efficient size
and t of another one the efficiency is t0 / t, and the loss 1 - t0 / t = sum over parts of (part - part0) / t. (The
smallest size need not be the most efficient one: a large model may leave it no memory for anything but recomputation.)
A part that takes less than before has a negative share. If either run lacks its parts, the whole loss is not
attributed. All runs of a series have the precision that most runs of its model have.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.drawing import bar_series, style
from analysis.figures import breakdown_by_kind, panels
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics, pairs, step_parts
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MIN_FOR_INTERVAL
from results.statistics import noise
from results.text.numbers import format_percent, plural

LAYOUTS = ("best layout", "pure data parallelism")
KINDS = ("strong", "weak")
UNATTRIBUTED = "not attributed"
FEWEST = MIN_FOR_INTERVAL
"""Smallest number of finished layouts of one batch for which a size has a best layout; pure data parallelism needs only
one."""
_BESIDE = ("layout", "tokens_per_step", metrics.RANK_BY, "efficiency", "lost", "tie", "candidates", "network_regime")

_NEEDED = (
    *(*metrics.GROUP, "layout", "attempt_id", metrics.RANK_BY, "tokens_per_step", "tp", "cp", "pp", "ep"),
    *("step_time_s", "network_regime", "num_params", "seq_len", *noise.COLUMNS),
)


_MOST_COLUMNS = 4
_SEEN = 1e-4
"""Smallest share of the time, at any size, for which a part is in the legend."""
_LINES = {
    ("pure data parallelism", "strong"): ("#D55E00", "s", "-", 7.0),
    ("pure data parallelism", "weak"): ("#D55E00", "s", ":", 7.0),
    ("best layout", "strong"): ("#0072B2", "o", "-", 4.5),
    ("best layout", "weak"): ("#0072B2", "o", ":", 4.5),
}
"""Look of each line. Pure data parallelism is often the best layout, so its marks are larger and drawn below."""
_BY_PREFERENCE = [(layouts, kind) for layouts in LAYOUTS for kind in KINDS]
_PARTS = {**style.STEP_PARTS, **style.STEP_KINDS, UNATTRIBUTED: ("white", "--")}


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each workload, ``kind`` of scaling, ``layouts`` and number of devices, if there are at least two
    sizes.

    ``lost`` is 1 - ``efficiency``; the columns ``lost to <part>``, including ``lost to not attributed``, sum to it.
    ``tie``: another layout is within the noise of the chosen one; null if the noise is unknown. Parts into which the
    model's steps are not split are null.
    """
    rows = pairs.of_usual_precision(pairs.comparable(frame))
    rows = rows[rows.groupby("workload")["world_size"].transform("nunique") > 1]  # others cannot have two sizes
    timed = [
        *step_parts.MEASURED,
        *step_parts.REHEARSED,
        *(str(name) for name in rows if str(name).startswith("breakdown_")),
    ]
    read = list(dict.fromkeys([*_NEEDED, *timed]))  # each workload's rows are copied: all columns would take seconds
    split: dict[Hashable, tuple[pd.DataFrame, list[str]]] = {
        workload: _with_parts(of_workload) for workload, of_workload in rows[read].groupby("workload", sort=False)
    }
    names_of = {workload: names for workload, (_, names) in split.items()}
    series_tables = _tables(names_of, [rows for rows, _ in split.values()]) if split else []
    in_series = {workload for table in series_tables for workload in table["workload"].unique()}
    every = dict.fromkeys(name for workload, names in names_of.items() if workload in in_series for name in names)
    lost = [f"lost to {name}" for name in (*every, UNATTRIBUTED)]
    columns = ["workload", "kind", "layouts", "world_size", *_BESIDE, *lost, *every, "attempt_id"]
    if not series_tables:
        return pd.DataFrame(columns=columns)
    return (
        labels.in_group_order(pd.concat(series_tables, ignore_index=True))
        .reindex(columns=columns)
        .reset_index(drop=True)
    )


def _tables(names: dict[Hashable, list[str]], rows_of: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """A table for each kind of scaling and choice of layouts, of the workloads that have at least two sizes of it.
    ``names``: the parts of a step, by workload. The leaders of all workloads are found together, and the losses of
    those whose steps have the same parts, since each search has a fixed cost."""
    rows = pd.concat(rows_of)
    pure = rows[rows[["tp", "cp", "pp", "ep"]].fillna(1).eq(1).all(axis=1)]
    splits = {workload: tuple(parts) for workload, parts in names.items()}
    tables = []
    for layouts, candidates, fewest in zip(LAYOUTS, (rows, pure), (FEWEST, 1), strict=True):
        for kind in KINDS:
            series = _series(candidates, kind, fewest)
            for parts, of_parts in series.groupby(series["workload"].map(splits), sort=False):
                attributed = _attributed(of_parts, [*cast("tuple[str, ...]", parts)])
                tables.append(attributed.assign(kind=kind, layouts=layouts))
    return tables


def _with_parts(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The needed columns with the share of each part of a step, and the parts' names; the split that more of the rows
    have."""
    parts = step_parts.parts_of(rows)
    kept = rows[[*_NEEDED, *parts]]
    profiled = rows[rows["breakdown_step_time_s"].notna()] if "breakdown_step_time_s" in rows else rows.head(0)
    timed = int(rows[list(parts)].notna().all(axis=1).sum()) if parts else 0
    if len(profiled) and len(profiled) >= timed:
        kinds = breakdown_by_kind.kinds(profiled)
        return rows[list(_NEEDED)].join(kinds), [str(name) for name in kinds]
    return (kept.assign(**step_parts.shares(kept, parts)) if parts else kept), step_parts.names_of(rows)


def _series(rows: pd.DataFrame, kind: str, fewest: int) -> pd.DataFrame:
    """The fastest run of each size that has at least ``fewest`` runs, at the batch with the most sizes in each
    workload."""
    batch = rows["tokens_per_step"] if kind == "strong" else rows["tokens_per_step"] / rows["world_size"]
    rows = rows.assign(_batch=batch)
    rows = rows[rows.groupby(["workload", "world_size", "_batch"])["attempt_id"].transform("size") >= fewest]
    sizes = rows.groupby(["workload", "_batch"])["world_size"].agg(["nunique", "size"]).reset_index()
    sizes = sizes.sort_values(["nunique", "size"], ascending=False, kind="stable").drop_duplicates("workload")
    sizes = sizes[sizes["nunique"] > 1]
    rows = rows.merge(sizes[["workload", "_batch"]], on=["workload", "_batch"])
    return metrics.lead(rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable"), metrics.RANK_BY)


def _attributed(series: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    series = series.sort_values(["workload", "world_size"], kind="stable").reset_index(drop=True)
    best = series.sort_values(metrics.RANK_BY, ascending=False, kind="stable").drop_duplicates("workload")
    best = best.set_index("workload")[[metrics.RANK_BY, *names]].reindex(series["workload"]).set_axis(series.index)
    efficiency = series[metrics.RANK_BY] / best[metrics.RANK_BY]
    # Growth of a part's time per token over t: its share of the step, minus its share in the best size times t0 / t.
    lost = {f"lost to {name}": series[name] - best[name] * efficiency for name in names}
    attributed = pd.Series(0.0, index=series.index)
    for share in lost.values():
        attributed = attributed + share
    whole = 1 - efficiency
    lost[f"lost to {UNATTRIBUTED}"] = (whole.where(attributed.isna(), 0.0)) if names else whole
    return series.assign(efficiency=efficiency, lost=whole, **lost)


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Top: efficiency against the most efficient size. Bottom, if a run has timed parts: the time per token by part."""
    rows = data(frame)
    if rows.empty:
        raise style.NothingToDraw("no model has finished runs of comparable batches on two numbers of devices")
    most = rows.groupby("workload", sort=False)["world_size"].nunique().sort_values(ascending=False, kind="stable")
    kept = set(most.index[:_MOST_COLUMNS])
    workloads = [str(name) for name in rows["workload"].unique() if name in kept]
    timed = [name for name in _PARTS if f"lost to {name}" in rows]
    parts = [f"lost to {name}" for name in timed if name != UNATTRIBUTED]
    attributed = bool((rows["lost"].ne(0) & rows[parts].notna().any(axis=1)).any())
    lines = 2 if attributed else 1
    figure = style.new_figure(max(2.7 * len(workloads), 6.4), 2.9 * lines + 1.0)
    axes = figure.subplots(lines, len(workloads), squeeze=False)
    noun = labels.device_noun(frame)
    for place, workload in enumerate(workloads):
        of_workload = rows[rows["workload"] == workload]
        _efficiency(axes[0][place], of_workload)
        panels.set_title(axes[0][place], workload)
        if attributed:
            _times(axes[1][place], of_workload, timed)
        axes[-1][place].set_xlabel(f"Number of {noun}")
    axes[0][0].set_ylabel("Efficiency, % of the best size")
    if attributed:
        axes[1][0].set_ylabel(f"{'GPU' if noun == 'GPUs' else 'Process'} time per token, µs")
    style.bottom_legend(figure, _handles(rows, timed if attributed else []), _note(rows, attributed, len(most)))
    return figure


def _efficiency(ax: Axes, rows: pd.DataFrame) -> None:
    sizes = labels.world_sizes(rows)
    for (layouts, kind), (colour, marker, dashes, size) in _LINES.items():
        line = rows[(rows["layouts"] == layouts) & (rows["kind"] == kind)].sort_values("world_size")
        places = [sizes.index(size) for size in line["world_size"]]
        values = (100 * line["efficiency"]).tolist()
        ax.plot(places, values, color=colour, linestyle=dashes, linewidth=1.4)
        for slow in (False, True):
            at = [place for place, regime in enumerate(line["network_regime"]) if (regime == "slow") == slow]
            face = "white" if slow else colour
            ax.plot(
                [places[i] for i in at],
                [values[i] for i in at],
                linestyle="",
                marker=marker,
                markersize=size,
                color=colour,
                markerfacecolor=face,
            )
    ax.axhline(100, color="#444444", linewidth=0.8)
    _sizes(ax, sizes)
    ax.set_ylim(0, 110)
    ax.grid(axis="y")


def _times(ax: Axes, rows: pd.DataFrame, parts: list[str]) -> None:
    """One stacked bar per size of the series with the most sizes: device time per token by part, the efficiency
    above."""
    series = [rows[(rows["layouts"] == layouts) & (rows["kind"] == kind)] for layouts, kind in _BY_PREFERENCE]
    line = max(series, key=len).sort_values("world_size")
    sizes = labels.world_sizes(rows)
    places = [sizes.index(size) for size in line["world_size"]]
    whole = 1e6 / line[metrics.RANK_BY]
    bottom = pd.Series(0.0, index=line.index)
    # A model's steps are split by kernel or by phase; the line has no values of the other split.
    present = [part for part in parts if part != UNATTRIBUTED and line[part].notna().any()]
    untimed = line[present].isna().any(axis=1) if present else pd.Series(True, index=line.index)
    for name in [*present, *(part for part in parts if part == UNATTRIBUTED)]:
        height = whole.where(untimed, 0.0) if name == UNATTRIBUTED else (line[name] * whole).fillna(0.0)
        colour, hatch = _PARTS[name]
        edge = "#888888" if colour == "white" else "white"
        height = height.clip(lower=0)
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.5}
        bar_series.upright(ax, places, height, bottom, 0.6, **look)
        bottom = bottom + height
    for place, top, share in zip(places, bottom, line["efficiency"], strict=True):
        ax.text(place, 1.02 * top, f"{100 * share:.0f} %", ha="center", va="bottom", fontsize=7.5)
    panels.set_title(ax, f"{line['layouts'].iloc[0]}, {line['kind'].iloc[0]}", size=8.5, weight="normal")
    _sizes(ax, sizes)
    ax.set_ylim(0, 1.15 * float(bottom.max()))
    ax.grid(axis="y")


def _sizes(ax: Axes, sizes: list[int]) -> None:
    ax.set_xticks(range(len(sizes)), [f"{size}" for size in sizes])
    ax.set_xlim(-0.5, len(sizes) - 0.5)


def _note(rows: pd.DataFrame, attributed: bool, workloads: int) -> str | None:
    parts = []
    if not attributed:
        parts.append("the loss is not attributed: no run has timed the parts of its step")
    if workloads > _MOST_COLUMNS:
        parts.append(f"{_MOST_COLUMNS} of {workloads} models, those with most sizes")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] if text else None


def _handles(rows: pd.DataFrame, parts: list[str]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    for (layouts, kind), (colour, marker, dashes, size) in _LINES.items():
        if ((rows["layouts"] == layouts) & (rows["kind"] == kind)).any():
            label = f"{layouts}, {kind} scaling"
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle=dashes, markersize=size, label=label))
    if (rows["network_regime"] == "slow").any():
        label = "hollow: slow network regime"
        handles.append(
            Line2D(
                [], [], linestyle="", marker="o", color="#444444", markerfacecolor="white", markersize=5, label=label
            )
        )
    for name in parts:
        colour, hatch = _PARTS[name]
        seen = rows[name].max() if name in rows else rows[f"lost to {name}"].abs().max()
        if seen > _SEEN:
            edge = "#888888" if colour == "white" else "white"
            handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=edge, label=name))
    return handles


def conclude(frame: pd.DataFrame) -> str | None:
    """Sentence on strong scaling: the efficiency at the largest size of the model with the most sizes."""
    rows = data(frame)
    rows = rows[rows["kind"] == "strong"] if len(rows) else rows
    best = rows[rows["layouts"] == LAYOUTS[0]]
    rows = best if len(best) else rows
    if rows.empty:
        return None
    name = rows.groupby("workload", sort=False)["world_size"].nunique().idxmax()
    of_model = rows[rows["workload"] == name].sort_values("world_size")
    first, last = (of_model.sort_values(by).iloc[-1] for by in ("efficiency", "world_size"))
    if first["world_size"] == last["world_size"]:
        return None
    noun = labels.device_noun(frame)
    return (
        f"{name}, {last['layouts']}: {labels.devices(last['world_size'], noun)} have "
        f"{format_percent(last['efficiency'], 0)} of the throughput per device of {int(first['world_size'])} at the "
        f"same batch (n = {plural(len(of_model), 'size')})."
    )


FIGURE = FigureSpec(
    name="efficiency",
    section="scaling",
    title="Scaling efficiency and its loss",
    caption=(
        "Throughput per device relative to the most efficient size, of those with five finished layouts of the same "
        "batch and precision (pure data parallelism: with one). Strong scaling keeps the tokens of a step, weak "
        "scaling those of a device. Below, if the parts of steps were timed, one bar per size: device time per token "
        "by part, the efficiency above it; by kind of kernel if as many runs of the model have a profiled step. In the "
        "table each part's share of the loss is its growth, negative if it shrank."
    ),
    draw=draw,
    data=data,
    conclude=conclude,
)
