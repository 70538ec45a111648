"""Breakdown of a step's time: shares of the fastest layouts' steps, and time per token along tp, pp and dp.

The parts of a step are those of `analysis.rows.step_parts`.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing import bar_series, style
from analysis.figures import breakdown_by_kind, panels, shares
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics, pairs, step_parts
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import format_number, format_percent, listed, plural

AXES = ("tp", "pp", "dp")
_FREE = {
    "tp": ("dp", "tp", "num_microbatches", "sequence_parallel", "zero_stage"),
    "pp": ("dp", "pp", "num_microbatches", "pp_schedule", "virtual_stages", "zero_stage"),
    "dp": ("dp", "world_size", "tokens_per_step", "zero_stage"),
}
"""Columns that may differ along an axis. tp and pp take ranks from dp on the same devices; along dp the work of a rank
stays the same. The ZeRO stage may differ only from a single data-parallel rank, which has nothing to shard."""


_SHARE = "share of "
_UNTIMED = "no finished run has timed the parts of its step"


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows with all parts of their step, fastest first in each group.

    Columns: the `step_parts.shares`, `analysis.rows.pairs.SETTINGS`, and those that tables and names need.
    """
    parts = step_parts.parts_of(frame)
    rows = pairs.comparable(frame)
    if not parts:
        return rows.head(0)
    beside = ["step_time_s", "layout", "rank", "num_params", "seq_len", metrics.RANK_BY, "attempt_id"]
    rows = rows.loc[rows[[*parts, "step_time_s"]].notna().all(axis=1), [*pairs.SETTINGS, *beside, *parts]]
    return rows.assign(**step_parts.shares(rows, parts))


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Shares of the step of every ranked run that has them, fastest first in each group."""
    rows = timed(frame)
    kept = [*metrics.GROUP, "layout", "rank", "step_time_s", *step_parts.names_of(frame), metrics.RANK_BY, "attempt_id"]
    return labels.in_group_order(rows)[kept].reset_index(drop=True) if len(rows) else rows[kept]


@cache_per_frame
def data_along_axes(frame: pd.DataFrame) -> pd.DataFrame:
    """The longest family of each axis: runs that differ only in its degree and in the columns of `_FREE`.

    ``axis``, ``degree``, and for each part ``<name>`` in device-microseconds per token: time of the part × devices /
    tokens, so that families with fixed and growing batches are comparable and the parts sum to 1e6 / (tokens/s/GPU). Of
    equally long families the one with the fastest run is taken. Parts are kinds of kernels if runs with a profiled step
    have families of as many axes.
    """
    names, series = step_parts.names_of(frame), _families(timed(frame))
    profiled, kinds = _profiled(frame)
    if len(by_kind := _families(profiled)) >= max(len(series), 1):
        names, series = kinds, by_kind
    columns = ["axis", "degree", *metrics.GROUP, "layout", *names, metrics.RANK_BY, "attempt_id"]
    if not series:
        return pd.DataFrame(columns=columns)
    families = pd.concat(series, ignore_index=True)
    if _SHARE + names[0] in families:  # "attention" is also a setting of a run
        families = families.drop(columns=names, errors="ignore").rename(columns=lambda name: name.removeprefix(_SHARE))
    per_token = 1e6 / families[metrics.RANK_BY]
    return families.assign(**{name: families[name] * per_token for name in names})[columns]


def _profiled(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Ranked rows with a profiled step and the share of each kind of kernel, and the names of the kinds."""
    rows = pairs.comparable(frame)
    if "breakdown_step_time_s" not in rows or rows["breakdown_step_time_s"].isna().all():
        return rows.head(0), []
    rows = rows[rows["breakdown_step_time_s"].notna()]
    shares = breakdown_by_kind.kinds(rows)
    beside = ["layout", "num_params", "seq_len", metrics.RANK_BY, "attempt_id"]
    return rows[[*pairs.SETTINGS, *beside]].join(shares.add_prefix(_SHARE)), [str(name) for name in shares]


def _families(rows: pd.DataFrame) -> list[pd.DataFrame]:
    matching = pairs.Matching(rows)
    return [family for axis in AXES if len(family := _family(rows, matching, axis)) > 1]


def _family(rows: pd.DataFrame, matching: pairs.Matching, axis: str) -> pd.DataFrame:
    if rows.empty or rows[axis].nunique() < 2:
        return rows.head(0)
    codes = matching.codes(_FREE[axis])
    members = rows.assign(axis=axis, degree=rows[axis].astype(int), _code=codes)
    if axis != "dp":  # one stage has no schedule; several must have 1F1B
        members = members[(members["pp"] == 1) | (members["pp_schedule"] == "1f1b")]
    members = members.sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    families = []
    for stage in sorted(rows["zero_stage"].dropna().unique()):
        of_stage = members[(members["dp"] == 1) | (members["zero_stage"] == stage)]
        of_stage = of_stage.drop_duplicates(["_code", "degree"])
        sizes = of_stage.groupby("_code")[metrics.RANK_BY].agg(["size", "max"])
        if len(sizes):
            longest = sizes.sort_values(["size", "max"]).iloc[-1]
            family = of_stage[of_stage["_code"] == longest.name]
            families.append((int(longest["size"]), float(longest["max"]), family.sort_values("degree")))
    return max(families, key=lambda found: found[:2])[2] if families else rows.head(0)


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Stacked bars in per cent of the step for the fastest layouts of each group, with their throughput."""
    rows = data(frame)
    if rows.empty:
        raise style.NothingToDraw(_UNTIMED)
    profiled = frame.loc[frame["breakdown_step_time_s"].notna(), "attempt_id"]
    if rows["attempt_id"].isin(set(profiled)).all():
        raise style.NothingToDraw("no run lacks a profiled step: breakdown_by_kind divides these further")
    return shares.draw_shares(frame, rows, style.STEP_PARTS)


@style.styled
def draw_along_axes(frame: pd.DataFrame) -> Figure:
    """One panel per axis: device time per token of the longest family of runs that differ only in that degree."""
    rows = data_along_axes(frame)
    if rows.empty:
        if not step_parts.parts_of(frame):
            raise style.NothingToDraw(_UNTIMED)
        raise style.NothingToDraw("no two runs with timed parts of their steps differ only in tp, pp or dp")
    noun = labels.device_noun(frame)
    families = [(str(axis), family.reset_index(drop=True)) for axis, family in rows.groupby("axis", sort=False)]
    titles = [_title(axis, family, noun) for axis, family in families]
    width = max(3.4, 0.075 * max(len(line) for title in titles for line in title.split("\n")) + 0.5)
    figure, axes = panels.grid(len(families), len(families), (width, 3.6))
    for ax, (axis, family), title in zip(axes, families, titles, strict=True):
        _stacks(ax, family)
        ax.set_title(title, fontsize=8.5)
        ax.set_xlabel(f"{axis} degree")
    axes[0].set_ylabel(f"{'GPU' if noun == 'GPUs' else 'Process'} time per token, µs")
    style.bottom_legend(figure, shares.handles(rows, _looks(rows)), f"Above each bar: {labels.rate_unit(frame)}")
    return figure


def _looks(rows: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Colours and hatches of the parts that these rows have, in the order of the stack."""
    return style.STEP_KINDS if "matmul" in rows else style.STEP_PARTS


def _stacks(ax: Axes, family: pd.DataFrame) -> None:
    bottom = pd.Series(0.0, index=family.index)
    for name, (colour, hatch) in _looks(family).items():
        if name in family:
            height = family[name].clip(lower=0)
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            bar_series.upright(ax, family.index, height, bottom, 0.66, **look)
            bottom = bottom + height
    for place, rate in enumerate(family[metrics.RANK_BY]):
        ax.text(place, 1.015 * bottom[place], format_number(rate), ha="center", va="bottom", fontsize=8)
    ax.set_xticks(family.index, [f"{degree}" for degree in family["degree"]])
    ax.set(ylim=(0, 1.12 * float(bottom.max())), xlim=(-0.6, len(family) - 0.4))
    ax.grid(axis="y")


def _title(axis: str, family: pd.DataFrame, noun: str) -> str:
    """The workload and devices, and the first and last layout."""
    sizes = labels.world_sizes(family)
    place = family["workload"].iloc[0] + (f", {labels.devices(sizes[0], noun)}" if len(sizes) == 1 else "")
    return f"{place}\n{family['layout'].iloc[0]}\nto {family['layout'].iloc[-1]}"


def conclude(frame: pd.DataFrame) -> str | None:
    """Sentence with the two largest parts of the fastest layouts' steps."""
    rows = data(frame)
    rows = rows.drop_duplicates(metrics.GROUP) if len(rows) else rows
    if rows.empty:
        return None
    parts = rows[step_parts.names_of(frame)].median().sort_values(ascending=False)
    largest = listed([f"{name} {format_percent(value, 0)}" for name, value in parts.head(2).items()])
    groups = plural(len(rows), "model and size", "models and sizes")
    return f"Of a step of the fastest layouts (n = {groups}): {largest} (medians)."


def conclude_along_axes(frame: pd.DataFrame) -> str | None:
    """Sentence on how much the last degree of each axis adds to the time per token, and the part that grows most."""
    rows = data_along_axes(frame)
    clauses = []
    names = [name for name in _looks(rows) if name in rows]
    for axis, family in rows.groupby("axis", sort=False) if len(rows) else ():
        first, last = family.iloc[0], family.iloc[-1]
        more = first[metrics.RANK_BY] / last[metrics.RANK_BY] - 1
        grown = (last[names].astype(float) - first[names].astype(float)).fillna(0.0)
        by = f", most of it {grown.idxmax()}" if more > 0 and grown.max() > 0 else ""
        takes = f"{format_percent(abs(more), 0)} {'more' if more > 0 else 'less'} time per token"
        clauses.append(
            f"{axis} {int(first['degree'])} → {int(last['degree'])} takes {takes}{by} (n = {len(family)} runs)"
        )
    return "; ".join(clauses) + "." if clauses else None


FIGURES = (
    FigureSpec(
        name="breakdown",
        section="why",
        title="Where a step's time goes",
        caption=(
            "The fastest layouts of each model and size. Forward and backward include the collectives inside them "
            "(of tensor parallelism, ZeRO 3's gathers); the exposed reduction is the part of gradient reduction "
            "after the last backward. Parts are means over ranks, the step is the slowest rank's: the rest is the "
            "difference. If parts overlap, or medians of parts come from different steps, they sum to more than the "
            "step: the rest is then below 0 and not drawn, and the bar ends beyond 100 %."
        ),
        draw=draw,
        data=data,
        conclude=conclude,
    ),
    FigureSpec(
        name="breakdown_by_axis",
        section="why",
        title="What a degree costs",
        caption=(
            "For each axis the longest series of runs that differ only in its degree: tp and pp take ranks from data "
            "parallelism on the same devices at the same batch, dp adds devices with the same work each. Parts by kind "
            "of kernel if the runs have a profiled step."
        ),
        draw=draw_along_axes,
        data=data_along_axes,
        conclude=conclude_along_axes,
    ),
)
