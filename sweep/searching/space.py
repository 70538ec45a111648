"""Search space and results so far: candidates as arrays, one entry each.

Candidates are grouped in *cells*: a cell is one model on one number of devices with one batch, and the search looks for
the layout with the smallest step time in it. Step times and memory are stored as natural logarithms, so that errors are
factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Texts = NDArray[Any]

Outcome = Literal["ok", "oom", "other"]
UNTRIED, RUNNING, OK, OOM, OTHER = range(5)
"""States of a candidate; `OTHER`: it failed for a reason unrelated to memory. One that has run stays `OK`."""
_STATES = {"ok": OK, "oom": OOM, "other": OTHER}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Candidates of all cells, with their predictions from before any run."""

    cell: Ints
    model: Ints
    """Model number; cells of one model share it."""
    gpus: Floats
    layout: Floats
    """Features, shape (candidates, axes): base-2 logarithms of the degrees and the micro-batch over their length
    scales, ZeRO stage and recomputation as numbers."""
    family: Texts
    """Kinds of parallelism that a layout uses: a wrong prior is mostly wrong for a whole family."""
    log_time: Floats
    """Logarithm of the predicted step time in seconds."""
    time_spread: Floats
    """Standard deviation of `log_time`."""
    log_load: Floats
    """Logarithm of predicted memory over a device's limit."""
    load_spread: Floats
    same_but_memory: Texts
    """Key of a layout without its memory choices: candidates of one cell with equal keys differ only in micro-batch,
    ZeRO ..."""
    engine: Ints | None = None
    """Number of the engine and its version, which share nothing with others; None: one engine runs all candidates."""

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def cells(self) -> list[int]:
        return sorted({int(one) for one in self.cell})

    def of(self, cell: int) -> Ints:
        """Indices of the candidates of a cell."""
        return np.flatnonzero(self.cell == cell)

    def take(self, rows: Ints) -> SearchSpace:
        """The space of these candidates alone."""
        arrays: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        taken: dict[str, Any] = {name: None if array is None else array[rows] for name, array in arrays.items()}
        return SearchSpace(**taken)


@dataclass(frozen=True, slots=True)
class Row:
    """A run with a step time."""

    place: int
    log_time: float
    """Logarithm of the measured step time."""
    residual: float
    """Logarithm of measured over expected step time."""
    nodes: tuple[str, ...] = ()
    """Nodes of the run; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Surprise:
    """How far a run was from what was expected when it was chosen."""

    off: float
    """Logarithm of measured over expected step time."""
    spread: float
    """Standard deviation that was expected of it."""
    nodes: tuple[str, ...] = ()
    cell: int = 0


@dataclass(slots=True)
class Seen:
    """Results of the candidates so far, and of earlier rows of the same cluster."""

    state: Ints
    residual: Floats
    """Logarithm of measured over predicted step time, median over the runs; NaN if unknown."""
    log_time: Floats
    """Logarithm of the measured step time, median over the runs; NaN if unknown."""
    failures: Ints
    """Runs that failed for a reason unrelated to memory."""
    repeating: Ints
    """Runs in progress of candidates that have run."""
    rows: list[Row] = field(default_factory=list)
    """All runs with a step time, repeats included, in the order in which results arrived."""
    surprises: list[Surprise] = field(default_factory=list)
    """One for each successful first run."""

    @classmethod
    def nothing(cls, count: int) -> Seen:
        zeros, unknown = np.zeros(count, np.int64), np.full(count, np.nan)
        return cls(zeros, unknown, unknown.copy(), zeros.copy(), zeros.copy())

    def ended(
        self, one: int, outcome: Outcome, step_time_s: float | None, log_expected: float, nodes: Sequence[str] = ()
    ) -> None:
        """Record the result of a run. ``step_time_s``: None if it failed.

        ``log_expected``: logarithm of the prior's step time for this run, including what its pilot measured on the
        machine.
        """
        if outcome == "other":
            self.failures[one] += 1
        if step_time_s is not None:
            self.state[one] = OK
            self.rows.append(Row(one, log(step_time_s), log(step_time_s) - log_expected, tuple(nodes)))
            of_layout = [row for row in self.rows if row.place == one]
            self.residual[one] = median(row.residual for row in of_layout)
            self.log_time[one] = median(row.log_time for row in of_layout)
        elif not self.has_run(one):
            self.state[one] = _STATES[outcome]

    def has_run(self, one: int) -> bool:
        return bool(np.isfinite(self.residual[one]))

    def repeats(self, places: Ints) -> int:
        """Runs of these candidates beyond the first that has a step time, in progress and failed ones included."""
        ran = places[np.isfinite(self.residual[places])]
        rows = np.isin([row.place for row in self.rows], ran).sum()
        return int(rows - len(ran) + self.failures[ran].sum() + self.repeating[ran].sum())

    def runs_again(self) -> float:
        """Probability that a candidate that failed runs the next time, from those that were tried again."""
        ok = int(((self.failures > 0) & (self.state == OK)).sum())
        tried = ok + int((self.failures[self.state == OTHER] > 1).sum())
        return (ok + 1) / (tried + 4)

    def fastest(self, places: Ints) -> int | None:
        """The candidate with the smallest measured step time; None if none of these ran."""
        times = self.log_time[places]
        if not np.isfinite(times).any():
            return None
        return int(places[int(np.nanargmin(times))])
