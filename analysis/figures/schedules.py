"""Pipeline schedules on a time line: which rank works on which micro-batch, and where it waits.

Every schedule is drawn for the layout of one run, with equal ranks and free sends, so that only the schedule shows.
Times are the run's if its forward and backward were timed, otherwise in forwards of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path

from analysis.drawing import style
from analysis.figures import panels
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from results.text.numbers import format_percent
from workloads.costs.shape.schedule import (
    INTERLEAVED,
    V_SHAPED,
    held,
    microbatches_in_flight,
    schedule_actions,
    stage_at,
)
from workloads.costs.time.pipeline import Simulation, Span, pipeline_time_s, simulate
from workloads.spec.experiment_values import PipelineSchedule

MOST_RANKS = 8
MOST_MICRO_BATCHES = 16
"""Largest numbers of ranks and micro-batches drawn; more are illegible in print."""
COLUMNS = (
    *("schedule", "rank", "chunk", "stage", "kind", "micro_batch", "start", "end", "unit", "p", "m", "v"),
    *("bubble_share", "most_in_flight", "most_held", "layout", "attempt_id"),
)

_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved 1F1B",
    "interleaved_zero_bubble": "Interleaved zero bubble",
    "zero_bubble_v": "ZB-V",
    "dualpipe_v": "DualPipeV",
}
_KINDS = {
    "F": ("#56B4E9", "forward"),
    "B": ("#E69F00", "backward"),
    "I": ("#CC79A7", "backward, input's gradient"),
    "W": ("#009E73", "backward, weights' gradient"),
}
_PANEL_IN = 10.0
_LEAST_NUMBERED_IN = 0.11
"""Smallest width of an action, in inches, for which the number of the micro-batch is written into its box."""
_HEIGHT = 0.86


@dataclass(frozen=True, slots=True)
class DrawnPipeline:
    """The representative run, with the times of one micro-batch on one of its ranks."""

    row: dict[str, Any]
    ranks: int
    micro_batches: int
    """Number of micro-batches drawn, at most `MOST_MICRO_BATCHES`."""
    forward: float
    backward: float
    unit: str
    """``s``, or ``forwards`` if the run did not time them."""

    def chunks(self, schedule: str) -> int:
        """Number of chunks of a rank: the run's if it has this interleaved schedule, otherwise 2 for schedules with
        several."""
        if schedule in INTERLEAVED:
            virtual_stages = self.row.get("virtual_stages")
            return int(virtual_stages) if self.row["pp_schedule"] == schedule and pd.notna(virtual_stages) else 2
        return 2 if schedule in V_SHAPED else 1


@dataclass(frozen=True, slots=True)
class DrawnSchedule:
    """One simulated schedule."""

    done: Simulation
    chunks: int
    in_flight: float
    """Largest number of micro-batches whose activations a rank holds; activations of one chunk count as a fraction."""
    held: float
    """Largest number of micro-batches of which a rank holds activations or tensors for a weight gradient."""


def representative(frame: pd.DataFrame) -> DrawnPipeline | None:
    """The fastest run of the deepest pipelines of up to `MOST_RANKS` ranks; None without a finished pipeline.

    A backward counts as two forwards (twice the matrix products), under full recomputation of all layers as three.
    """
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna() & rows["pp"].between(2, MOST_RANKS)]
    if rows.empty:
        return None
    rows = rows[rows["pp"] == rows["pp"].max()]
    row = labels.records(rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable").head(1))[0]
    m = int(row["num_microbatches"])
    forwards = 3.0 + _forwards_again(row)
    busy = row["forward_backward_s"]
    forward, unit = (busy / m / forwards, "s") if pd.notna(busy) else (1.0, "forwards")
    return DrawnPipeline(
        row=row,
        ranks=int(row["pp"]),
        micro_batches=min(m, MOST_MICRO_BATCHES),
        forward=float(forward),
        backward=float(forwards - 1) * float(forward),
        unit=unit,
    )


def _forwards_again(row: Mapping[str, Any]) -> float:
    """Fraction of a forward that the backward repeats: the share of fully recomputed layers."""
    if row["recompute"] != "full":
        return 0.0
    layers = int(row["num_layers"])
    return -(-layers // int(row["recompute_every"])) / layers


def schedules(pipeline: DrawnPipeline) -> dict[str, DrawnSchedule]:
    """Each schedule simulated for these ranks and micro-batches."""
    p, m = pipeline.ranks, pipeline.micro_batches
    forward, backward, inputs, weights = _times(pipeline)
    drawn_by_name = {}
    for name in get_args(PipelineSchedule):
        if name == "none":
            continue
        v = pipeline.chunks(name)
        actions = [schedule_actions(name, rank, p, m, v) for rank in range(p)]
        moments = [moment for of_rank in actions for moment in held(of_rank)]
        drawn_by_name[name] = DrawnSchedule(
            done=simulate(actions, forward, backward, name=name, input_s=inputs, weight_s=weights),
            chunks=v,
            in_flight=max(microbatches_in_flight(of_rank) for of_rank in actions) / v,
            held=max(sum(moment.activations) + sum(moment.for_weights) for moment in moments) / v,
        )
    return drawn_by_name


def _times(pipeline: DrawnPipeline) -> list[list[float]]:
    """Times of F, B, I and W by rank. W has a forward's matrix products; recomputation belongs to I."""
    forward, backward = pipeline.forward, pipeline.backward
    return [[one] * pipeline.ranks for one in (forward, backward, backward - forward, forward)]


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """Every action of every schedule, `COLUMNS`: times from the start of the step in ``unit``."""
    pipeline = representative(frame)
    rows = []
    for name, drawn in (schedules(pipeline) if pipeline is not None else {}).items():
        assert pipeline is not None
        shared = {
            "schedule": name,
            "unit": pipeline.unit,
            "p": pipeline.ranks,
            "m": pipeline.micro_batches,
            "v": drawn.chunks,
            "bubble_share": drawn.done.idle_share,
            "most_in_flight": drawn.in_flight,
            "most_held": drawn.held,
            "layout": pipeline.row["layout"],
            "attempt_id": pipeline.row["attempt_id"],
        }
        rows += [
            shared
            | {
                "rank": span.rank,
                "chunk": span.action.chunk,
                "stage": stage_at(name, span.rank, span.action.chunk, pipeline.ranks),
                "kind": span.action.kind,
                "micro_batch": span.action.microbatch,
                "start": span.start_s,
                "end": span.end_s,
            }
            for span in drawn.done.spans
        ]
    return pd.DataFrame(rows, columns=[*COLUMNS])


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Every schedule for one pipeline of the rows, on one scale, with idle shares and held micro-batches."""
    pipeline = representative(frame)
    if pipeline is None:
        raise style.NothingToDraw(f"no run of a pipeline of 2 to {MOST_RANKS} ranks has finished")
    drawn_by_name = schedules(pipeline)
    figure, axes = panels.grid(len(drawn_by_name), 1, (_PANEL_IN, 0.24 * pipeline.ranks + 0.75), extra_in=1.1)
    last = max(drawn.done.total_s for drawn in drawn_by_name.values())
    for ax, (name, drawn) in zip(axes, drawn_by_name.items(), strict=True):
        _panel(ax, drawn, pipeline.ranks, last)
        ax.set_title(
            f"{_NAMES[name]}: {format_percent(drawn.done.idle_share)} idle, at most {drawn.held:g} micro-batches "
            "held by a rank"
        )
    axes[-1].set_xlabel(
        "Time from the start of the step, s" if pipeline.unit == "s" else "Time, in forwards of one micro-batch"
    )
    style.bottom_legend(figure, _handles(drawn_by_name), _note(pipeline))
    return figure


def _panel(ax: Axes, drawn: DrawnSchedule, ranks: int, last: float) -> None:
    ax.axhspan(-0.5, ranks - 0.5, color="#f1f1f1", linewidth=0, zorder=0)
    spans = drawn.done.spans
    boxes: dict[tuple[float, ...], list[list[tuple[float, float]]]] = {}
    for span in spans:
        boxes.setdefault(_colour(span.action.kind, span.action.chunk, drawn.chunks), []).append(_box(span))
    # One path per colour: hundreds of separate boxes would take most of the time and of an SVG's bytes.
    paths = [Path.make_compound_path_from_polys(np.array(corners)) for corners in boxes.values()]
    ax.add_collection(PathCollection(paths, facecolors=list(boxes), edgecolors="white", linewidths=0.5))
    shortest = min(span.end_s - span.start_s for span in spans)
    if shortest / last * _PANEL_IN >= _LEAST_NUMBERED_IN:
        for span in spans:
            middle = (span.start_s + span.end_s) / 2
            number = ax.text(middle, span.rank, f"{span.action.microbatch}", ha="center", va="center", fontsize=6)
            number.set_in_layout(False)  # inside its box; measuring so many takes time
    ax.set(xlim=(0, 1.005 * last), ylim=(ranks - 0.4, -0.6), ylabel="Rank")
    ax.set_yticks(range(ranks))
    ax.tick_params(axis="y", length=0)


def _colour(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """Colour of a kind of action, lighter for a rank's later chunks."""
    light = 0.6 * chunk / max(1, chunks - 1)
    return tuple(one + light * (1 - one) for one in to_rgb(_KINDS[kind][0]))


def _box(span: Span) -> list[tuple[float, float]]:
    low, high = span.rank - _HEIGHT / 2, span.rank + _HEIGHT / 2
    return [(span.start_s, low), (span.end_s, low), (span.end_s, high), (span.start_s, high)]


def _handles(found: dict[str, DrawnSchedule]) -> list[Patch]:
    kinds = {span.action.kind for drawn in found.values() for span in drawn.done.spans}
    handles = [
        Patch(facecolor=colour, edgecolor="white", label=name)
        for kind, (colour, name) in _KINDS.items()
        if kind in kinds
    ]
    return [
        *handles,
        Patch(facecolor=_colour("F", 1, 2), edgecolor="white", label="lighter: later chunks of a rank"),
        Patch(facecolor="#f1f1f1", edgecolor="#cccccc", label="idle"),
    ]


def _note(pipeline: DrawnPipeline) -> str:
    row, m = pipeline.row, int(pipeline.row["num_microbatches"])
    text = f"{row['workload']}, {row['layout']}, as equal ranks"
    ran = str(row["pp_schedule"])
    if m > pipeline.micro_batches:
        forward, backward, inputs, weights = _times(pipeline)
        chunks = pipeline.chunks(ran)
        whole = pipeline_time_s(ran, forward, backward, m, virtual_stages=chunks, input_s=inputs, weight_s=weights)
        idle = 1 - m * (pipeline.forward + pipeline.backward) / whole
        text += (
            f",\ndrawn with {pipeline.micro_batches} of {m} micro-batches ({_NAMES.get(ran, ran)} with all of them: "
            f"{format_percent(idle)} idle)"
        )
    idle = row["pipeline_idle_s"]
    if pd.notna(idle) and pd.notna(row["step_time_s"]):
        text += (
            f"\nThe run itself ({_NAMES.get(ran, ran)}) waited {format_percent(idle / row['step_time_s'])} of its step"
        )
    return text


FIGURE = FigureSpec(
    name="schedules",
    section="why",
    title="Pipeline schedules",
    caption=(
        "Every pipeline schedule for the fastest run of the deepest pipelines of up to 8 ranks: equal ranks, free "
        "sends, two chunks of the model per rank if a schedule has several. A backward counts as two forwards, under "
        "full recomputation as three; seconds are the run's if its forward and backward were timed."
    ),
    draw=draw,
    data=data,
)
