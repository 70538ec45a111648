"""What became of the points, by model and size, and in which phase the failures happened."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.figures import style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import last_attempts
from results.schema import OUTCOMES, PHASES, UNKNOWN_OUTCOME


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Points by model, sequence length, number of devices and outcome."""
    final = last_attempts(frame)
    keys = ["model", "seq_len", "world_size", "outcome"]
    return final.groupby(keys, dropna=False).size().rename("points").reset_index()


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Left: points by outcome for each group. Right: the failed ones by the phase they were in."""
    frame, note = labels.under_study_labels(frame)
    counts = metrics.group_counts(frame)
    if counts.empty:
        raise style.NothingToDraw("there is no attempt")
    order = {workload: i for i, workload in enumerate(labels.workload_order(frame))}
    counts = counts.loc[sorted(counts.index, key=lambda key: (order[key[0]], key[1]))]
    kinds = [kind for kind in (*OUTCOMES, UNKNOWN_OUTCOME) if kind in counts.columns]
    failed = last_attempts(frame)
    failed = failed[failed["outcome"] != "ok"]
    if failed["phase"].isna().all():
        failed = failed.head(0)  # a panel that says "unknown" of every failure would say nothing
    by_phase = (
        failed.assign(phase=failed["phase"].fillna("unknown"))
        .groupby(["phase", "outcome"])
        .size()
        .unstack(fill_value=0)
    )
    by_phase = by_phase.reindex([phase for phase in (*PHASES, "unknown") if phase in by_phase.index])

    bars = max(len(counts), len(by_phase), 2)
    figure = style.new_figure(11.5 if len(by_phase) else 7.0, 0.3 * bars + 1.6)
    axes = figure.subplots(1, 2 if len(by_phase) else 1, squeeze=False, width_ratios=[3, 2] if len(by_phase) else None)[
        0
    ]
    noun = labels.device_noun(frame)
    _bars(axes[0], counts[kinds], [labels.group_name(workload, size, noun) for workload, size in counts.index])
    axes[0].set(title="Points by outcome", xlabel="Number of points")
    if len(by_phase):
        _bars(axes[1], by_phase[[kind for kind in kinds if kind in by_phase]], list(by_phase.index))
        axes[1].set(title="Failures by phase", xlabel="Number of points")
    handles = [
        Patch(
            facecolor=style.OUTCOME_COLOURS[kind],
            hatch=style.OUTCOME_HATCHES.get(kind),
            edgecolor="white",
            label=labels.OUTCOME_NAMES[kind],
        )
        for kind in kinds
    ]
    style.bottom_legend(figure, handles, note)
    return figure


def _bars(ax: Axes, counts: pd.DataFrame, names: list[str]) -> None:
    places = range(len(counts))
    left = pd.Series(0, index=counts.index)
    for kind in counts.columns:
        ax.barh(
            places,
            counts[kind],
            left=left,
            color=style.OUTCOME_COLOURS[kind],
            hatch=style.OUTCOME_HATCHES.get(kind),
            edgecolor="white",
            linewidth=0.5,
            height=0.75,
        )
        left = left + counts[kind]
    for place, total in zip(places, left, strict=True):
        ax.text(total, place, f" {int(total):,}", va="center", fontsize=8)
    ax.set_yticks(places, names)
    ax.set(ylim=(len(counts) - 0.4, -0.6), xlim=(0, 1.1 * max(float(left.max()), 1)))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x")


FIGURE = FigureSpec(
    name="outcomes",
    section="failed",
    title="Outcomes",
    caption="What became of the points; a retried point counts by its last attempt.",
    draw=draw,
    data=data,
)
