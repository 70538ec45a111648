"""What a search chooses from, and what it has seen: candidates as arrays, one entry each.

Candidates stand in *cells*: a cell is one model on one number of devices with one batch, and within it the search looks
for the layout with the smallest step time. Times and needs of memory are kept as natural logarithms, so that an error
is a factor.
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
"""States of a candidate; `OTHER`: it failed for a reason that says nothing of its memory."""
_STATES = {"ok": OK, "oom": OOM, "other": OTHER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Candidates of all cells, with what was predicted of them before anything ran."""

    cell: Ints
    model: Ints
    """Cells of one model share this number."""
    gpus: Floats
    layout: Floats
    """Shape (candidates, axes): logarithms to base 2 of the degrees and the micro-batch, each over the length at which
    two layouts stop being alike; ZeRO stage and recomputation as numbers."""
    family: Texts
    """Which kinds of parallelism a layout has: a prior that is wrong is mostly wrong for all of a family."""
    log_time: Floats
    """Of the predicted step time in seconds."""
    time_spread: Floats
    """Standard deviation of its logarithm."""
    log_load: Floats
    """Of the predicted need of memory over what a device has."""
    load_spread: Floats
    same_but_memory: Texts
    """Candidates of one cell with equal texts differ only in what needs more or less memory (micro-batch, ZeRO)."""

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def cells(self) -> list[int]:
        return sorted({int(one) for one in self.cell})

    def of(self, cell: int) -> Ints:
        """Places of the candidates of a cell."""
        return np.flatnonzero(self.cell == cell)


@dataclass(slots=True)
class Seen:
    """What became of the candidates so far, and rows of the same cluster that were there before."""

    state: Ints
    residual: Floats
    """Logarithm of measured over predicted step time; NaN where none is known."""
    log_time: Floats
    """Of the measured step time; NaN where none is known."""
    order: list[int] = field(default_factory=list)
    """Candidates that ended, in the order in which they were told."""
    surprise: list[float] = field(default_factory=list)
    """Of each that ran: its distance from what was expected of it when it was chosen, in standard deviations."""

    @classmethod
    def nothing(cls, count: int) -> Seen:
        return cls(np.zeros(count, np.int64), np.full(count, np.nan), np.full(count, np.nan))

    def ended(self, one: int, outcome: Outcome, step_time_s: float | None, log_expected: float) -> None:
        """``step_time_s``: None unless it ran; ``log_expected``: what the prior says of this very run, with what its
        pilot has found of the machine."""
        self.state[one] = _STATES[outcome]
        self.order.append(one)
        if step_time_s is not None:
            self.log_time[one] = log(step_time_s)
            self.residual[one] = self.log_time[one] - log_expected

    def ran(self) -> Ints:
        """Candidates whose step time is known."""
        return np.flatnonzero(np.isfinite(self.residual))

    def best(self, places: Sequence[int] | Ints) -> int | None:
        """The fastest of these candidates that ran."""
        places = np.asarray(places)
        times = self.log_time[places]
        if not np.isfinite(times).any():
            return None
        return int(places[int(np.nanargmin(times))])
