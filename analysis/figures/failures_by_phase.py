"""Failures by kind and phase: how many, and how long they had held their devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.drawing import style
from analysis.figures import conclusions
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.load import decided
from results.tables.schema import OUTCOMES, PHASES, UNKNOWN_OUTCOME
from results.text.numbers import format_number, plural

_COLUMNS = ["outcome", "phase", "points", "device_hours"]
_UNKNOWN_PHASE = "not said"
_ALWAYS_SHOWN = [phase for phase in PHASES if phase not in ("replay", "done")]


def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Number of failed points by outcome and phase of the deciding attempt, with the device-hours that the attempts
    held."""
    failed = decided(frame, ["outcome", "phase", "attempt_id", "duration_s", "world_size", "method"])
    failed = failed[failed["outcome"] != "ok"]
    if failed["phase"].isna().all():
        return pd.DataFrame(columns=_COLUMNS)
    failed = failed.assign(phase=failed["phase"].fillna(_UNKNOWN_PHASE), device_hours=metrics.held_hours(failed))
    groups = failed.groupby(["outcome", "phase"])
    counted = groups.agg(
        points=("attempt_id", "size"), known=("device_hours", "count"), device_hours=("device_hours", "sum")
    )
    # A sum that lacks an attempt's duration would be too small, so it is unknown.
    counted["device_hours"] = counted["device_hours"].where(counted["known"] == counted["points"])
    return counted.reset_index()[_COLUMNS]


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Kinds of failure by phase: the number of points, and below it their device-hours."""
    table = data(frame)
    if table.empty:
        some = (decided(frame, ["outcome"])["outcome"] != "ok").any()
        raise style.NothingToDraw("no failure has a recorded phase" if some else "no point failed")
    kinds = _ordered(table["outcome"], (*OUTCOMES, UNKNOWN_OUTCOME))
    phases = _ordered(pd.concat([table["phase"], pd.Series(_ALWAYS_SHOWN)]), PHASES)
    counts = np.full((len(kinds), len(phases)), np.nan)
    figure = style.new_figure(1.15 * len(phases) + 3.2, 0.55 * len(kinds) + 1.3)
    ax = figure.subplots()
    hours = "GPU-hours" if labels.device_noun(frame) == "GPUs" else "process-hours"
    colours = style.sequential("YlOrBr")
    norm = style.norm_of([0.0, float(table["points"].max())])
    for row in labels.records(table):
        y, x = kinds.index(row["outcome"]), phases.index(row["phase"])
        counts[y, x] = row["points"]
        held = f"\n{format_number(row['device_hours'])} {hours}" if pd.notna(row["device_hours"]) else ""
        ink = style.ink_on(colours(norm(row["points"])))
        ax.text(x, y, f"{row['points']:,}{held}", ha="center", va="center", fontsize=8, color=ink)
    ax.imshow(counts, cmap=colours, norm=norm, aspect="auto")
    ax.set_xticks(range(len(phases)), phases)
    ax.set_yticks(range(len(kinds)), [labels.OUTCOME_NAMES.get(kind, kind) for kind in kinds])
    ax.set_xticks(np.arange(-0.5, len(phases)), minor=True)
    ax.set_yticks(np.arange(-0.5, len(kinds)), minor=True)
    ax.grid(which="minor", color="#e2e2e2")
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("Phase that the failing rank was in")
    ax.set_title(f"{plural(int(table['points'].sum()), 'point')} that did not finish")
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=ax, pad=0.02, fraction=0.05)
    bar.set_label("Number of points")
    bar.locator = MaxNLocator(4, integer=True)
    bar.outline.set_visible(False)
    return figure


def _ordered(values: pd.Series, order: Sequence[str]) -> list[str]:
    """The distinct values in the order of ``order``, others after them."""
    there = [str(value) for value in values.unique()]
    return [name for name in order if name in there] + [name for name in there if name not in order]


FIGURE = FigureSpec(
    name="failures_by_phase",
    section="failed",
    title="Failures by kind and phase",
    caption="The deciding attempt of each point that did not finish, with the hours that it had held its devices.",
    draw=draw,
    data=data,
    conclude=lambda frame: conclusions.of_failures(data(frame)),
)
