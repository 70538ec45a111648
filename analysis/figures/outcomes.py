"""Outcomes of the points: a grid of models and sizes with the number that finished, ran out of memory, failed."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.drawing import bar_series, style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import decided
from results.tables.schema import UNKNOWN_OUTCOME
from results.text.numbers import format_percent, listed

KINDS = {
    "finished": ("#0072B2", "", "#005A8E"),
    "out of memory": ("#D55E00", "////", "#A84600"),
    "failed otherwise": ("#9AA0A8", "", "#5A616B"),
}
"""Colour and hatch of each part of a bar, and a darker colour for its count."""
_CELL_IN = (1.15, 0.62)
_BAR = 0.26
"""Height of a bar as a share of its cell."""
_WIDTH = 0.84
_MOST_NAMED = 4


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Number of points by model, sequence length, number of devices and outcome."""
    keys = ["model", "seq_len", "world_size", "outcome"]
    return decided(frame, keys).groupby(keys, dropna=False).size().rename("points").reset_index()


@cache_per_frame
def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """Number of points of each model and number of devices by `KINDS`; the index is workload and world_size."""
    counts = metrics.group_counts(frame)
    outcomes_of_kind = {"finished": ["ok"], "out of memory": ["oom"]}
    outcomes_of_kind["failed otherwise"] = [name for name in counts.columns if name not in ("ok", "oom")]
    return pd.DataFrame(
        {kind: counts.reindex(columns=names, fill_value=0).sum(axis=1) for kind, names in outcomes_of_kind.items()}
    )


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Grid with a row per model and a column per number of devices. A bar shows shares of the points of its cell;
    counts are below."""
    frame, note = labels.under_study_labels(frame)
    counts = cells(frame)
    if counts.empty:
        raise style.NothingToDraw("there is no attempt")
    have = set(counts.index.get_level_values(0))
    workloads = [name for name in labels.workload_order(frame) if name in have]
    sizes = sorted({int(size) for size in counts.index.get_level_values(1)})
    figure = style.new_figure(
        max(_CELL_IN[0] * len(sizes) + 0.085 * max(map(len, workloads)) + 0.5, 6.0), _CELL_IN[1] * len(workloads) + 1.3
    )
    ax = figure.subplots()
    places = {(name, size): (x, y) for y, name in enumerate(workloads) for x, size in enumerate(sizes)}
    at = [places[str(name), int(size)] for name, size in counts.index]
    _bars(ax, counts, at)
    for x, y in set(places.values()) - set(at):
        _inside(ax, x, y, "not run", "#666666", style="italic")
    ax.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(len(workloads) - 0.5, -0.5))
    ax.set_xlabel(f"Number of {labels.device_noun(frame)}")
    ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    ax.set_yticks(range(len(workloads)), workloads)
    ax.tick_params(length=0, left=False, bottom=False)
    ax.spines[:].set_visible(False)
    ax.hlines([y - 0.5 for y in range(1, len(workloads))], -0.5, len(sizes) - 0.5, color="#dddddd", linewidth=0.8)
    total = counts.sum()
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=f"{kind}: {int(total[kind]):,}")
        for kind, (colour, hatch, _) in KINDS.items()
        if total[kind]
    ]
    style.bottom_legend(figure, handles, "; ".join(part for part in (_otherwise(frame), note) if part) or None)
    return figure


def _bars(ax: Axes, counts: pd.DataFrame, at: list[tuple[int, int]]) -> None:
    share = counts.div(counts.sum(axis=1), axis=0) * _WIDTH
    left = pd.Series([x - _WIDTH / 2 for x, _ in at], index=counts.index)
    for place, (kind, (colour, hatch, ink)) in enumerate(KINDS.items()):
        if not counts[kind].any():
            continue
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        bar_series.lying(ax, [y - 0.16 for _, y in at], share[kind], left, _BAR, **look)
        left = left + share[kind]
        side = ("left", "center", "right")[place]
        for (x, y), count in zip(at, counts[kind], strict=True):
            if count:
                _inside(ax, x + (place - 1) * _WIDTH / 2, y + 0.2, f"{count:,}", ink, ha=side)


def _inside(ax: Axes, x: float, y: float, text: str, colour: str, ha: str = "center", style: str = "normal") -> None:
    inside = ax.text(x, y, text, ha=ha, va="center", color=colour, fontsize=8.5, style=style)
    inside.set_in_layout(False)


def _otherwise(frame: pd.DataFrame) -> str | None:
    """Note on failures other than out of memory by kind, most frequent first; None if no kind was recorded."""
    final = decided(frame, ["outcome"])
    kinds = final.loc[~final["outcome"].isin(["ok", "oom"]), "outcome"].value_counts()
    if not len(kinds) or list(kinds.index) == [UNKNOWN_OUTCOME]:
        return None
    named = [f"{labels.OUTCOME_NAMES[str(kind)]} {count:,}" for kind, count in kinds.head(_MOST_NAMED).items()]
    more = [f"other {kinds.iloc[_MOST_NAMED:].sum():,}"] if len(kinds) > _MOST_NAMED else []
    return f"Failed otherwise: {listed(named + more)}"


def conclude(frame: pd.DataFrame) -> str | None:
    """Sentence on how many points finished, and on the model with the smallest finished share."""
    frame, _ = labels.under_study_labels(frame)
    counts = cells(frame)
    if counts.empty:
        return None
    whole, points = counts.sum(), int(counts.to_numpy().sum())
    sentence = f"{format_percent(whole['finished'] / points, 0)} of {points:,} points finished"
    if whole["out of memory"]:
        sentence += f", {format_percent(whole['out of memory'] / points, 0)} ran out of memory"
    by_model = counts.groupby(level=0).sum()
    shares = by_model["finished"] / by_model.sum(axis=1)
    if len(shares) > 1 and shares.min() < shares.max():
        worst = by_model.loc[shares.sort_values(kind="stable").index].iloc[0]
        sentence += f"; of {worst.name} {int(worst['finished']):,} of {int(worst.sum()):,} finished"
    return sentence + "."


FIGURE = FigureSpec(
    name="outcomes",
    section="failed",
    title="Outcomes",
    caption=(
        "Outcomes of the points of each model and size: shares as bars, counts below them. A retried point counts "
        "by its last attempt. A point that was cancelled, or will be retried, has not run yet and is left out."
    ),
    draw=draw,
    data=data,
    conclude=conclude,
)
