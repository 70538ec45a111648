"""Search space and results so far: candidates as arrays, one entry each.

Candidates are grouped in *cells*: a cell is one model on one number of devices with one batch, and the search looks for
the layout with the smallest step time in it. Step times and memory are stored as natural logarithms, so that errors are
factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Texts = NDArray[Any]

Outcome = Literal["ok", "oom", "other"]
UNTRIED, RUNNING, OK, OOM, OTHER = range(5)
"""States of a candidate; `OTHER`: it failed for a reason unrelated to memory."""
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


@dataclass(slots=True)
class Seen:
    """Results of the candidates so far, and of earlier rows of the same cluster."""

    state: Ints
    residual: Floats
    """Logarithm of measured over predicted step time; NaN if unknown."""
    log_time: Floats
    """Logarithm of the measured step time; NaN if unknown."""
    order: list[int] = field(default_factory=list)
    """Finished candidates, in the order in which results arrived."""
    surprise: list[float] = field(default_factory=list)
    """For each successful run: deviation from its expectation when it was chosen, in standard deviations."""

    @classmethod
    def nothing(cls, count: int) -> Seen:
        return cls(np.zeros(count, np.int64), np.full(count, np.nan), np.full(count, np.nan))

    def ended(self, one: int, outcome: Outcome, step_time_s: float | None, log_expected: float) -> None:
        """Record a result. ``step_time_s``: None if it failed.

        ``log_expected``: logarithm of the prior's step time for this run, including what its pilot measured on the
        machine.
        """
        self.state[one] = _STATES[outcome]
        self.order.append(one)
        if step_time_s is not None:
            self.log_time[one] = log(step_time_s)
            self.residual[one] = self.log_time[one] - log_expected

    def ran(self) -> Ints:
        """Candidates with a measured step time."""
        return np.flatnonzero(np.isfinite(self.residual))

    def best(self, places: Sequence[int] | Ints) -> int | None:
        """The fastest of these candidates that ran; None if none ran."""
        places = np.asarray(places)
        times = self.log_time[places]
        if not np.isfinite(times).any():
            return None
        return int(places[int(np.nanargmin(times))])
