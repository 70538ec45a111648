"""Pipeline schedules on a time line: which stage works on which micro-batch, and where it waits.

Every schedule that the cost model can execute is drawn, for the layout of one run. Stages are taken as equal and
sending as free, so that the schedule itself is seen. Times are the run's own where its forward and backward were
timed, else in forwards of one micro-batch on one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.figures import panels, style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text import format_percent, plural
from workloads.costs.pipeline import Simulation, Span, simulate
from workloads.costs.schedule import microbatches_in_flight, schedule_actions
from workloads.errors import UnsupportedByEngine
from workloads.experiment import PipelineSchedule

MOST_STAGES = 8
MOST_MICRO_BATCHES = 16
"""More of either cannot be told apart in print."""
COLUMNS = (
    *("schedule", "stage", "kind", "micro_batch", "start", "end", "unit", "p", "m", "bubble_share", "most_in_flight"),
    *("layout", "attempt_id"),
)


_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_KINDS = {"F": ("#56B4E9", "", "forward"), "B": ("#E69F00", "", "backward")}
_MOST_NUMBERED = 160
"""With more actions than this in a panel, their micro-batches are not written into them."""
_HEIGHT = 0.86


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The run that stands for the others, and how long one micro-batch takes on one of its stages."""

    row: dict[str, Any]
    stages: int
    micro_batches: int
    """At most `MOST_MICRO_BATCHES`."""
    forward: float
    backward: float
    unit: str
    """``s``, or ``forwards`` where the run did not time them."""


def representative(frame: pd.DataFrame) -> Pipeline | None:
    """The fastest run of the deepest pipelines of up to `MOST_STAGES` stages; None without a finished pipeline.

    A backward counts as two forwards (twice the matrix products), under full recomputation as three.
    """
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna() & rows["pp"].between(2, MOST_STAGES)]
    if rows.empty:
        return None
    rows = rows[rows["pp"] == rows["pp"].max()]
    row = labels.records(rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable").head(1))[0]
    m = int(row["num_microbatches"])
    forwards = 4 if row["recompute"] == "full" else 3
    busy = row["forward_backward_s"]
    forward, unit = (busy / m / forwards, "s") if pd.notna(busy) else (1.0, "forwards")
    return Pipeline(
        row=row,
        stages=int(row["pp"]),
        micro_batches=min(m, MOST_MICRO_BATCHES),
        forward=float(forward),
        backward=float(forwards - 1) * float(forward),
        unit=unit,
    )


def schedules(pipeline: Pipeline) -> dict[str, tuple[Simulation, int]]:
    """Each schedule executed for these stages and micro-batches, with the most micro-batches that a stage holds."""
    p, m = pipeline.stages, pipeline.micro_batches
    found = {}
    for name in get_args(PipelineSchedule):
        if name == "none":
            continue
        try:
            actions = [schedule_actions(name, stage, p, m) for stage in range(p)]
        except UnsupportedByEngine:
            continue
        done = simulate(actions, [pipeline.forward] * p, [pipeline.backward] * p)
        found[name] = (done, max(microbatches_in_flight(own) for own in actions))
    return found


def bubble_share(done: Simulation) -> float:
    """Idle time of all stages over the devices' whole time."""
    return sum(done.idle_s) / (len(done.idle_s) * done.total_s)


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Every action of every schedule, `COLUMNS`: times from the start of the step in ``unit``."""
    pipeline = representative(frame)
    rows = []
    for name, (done, held) in (schedules(pipeline) if pipeline is not None else {}).items():
        assert pipeline is not None
        shared = {
            "schedule": name,
            "unit": pipeline.unit,
            "p": pipeline.stages,
            "m": pipeline.micro_batches,
            "bubble_share": bubble_share(done),
            "most_in_flight": held,
            "layout": pipeline.row["layout"],
            "attempt_id": pipeline.row["attempt_id"],
        }
        rows += [
            shared
            | {
                "stage": span.stage,
                "kind": span.action.kind,
                "micro_batch": span.action.microbatch,
                "start": span.start_s,
                "end": span.end_s,
            }
            for span in done.spans
        ]
    return pd.DataFrame(rows, columns=[*COLUMNS])


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Every schedule for one of the rows' pipelines, on one scale; idle share and micro-batches held are written."""
    pipeline = representative(frame)
    if pipeline is None:
        raise style.NothingToDraw(f"no run of a pipeline of 2 to {MOST_STAGES} stages has finished")
    found = schedules(pipeline)
    figure, axes = panels.grid(len(found), 1, (10.0, 0.26 * pipeline.stages + 0.75), extra_in=1.1)
    last = max(done.total_s for done, _ in found.values())
    for ax, (name, (done, held)) in zip(axes, found.items(), strict=True):
        _panel(ax, done, pipeline.stages, last)
        shown = _NAMES.get(name, name.replace("_", " "))
        ax.set_title(
            f"{shown}: {format_percent(bubble_share(done))} idle, at most "
            f"{plural(held, 'micro-batch', 'micro-batches')} held by a stage"
        )
    axes[-1].set_xlabel(
        "Time from the start of the step, s" if pipeline.unit == "s" else "Time, in forwards of one micro-batch"
    )
    style.bottom_legend(figure, _handles(found), _note(pipeline))
    return figure


def _panel(ax: Axes, done: Simulation, stages: int, last: float) -> None:
    ax.axhspan(-0.5, stages - 0.5, color="#f1f1f1", linewidth=0, zorder=0)
    for kind, (colour, _, _) in _KINDS.items():
        spans = [span for span in done.spans if span.action.kind == kind]
        ax.add_collection(
            PolyCollection([_box(span) for span in spans], facecolors=colour, edgecolors="white", linewidths=0.6)
        )
    if len(done.spans) <= _MOST_NUMBERED:
        for span in done.spans:
            middle = (span.start_s + span.end_s) / 2
            number = ax.text(middle, span.stage, f"{span.action.microbatch}", ha="center", va="center", fontsize=6.5)
            number.set_in_layout(False)  # inside its box, and measuring so many takes time
    ax.set(xlim=(0, 1.005 * last), ylim=(stages - 0.4, -0.6), ylabel="Stage")
    ax.set_yticks(range(stages))
    ax.tick_params(axis="y", length=0)


def _box(span: Span) -> list[tuple[float, float]]:
    low, high = span.stage - _HEIGHT / 2, span.stage + _HEIGHT / 2
    return [(span.start_s, low), (span.end_s, low), (span.end_s, high), (span.start_s, high)]


def _handles(found: dict[str, tuple[Simulation, int]]) -> list[Patch]:
    kinds = {span.action.kind for done, _ in found.values() for span in done.spans}
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=f"{name} of a micro-batch")
        for kind, (colour, hatch, name) in _KINDS.items()
        if kind in kinds
    ]
    return [*handles, Patch(facecolor="#f1f1f1", edgecolor="#cccccc", label="idle")]


def _note(pipeline: Pipeline) -> str:
    row, p, m = pipeline.row, pipeline.stages, int(pipeline.row["num_microbatches"])
    text = f"{row['workload']}, {row['layout']}, as equal stages"
    if m > pipeline.micro_batches:
        text += (
            f",\ndrawn with {pipeline.micro_batches} of {m} micro-batches (idle with all of them: "
            f"{format_percent((p - 1) / (m + p - 1))})"
        )
    idle = row["pipeline_idle_s"]
    if pd.notna(idle) and pd.notna(row["step_time_s"]):
        ran = _NAMES.get(str(row["pp_schedule"]), str(row["pp_schedule"]))
        text += f"\nThe run itself ({ran}) waited {format_percent(idle / row['step_time_s'])} of its step"
    return text


FIGURE = FigureSpec(
    name="schedules",
    section="why",
    title="Pipeline schedules",
    caption=(
        "Every schedule that the cost model can execute, for the fastest run of the deepest pipelines of up to 8 "
        "stages: equal stages, sending free. A backward counts as two forwards, under full recomputation as three; "
        "seconds are the run's own where its forward and backward were timed."
    ),
    draw=draw,
    data=data,
)
