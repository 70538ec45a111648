"""A predicted step time with its interval, as plans, prices and conditions of grids read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step, in seconds."""

    step_time_s: float
    low_s: float
    high_s: float
    """The middle 90 % of where it may be."""
    compute_s: float
    """What the busiest pipeline rank works in it, with what its tensor-parallel peers make it wait."""
    optimizer_s: float
    """After the last backward."""
