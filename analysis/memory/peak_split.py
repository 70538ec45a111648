"""Memory of a row's fullest rank by category: as the row recorded it, or by the closed form.

Finished runs of our engine record their peak by category. A row of it that has only its shape and layout (a run that
ran out of memory) gets the planner's closed form, `workloads.costs.memory.estimate.estimate_memory`, marked as such. A
row of another engine gets no closed form of ours: only its measured peak, as a whole.
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
from workloads.spec.experiment import ENGINE, Experiment, from_json

PREDICTED = "predicted"
UNSPLIT = "not split"
_SOURCES = {"measured": "measured", "rehearsed": "measured", "rehearsed_fake": "traced"}
"""Source of a row's split by the row's method: a rehearsal measures memory, a trace does not."""
_COUNTS = (
    *("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "micro_batch_size", "global_batch_size", "seq_len"),
    *("zero_stage", "virtual_stages", "recompute_every"),
)
_WORDS = ("recompute", "pp_schedule", "precision")
NEEDED = (*SHAPE, *_COUNTS, *_WORDS, "sequence_parallel")
"""Columns needed for the closed form if a row does not hold its full experiment."""
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
"""Columns that this module and the memory figures read."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Memory of the fullest rank at its peak, with its source."""

    source: str
    """``measured``, ``traced``, ``predicted``, or ``not split``: measured, but not by category."""
    bytes: tuple[int, ...]
    """Bytes of parameters, gradients, optimizer, activations and rest: the order of `MEMORY_CATEGORIES`. Of a peak that
    is not split, one number."""

    @property
    def total(self) -> int:
        return sum(self.bytes)


def stack_of(row: Mapping[str, Any]) -> Stack | None:
    """Split of a row's peak as recorded, otherwise by the closed form, or of another engine's row as a whole; None if
    too little is known for that."""
    recorded = [row[name] for name in MEMORY_CATEGORIES]
    if not any(pd.isna(value) for value in recorded):
        a, b, c, d = (int(value) for value in recorded)
        return Stack(_SOURCES[row["method"]], (a, b, c, d))
    if is_of_another_engine(row):
        peaks = [row[name] for name in ("peak_allocated_bytes", "peak_reserved_bytes") if not pd.isna(row[name])]
        return Stack(UNSPLIT, (int(peaks[0]),)) if peaks else None
    experiment = experiment_of(row)
    return None if experiment is None else predicted(experiment)


def is_of_another_engine(row: Mapping[str, Any]) -> bool:
    return not pd.isna(row["engine"]) and row["engine"] != ENGINE


def predicted(experiment: Experiment) -> Stack:
    """Split by the closed form on the fullest stage."""
    estimate = estimate_memory(experiment)
    return Stack(PREDICTED, categories(estimate.stages[estimate.peak_stage]))


def categories(stage: StageMemory) -> tuple[int, int, int, int]:
    return stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.activations_bytes


def experiment_of(row: Mapping[str, Any]) -> Experiment | None:
    """Experiment of a row; None if too little is known for the closed form.

    Rows of other engines do not hold a full experiment. Theirs is built from the columns: the experiment that *this*
    engine would run for the same shape and layout (its own attention, nothing compiled).
    """
    experiment = _stored(row.get("config_json")) or _from_columns(row)
    return experiment if experiment is not None and is_countable(experiment) else None


def is_countable(e: Experiment) -> bool:
    """Whether the closed form applies: whole micro-batches, at least one token and one layer for every rank."""
    whole = e.num_microbatches >= 1 and e.global_batch_size % e.sequences_per_round == 0
    return whole and e.micro_batch_size * e.seq_len >= e.cp * e.tp and e.pp * e.virtual_stages <= e.model.num_layers


def can_be_counted(rows: pd.DataFrame) -> pd.Series:
    """Mask of rows that may have a stack, judged by their columns only."""
    split = rows[list(MEMORY_CATEGORIES)].notna().all(axis=1)
    return split | rows["config_json"].notna() | rows[list(NEEDED)].notna().all(axis=1)


def _stored(text: object) -> Experiment | None:
    if not isinstance(text, str):
        return None
    try:
        return from_json(text)
    except (InvalidExperiment, ValueError, TypeError, KeyError):  # written by a version with other fields
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
