"""Breakdown of a profiled step's time by kind of kernel: the columns ``breakdown_*`` of runs with
``measure.profile=true``."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures import shares
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import format_percent, plural

_KINDS = {
    "breakdown_matmul_s": "matmul",
    "breakdown_attention_s": "attention",
    "breakdown_memory_bound_s": "memory-bound kernels",
    "breakdown_optimizer_s": "optimizer",
    "breakdown_bubble_s": "bubble",
    "breakdown_launch_gaps_s": "launch gaps",
}
HIDDEN = "hidden communication"
_EXPOSED = "exposed {axis}"


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Shares of the profiled step of every ranked run that has them, fastest first in each group.

    The columns of the kinds and of each axis's exposed communication sum to 1. ``hidden communication`` is separate:
    the communication that overlapped with other kernels, over the step time.
    """
    beside = [*metrics.GROUP, "layout", "rank", "breakdown_step_time_s", metrics.RANK_BY, "attempt_id"]
    names = [*_KINDS.values(), HIDDEN]
    if "breakdown_step_time_s" not in frame:
        return pd.DataFrame(columns=[*beside, *names])
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna() & rows[["breakdown_step_time_s", *_KINDS]].notna().all(axis=1)]
    if rows.empty:
        return pd.DataFrame(columns=[*beside, *names])
    rows = labels.in_group_order(rows).reset_index(drop=True)
    hidden = (rows["breakdown_comm_hidden_s"] / rows["breakdown_step_time_s"]).rename(HIDDEN)
    shares = kinds(rows)
    shares.insert(len(_KINDS), HIDDEN, hidden)
    return rows[beside].join(shares)


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of each kind of kernel and of each axis's exposed communication in a profiled step; they sum to 1."""
    step = rows["breakdown_step_time_s"]
    shares = pd.DataFrame({name: rows[column] / step for column, name in _KINDS.items()}, index=rows.index)
    by_axis = [_exposed_by_axis(entries) for entries in rows["breakdown_comm_by_axis"]]
    axes = dict.fromkeys(axis for exposed in by_axis for axis in exposed)
    for axis in axes:
        seconds = pd.Series([exposed.get(axis, 0.0) for exposed in by_axis], index=rows.index)
        shares[_EXPOSED.format(axis=axis)] = seconds / step
    return shares


def _exposed_by_axis(entries: Any) -> dict[str, float]:
    """Seconds of exposed communication by axis, without zeros. Waiting for another stage is not included: it is the
    bubble."""
    known = [] if entries is None else entries
    return {entry["axis"] or "communication": entry["exposed_s"] for entry in known if entry["exposed_s"]}


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    rows = data(frame)
    if rows.empty:
        raise style.NothingToDraw("no finished run was profiled; measure.profile=true records one step per run")
    return shares.draw_shares(frame, rows, style.STEP_KINDS)


def conclude(frame: pd.DataFrame) -> str | None:
    """Sentence with the share of matmuls and attention, and the largest other share, in the fastest profiled
    layouts."""
    rows = data(frame)
    rows = rows.drop_duplicates(metrics.GROUP) if len(rows) else rows
    if rows.empty:
        return None
    shares = rows[[name for name in style.STEP_KINDS if name in rows]].median()
    useful = shares[["matmul", "attention"]].sum()
    rest = shares.drop(["matmul", "attention"])
    return (
        f"In the fastest profiled layouts (n = {plural(len(rows), 'model and size', 'models and sizes')}) matmuls and "
        f"attention take {format_percent(useful, 0)} of the step, then {rest.idxmax()} "
        f"{format_percent(rest.max(), 0)} (medians)."
    )


FIGURE = FigureSpec(
    name="breakdown_by_kind",
    section="why",
    title="What the kernels of a step do",
    caption=(
        "The fastest profiled layouts of each model and size. One step after the timed ones, recorded on one rank of "
        "each pipeline stage, mean over the stages. Each moment counts once: as compute if any runs, as exposed "
        "communication if only that runs, as a launch gap if nothing runs. Communication hidden by compute takes "
        "no time here, although it slows concurrent kernels; the table has it."
    ),
    draw=draw,
    data=data,
    conclude=conclude,
)
