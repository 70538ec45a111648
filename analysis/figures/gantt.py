"""One time line a pipeline schedule: which stage works on which micro-batch, and where it waits."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.data import gantt
from analysis.figures import panels, style
from analysis.rows import labels
from workloads.costs.pipeline import Simulation, Span

_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_KINDS = {"F": ("#56B4E9", "", "forward"), "B": ("#E69F00", "", "backward")}
_MOST_NUMBERED = 160
"""With more actions than this in a panel, their micro-batches are not written into them."""
_HEIGHT = 0.86


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Every schedule for one of the rows' pipelines, on one scale; idle share and micro-batches held are written."""
    pipeline = gantt.representative(frame)
    if pipeline is None:
        raise style.NothingToDraw(f"no run of a pipeline of 2 to {gantt.MOST_STAGES} stages has finished")
    found = gantt.schedules(pipeline)
    figure, axes = panels.grid(len(found), 1, (10.0, 0.26 * pipeline.stages + 0.75), extra_in=1.1)
    last = max(done.total_s for done, _ in found.values())
    for ax, (name, (done, held)) in zip(axes, found.items(), strict=True):
        _panel(ax, done, pipeline.stages, last)
        shown = _NAMES.get(name, name.replace("_", " "))
        ax.set_title(
            f"{shown}: {labels.percent(gantt.bubble_share(done))} idle, at most "
            f"{labels.plural(held, 'micro-batch', 'micro-batches')} held by a stage"
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


def _note(pipeline: gantt.Pipeline) -> str:
    row, p, m = pipeline.row, pipeline.stages, int(pipeline.row["num_microbatches"])
    text = f"{row['workload']}, {row['layout']}, as equal stages"
    if m > pipeline.micro_batches:
        text += (
            f",\ndrawn with {pipeline.micro_batches} of {m} micro-batches (idle with all of them: "
            f"{labels.percent((p - 1) / (m + p - 1))})"
        )
    idle = row["pipeline_idle_s"]
    if pd.notna(idle) and pd.notna(row["step_time_s"]):
        ran = _NAMES.get(str(row["pp_schedule"]), str(row["pp_schedule"]))
        text += f"\nThe run itself ({ran}) waited {labels.percent(idle / row['step_time_s'])} of its step"
    return text
