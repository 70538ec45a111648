"""Peak memory of table rows of this project's engine, computed by the closed form that plans use.

The general form for any code base (`workloads.predict.memory_terms`) has only a few terms, and is tens of per cent off
without rows to calibrate it. For our own engine every tensor is known (`workloads.costs.memory.estimate`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from results.errors import UltrasweepError
from sweep.predicting.measured_tables import is_attempts
from workloads.costs.memory.estimate import peak_stage
from workloads.predict.experts.columns import experiment_of
from workloads.predict.memory_terms import GIB, MEMORY
from workloads.predict.points import Floats
from workloads.predict.table import Table
from workloads.spec.experiment import ENGINE, Experiment, from_json
from workloads.spec.recomputation import CHOICES, canonical_recompute

_LEAST_ROWS = 3
_SCALES = ("tensorwise", "rowwise", "blockwise")


class OwnMemory(NamedTuple):
    peak_bytes: int
    """Allocated bytes at the peak of the fullest rank."""
    fits: bool | None
    """Whether a device of the cluster has that much memory; None if its memory is unknown."""

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator reserves, predicted without calibration rows."""
        return MEMORY["allocator"].value * self.peak_bytes + MEMORY["constant"].value * GIB


def reserved_over_form(known: Mapping[int, OwnMemory], reserved_bytes: Floats) -> float:
    """Median ratio of measured reserved bytes to `OwnMemory.reserved_bytes`; 1 with fewer than `_LEAST_ROWS` ratios."""
    ratios = [reserved_bytes[place] / one.reserved_bytes for place, one in known.items()]
    finite_ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
    return statistics.median(finite_ratios) if len(finite_ratios) >= _LEAST_ROWS else 1.0


def own_memory(frame: pd.DataFrame, table: Table) -> dict[int, OwnMemory]:
    """Memory of rows of this engine that describe a layout completely, by their index in ``table``.

    ``frame``: the data that ``table`` was read from, or the attempts that it was made from.
    """
    whole = frame["config_json"].tolist() if is_attempts(frame) else None
    words_by_column = {
        name: frame[name].tolist() if name in frame else [""] * len(frame) for name in ("precision", "recompute")
    }
    memory_by_place = {}
    for place, row in enumerate(table.rows.tolist()):
        if table.points.codebase[place] != ENGINE:
            continue
        try:
            if whole is not None:
                experiment = from_json(whole[row])
            else:
                words = (str(words_by_column[name][row]).strip().lower() for name in ("precision", "recompute"))
                experiment = _experiment(table, place, *words)
        except (UltrasweepError, ValueError, KeyError, TypeError):
            continue  # no layout of this engine: the general form predicts it
        cluster = table.clusters[place]
        peak = peak_stage(experiment).peak_bytes + cluster.device.workspace_bytes
        usable = cluster.usable_bytes
        memory_by_place[place] = OwnMemory(peak, None if usable is None else peak <= usable)
    return memory_by_place


def _experiment(table: Table, place: int, precision: str, recompute: str) -> Experiment:
    """Builds the experiment that a row describes. ``precision``, ``recompute``: the row's words, more precise than a
    point.

    Raises `UltrasweepError` or `ValueError` if the row is no layout of this engine.
    """
    kind, _, every = recompute.partition(".every")
    known = {"recompute": kind, "recompute_every": int(every or 1)} if canonical_recompute(kind) in CHOICES else {}
    scale = next((name for name in _SCALES if name.removesuffix("wise") in precision), "tensorwise")
    fp8 = {"precision": f"fp8_{scale}"} if 0 < table.points.fp8[place] < 3 else {}
    split = {"sequence_parallel": bool(table.points.split[place] != 0)}
    return experiment_of(table.points, place, table.experts[place], **known, **fp8, **split)
