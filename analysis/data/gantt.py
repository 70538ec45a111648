"""Pipeline schedules on a time line: every schedule that the cost model can execute, for a layout of these rows.

Stages are taken as equal and sending as free, so that what is seen is the schedule itself. Times are those of the run
where its forward and backward were timed, else in forwards of one micro-batch on one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from workloads.costs.pipeline import Simulation, simulate
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
def table(frame: pd.DataFrame) -> pd.DataFrame:
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
