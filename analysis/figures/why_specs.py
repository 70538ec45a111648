"""The figures of why layouts differ, what they cost and how far to trust them."""

from __future__ import annotations

from analysis.data import breakdown as breakdown_data
from analysis.data import cost as cost_data
from analysis.data import drift as drift_data
from analysis.data import effects as effects_data
from analysis.data import efficiency as efficiency_data
from analysis.data import gantt as gantt_data
from analysis.data import pareto as pareto_data
from analysis.figures import breakdown, cost, drift, effects, efficiency, failures, gantt, pareto
from analysis.figures.spec import FigureSpec

FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "pareto",
        "best",
        "Throughput against memory",
        "Each point is a finished layout, repeats counted once. On the front nothing else is at least as fast in less "
        "memory; its leanest and fastest run and the knee between them are written out.",
        pareto.draw,
        pareto_data.table,
    ),
    FigureSpec(
        "breakdown",
        "why",
        "Where a step's time goes",
        "The fastest layouts of each model and size. Forward and backward include the collectives inside them (tensor "
        "parallelism's, ZeRO 3's gathers); the exposed reduction is what is left of gradient reduction after the last "
        "backward. Parts are means over ranks, the step is the slowest rank's: the rest is what lies between.",
        breakdown.draw,
        breakdown_data.table,
    ),
    FigureSpec(
        "breakdown_by_axis",
        "why",
        "What a degree costs",
        "For each axis the longest series of runs that differ in its degree alone: tp and pp take ranks from data "
        "parallelism on the same devices at the same batch, dp adds devices at the same work each.",
        breakdown.draw_along_axes,
        breakdown_data.along_axes,
    ),
    FigureSpec(
        "schedules",
        "why",
        "Pipeline schedules",
        "Every schedule that the cost model can execute, for the fastest run of the deepest pipelines of up to 8 "
        "stages: equal stages, sending free. A backward counts as two forwards, under full recomputation as three; "
        "seconds are the run's own where its forward and backward were timed.",
        gantt.draw,
        gantt_data.table,
    ),
    FigureSpec(
        "effects",
        "why",
        "What one choice does by itself",
        "Median ratio, after over before, over pairs of runs that agree in everything else, devices, driver and "
        "versions included. A degree takes ranks from data parallelism on the same devices at the same batch, a larger "
        "micro-batch takes micro-batches. Pairs that share a run are not independent: intervals are too narrow.",
        effects.draw,
        effects_data.table,
    ),
    FigureSpec(
        "efficiency",
        "scaling",
        "Scaling efficiency and its loss",
        "Throughput per device relative to the smallest size with five finished layouts of the same batch (pure data "
        "parallelism: with one). Strong scaling keeps the tokens of a step, weak scaling a device's. The loss is "
        "the growth of device time a token; each part's share is by how much it grew, negative where it shrank.",
        efficiency.draw,
        efficiency_data.table,
    ),
    FigureSpec(
        "device_hours",
        "cost",
        "What the sweep held its devices for",
        "Duration of every attempt, retries included, times its devices; a rehearsal holds one. Money only where a "
        "price was named.",
        cost.draw_spent,
        cost_data.spent,
    ),
    FigureSpec(
        "training_cost",
        "cost",
        "What a trillion tokens would take",
        "The fastest layout of each model and size at the speed of its timed steps, without restarts, evaluation or "
        "failures. Energy is the devices' measured power alone; money only where a price was named.",
        cost.draw_training,
        cost_data.training,
    ),
    FigureSpec(
        "failures_by_phase",
        "failed",
        "Failures by kind and phase",
        "The deciding attempt of each point that did not finish, with the hours that it had held its devices.",
        failures.draw,
        failures.data,
    ),
    FigureSpec(
        "drift",
        "trust",
        "Nodes and network over the sweep",
        "A repeated run against the median of its experiment; any other against its prediction, scaled by the median "
        "over three or more runs of the same model and degrees, so that a layout is not taken for drift. Clocks and "
        "temperature are over the timed steps, bandwidth is from before training.",
        drift.draw,
        drift_data.table,
    ),
)
