"""How a run is measured: its warm-up steps, timed steps and profiled steps. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

FEW_STEPS, MANY_STEPS = 5, 10
SHORT_STEP_S = 1.0
"""Runs with a shorter step time `MANY_STEPS`, others `FEW_STEPS`: more steps make the median more precise and cost
little while steps are short."""
WARM_STEPS, SLOW_STEPS = 2, 1
"""Warm-up steps and timed steps of a run that ends early because it is slow."""
EAGER_STEPS = 2
"""Number of steps that run before one is captured: the first makes the optimizer's state and loads kernels."""
PROFILED_STEPS = 3
"""Number of steps after the timed ones in a profiled run: one for the profiler's start, and two that are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSpec:
    """How a run is measured. This is not part of an experiment's identity."""

    warmup_steps: int = 3
    timed_steps: int | None = None
    """Number of timed steps. None: `MANY_STEPS` if a step takes less than `SHORT_STEP_S`, else `FEW_STEPS`."""
    memory_probe: bool = True
    """Record memory by category at its peak in the last warm-up step. This costs host time in that step only. It needs
    two warm-up steps, because the optimizer state does not exist yet in the first one."""
    profile: bool = False
    """After the timed steps, record `PROFILED_STEPS` more and divide the last one's time among its kernels. Works on
    GPUs only."""

    slow_step_s: float | None = None
    """Limit in seconds. If the faster of the first `WARM_STEPS` steps takes longer, only `SLOW_STEPS` more are timed
    and the run ends: the layout is too slow to matter. None: no run ends early."""

    def is_slow(self, step_time_s: float | None) -> bool:
        """Whether a run with this step time ends early."""
        return self.slow_step_s is not None and step_time_s is not None and step_time_s > self.slow_step_s

    def timed_steps_of(self, step_time_s: float | None) -> int:
        """Number of timed steps for a step time in seconds. None: the step time is not known."""
        if self.is_slow(step_time_s):
            return SLOW_STEPS
        if self.timed_steps is not None:
            return self.timed_steps
        return MANY_STEPS if step_time_s is not None and step_time_s < SHORT_STEP_S else FEW_STEPS

    def steps_of(self, step_time_s: float | None) -> int:
        """Number of all steps of a run, including those before and after the timed ones."""
        return self.warmup_steps + self.timed_steps_of(step_time_s) + (PROFILED_STEPS if self.profile else 0)

    @property
    def too_few_to_capture(self) -> str | None:
        """Why no step can be captured, however the layout; None if the warm-up leaves time for it."""
        if self.warmup_steps > EAGER_STEPS:
            return None
        return (
            f"{EAGER_STEPS} eager steps and a first replay come before the timed steps, but measure.warmup_steps is "
            f"{self.warmup_steps}; use {EAGER_STEPS + 1} or more"
        )

    @property
    def in_words(self) -> str:
        """Warm-up and timed steps, such as ``3 + 5`` or ``3 + 5 to 10``."""
        timed = f"{FEW_STEPS} to {MANY_STEPS}" if self.timed_steps is None else str(self.timed_steps)
        return f"{self.warmup_steps} + {timed}"
