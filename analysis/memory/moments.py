"""Memory over the first steps of one run: the closed form from operation to operation, beside measured peaks.

Between two operations a rank of a pipeline stage holds (see `workloads.costs.memory` for the letters)

    parameters  g P / S, and for ZeRO 0, 1, 2 the copy to compute with, c P, from the first forward to the last backward
    gradients   after a step's first backward: g P until the last one where they accumulate unsharded, else g P / S;
                the optimizer frees them
    optimizer   2 g P / S from the end of the first step on
    activations what is saved of each micro-batch whose forward has run and whose backward has not, and the token ids

What an operation needs besides while it runs is in the peak of the step, which is the planner's: in the first step
without the optimizer's state, or what the optimizer itself holds where that is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.memory.peak_split import CATEGORY_COLUMNS, PREDICTED, READ, Stack, categories, experiment_of, stack_of
from analysis.rows import metrics
from analysis.rows.labels import records
from analysis.rows.step_peaks import FIRST_PEAKS
from workloads.costs.activations import head_bytes, layer_bytes, rank_tokens
from workloads.costs.memory import (
    COMPUTE_BYTES,
    MASTER_BYTES,
    accumulates_unsharded,
    estimate_memory,
    parameter_shard_bytes,
)
from workloads.costs.params import experiment_stages, local_params
from workloads.costs.schedule import schedule_actions
from workloads.experiment import Experiment

STEPS = 4
_SCHEDULES = ("none", "gpipe", "1f1b")
"""Those whose order of operations is known."""
_LENGTHS = {"F": 1.0, "B": 2.0}
"""A backward computes twice what a forward does; the optimizer is drawn as long as a forward."""
_Bytes = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held at one moment between two operations."""

    step: int
    at: float
    """0 at the start of the step, 1 at its end."""
    name: str
    bytes: _Bytes


@dataclass(frozen=True, slots=True)
class Timeline:
    row: Mapping[str, Any]
    measured: Stack
    """At the highest moment of the timed steps."""
    predicted: Stack
    moments: tuple[Moment, ...]
    predicted_peaks: tuple[_Bytes, ...]
    """Of each step, the fullest stage."""
    measured_peaks: tuple[int, ...]
    """Allocated at the highest moment of each step; empty where the steps were not kept."""


def timeline(frame: pd.DataFrame) -> Timeline | None:
    """The first steps of the fastest finished run of the largest model that has its memory by category.

    None when there is no such run, or none whose shape and schedule are known.
    """
    rows = frame[(frame["outcome"] == "ok") & frame["pp_schedule"].isin(_SCHEDULES)]
    rows = rows.dropna(subset=list(CATEGORY_COLUMNS))
    own = [name for name in FIRST_PEAKS if name in rows]
    order = rows.assign(_kept=rows[own].notna().any(axis=1) if own else False).sort_values(
        ["num_params", "_kept", metrics.RANK_BY, "attempt_id"], ascending=[False, False, False, True]
    )
    for row in records(order[[*READ, "layout", "workload", *own]].head(1)):
        experiment, measured = experiment_of(row), stack_of(row)
        if experiment is not None and measured is not None:
            estimate = estimate_memory(experiment)
            peaks = row.get("first_steps_peak_allocated_bytes")
            return Timeline(
                row=row,
                measured=measured,
                predicted=Stack(PREDICTED, categories(estimate.stages[estimate.peak_stage])),
                moments=tuple(moments(experiment, estimate.peak_stage)),
                predicted_peaks=tuple(peak_of_step(experiment, step) for step in range(STEPS)),
                measured_peaks=tuple(peaks[:STEPS]) if isinstance(peaks, list) else (),
            )
    return None


def table(found: Timeline | None) -> pd.DataFrame:
    """One line a moment: ``held`` between operations and ``peak`` of a step, measured or predicted."""
    columns = ["model", "layout", "split", "step", "moment", *CATEGORY_COLUMNS, "total_bytes", "attempt_id"]
    if found is None:
        return pd.DataFrame(columns=columns)
    lines: list[tuple[str, int | None, str, tuple[int | None, ...], int]] = [
        (PREDICTED, moment.step, f"held after {moment.name}", moment.bytes, sum(moment.bytes))
        for moment in found.moments
    ]
    lines += [(PREDICTED, step, "peak", peak, sum(peak)) for step, peak in enumerate(found.predicted_peaks)]
    unknown = (None,) * len(CATEGORY_COLUMNS)
    source = found.measured.source
    lines += [(source, step, "peak", unknown, peak) for step, peak in enumerate(found.measured_peaks)]
    lines.append((source, None, "peak of the timed steps", found.measured.bytes, found.measured.total))
    row = found.row
    return pd.DataFrame(
        [
            (row["model"], row["layout"], split, step, name, *parts, total, row["attempt_id"])
            for split, step, name, parts, total in lines
        ],
        columns=columns,
    ).astype({"step": "Int64"})


def moments(experiment: Experiment, stage: int, steps: int = STEPS) -> list[Moment]:
    """What a rank of a stage holds before, between and after the operations of the first steps."""
    e, x = experiment, _Held.of(experiment, stage)
    actions = schedule_actions(e.pp_schedule, stage, e.pp, e.num_microbatches)
    length = sum(_LENGTHS[action.kind] for action in actions) + _LENGTHS["F"]
    found: list[Moment] = []
    for step in range(steps):
        optimizer = x.optimizer if step else 0
        now, in_flight, backwards = 0.0, 0, 0
        found.append(Moment(step, 0.0, "start", (x.shard, 0, optimizer, x.inputs)))
        for action in actions:
            now += _LENGTHS[action.kind] / length
            in_flight += 1 if action.kind == "F" else -1
            backwards += action.kind == "B"
            last = backwards == e.num_microbatches
            gradients = 0 if not backwards else x.shard if last else x.accumulated
            held = (x.shard + (0 if last else x.copy), gradients, optimizer, x.inputs + in_flight * x.saved)
            kind = "forward" if action.kind == "F" else "backward"
            found.append(Moment(step, now, f"{kind} {action.microbatch + 1}", held))
        found.append(Moment(step, now, "optimizer's first look", (x.shard, x.shard, x.optimizer, x.inputs)))
        found.append(Moment(step, 1.0, "optimizer", (x.shard, x.shard, x.optimizer, x.inputs)))
    return found


def peak_of_step(experiment: Experiment, step: int) -> _Bytes:
    """The closed form's highest moment of a step, of the stage that is fullest in it."""
    stages = estimate_memory(experiment).stages
    if step:
        return max((categories(stage) for stage in stages), key=sum)
    running = [(p, g, 0, a) for p, g, _, a in map(categories, stages)]
    # AdamW makes its moments, twice the shard, when all gradients are there.
    stepping = [(o // 2, o // 2, o, 0) for _, _, o, _ in map(categories, stages)]
    return max((*running, *stepping), key=sum)


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of one rank of a stage."""

    shard: int
    copy: int
    accumulated: int
    optimizer: int
    saved: int
    """Of one micro-batch in flight."""
    inputs: int

    @classmethod
    def of(cls, e: Experiment, stage: int) -> _Held:
        held = experiment_stages(e)[stage]
        c, g = COMPUTE_BYTES.get(e.precision, 2), MASTER_BYTES.get(e.precision, 4)
        layers, experts = local_params(e, held.layers)
        ends = (held.embedding + held.head) // e.tp + held.final_norm
        shard = parameter_shard_bytes(e, layers + ends, experts)
        tokens, stream_tokens = rank_tokens(e)
        saved = held.dense_layers * layer_bytes(e, routed=False, c=c).saved
        if held.moe_layers:
            saved += held.moe_layers * layer_bytes(e, routed=True, c=c).saved
        saved += head_bytes(e, c).saved if held.has_head else 0
        saved += c * stream_tokens * e.model.hidden_size if stage < e.pp - 1 else 0  # the output, to be sent
        everything = layers + experts + ends
        return cls(
            shard=shard,
            copy=0 if e.zero_stage == 3 else c * everything,
            accumulated=g * everything if accumulates_unsharded(e) else shard,
            optimizer=2 * shard,
            saved=saved,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len * e.model.head_dim,
        )
