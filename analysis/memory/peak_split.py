"""The memory of a row's fullest rank by category: as the row recorded it, or by the closed form.

A finished run of ours has its peak by category. A row that has only its shape and layout (the study's, or a run that
ran out of memory) gets the planner's closed form, `workloads.costs.memory.estimate.estimate_memory`, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.rows.derived import SHAPE, model_of
from analysis.rows.labels import MEMORY_CATEGORIES, ROUTING
from workloads.costs.memory.estimate import StageMemory, estimate_memory
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment, from_json

PREDICTED = "predicted"
_SOURCES = {"measured": "measured", "rehearsed": "measured", "rehearsed_fake": "traced"}
"""Source of a row's split, by the row's method: a rehearsal measures memory, a trace does not."""
_COUNTS = (
    *("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "micro_batch_size", "global_batch_size", "seq_len"),
    *("zero_stage", "virtual_stages", "recompute_every"),
)
_WORDS = ("recompute", "pp_schedule", "precision")
NEEDED = (*SHAPE, *_COUNTS, *_WORDS, "sequence_parallel")
"""Columns that the closed form needs of a row that does not hold its experiment in full."""
READ = tuple(
    dict.fromkeys(
        (
            *("attempt_id", "experiment_id", "method", "outcome", "model", "num_params", "dp", "num_microbatches"),
            *("attention", "compile", "seed", "engine", "engine_version", "config_json", "tokens_per_s_per_gpu"),
            *("world_size", "peak_allocated_bytes", "peak_reserved_bytes", "device_memory_bytes"),
            *MEMORY_CATEGORIES,
            *ROUTING,
            *NEEDED,
        )
    )
)
"""Columns that this module and the figures of memory read."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Memory of the fullest rank at its peak, and where it is from."""

    source: str
    """``measured``, ``traced`` or ``predicted``."""
    bytes: tuple[int, int, int, int]
    """Parameters, gradients, optimizer, activations and rest: the order of `MEMORY_CATEGORIES`."""

    @property
    def total(self) -> int:
        return sum(self.bytes)


def stack_of(row: Mapping[str, Any]) -> Stack | None:
    """The split of a row's peak; the closed form's where it has none; None where its shape or layout is not known."""
    found = [row[name] for name in MEMORY_CATEGORIES]
    if not any(pd.isna(value) for value in found):
        a, b, c, d = (int(value) for value in found)
        return Stack(_SOURCES[row["method"]], (a, b, c, d))
    experiment = experiment_of(row)
    return None if experiment is None else predicted(experiment)


def predicted(experiment: Experiment) -> Stack:
    """The closed form's split on its fullest stage."""
    estimate = estimate_memory(experiment)
    return Stack(PREDICTED, categories(estimate.stages[estimate.peak_stage]))


def categories(stage: StageMemory) -> tuple[int, int, int, int]:
    return stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.activations_bytes


def experiment_of(row: Mapping[str, Any]) -> Experiment | None:
    """The experiment that a row is of; None where it is not known well enough for the closed form.

    Rows of other engines have no experiment in full: it is put together from the columns, and is what *this* engine
    would run for the same shape and layout (its own attention, nothing compiled).
    """
    experiment = _stored(row.get("config_json")) or _from_columns(row)
    return experiment if experiment is not None and is_countable(experiment) else None


def is_countable(e: Experiment) -> bool:
    """Whether the closed form's formulas hold: whole micro-batches, and a token and a layer for every rank."""
    whole = e.num_microbatches >= 1 and e.global_batch_size % e.sequences_per_round == 0
    return whole and e.micro_batch_size * e.seq_len >= e.cp * e.tp and e.pp * e.virtual_stages <= e.model.num_layers


def can_be_counted(rows: pd.DataFrame) -> pd.Series:
    """True for rows that may have a stack, by their columns alone."""
    split = rows[list(MEMORY_CATEGORIES)].notna().all(axis=1)
    return split | rows["config_json"].notna() | rows[list(NEEDED)].notna().all(axis=1)


def _stored(text: object) -> Experiment | None:
    if not isinstance(text, str):
        return None
    try:
        return from_json(text)
    except (InvalidExperiment, ValueError, TypeError, KeyError):  # of a version with other fields
        return None


def _from_columns(row: Mapping[str, Any]) -> Experiment | None:
    if any(row.get(name) is None or pd.isna(row[name]) for name in NEEDED):
        return None
    fields: dict[str, Any] = {name: int(row[name]) for name in _COUNTS}
    fields |= {name: str(row[name]) for name in _WORDS}
    try:
        return Experiment(model=model_of(dict(row)), sequence_parallel=bool(row["sequence_parallel"]), **fields)
    except InvalidExperiment:
        return None
