"""A predicted step time with its interval, used by plans, prices and conditions of grids."""

from __future__ import annotations

from dataclasses import dataclass

CAUTION = 0.6745 / 1.645
"""Upper quartile of a normal distribution, in half-widths of its middle 90 %."""
ALIKE = 0.02
"""Layouts whose predicted times differ by up to this share count as equally fast."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step, in seconds."""

    step_time_s: float
    low_s: float
    high_s: float
    """Bounds of the interval that holds the middle 90 % of possible step times."""
    compute_s: float
    """Compute time of the busiest pipeline rank per step, including waits for its tensor-parallel peers."""
    optimizer_s: float
    """Time after the last backward."""

    @property
    def cautious_s(self) -> float:
        """Step time that three of four such predictions keep: the upper quartile of a lognormal distribution with this
        interval."""
        return float(self.step_time_s * (self.high_s / self.step_time_s) ** CAUTION)
