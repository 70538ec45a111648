"""`TrainingRecipe`: tokens and learning rate by step of a run whose model shall learn something.

A sweep measures how fast steps are and needs no such choice: its runs train on synthetic tokens at one small rate. So
none of this is a field of an `Experiment`, whose id stands for everything that can change a number of a sweep. A
training curve is identified by its experiment and its recipe together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from workloads.spec.checks import number, one_of, whole_number
from workloads.spec.errors import InvalidExperiment

Data = Literal["synthetic", "text"]
FINAL_SHARE = 0.1
"""Learning rate of the last step, as a share of the highest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """Linear warm-up to ``learning_rate`` over ``warmup_steps``, then half a cosine to a tenth of it."""

    data: Data = "text"
    """``synthetic``: uniform random tokens, from which nothing can be learned. ``text``: bytes of the shipped book."""
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    steps: int = 300

    def __post_init__(self) -> None:
        one_of("synthetic", "text").check("recipe: data", self.data, error=InvalidExperiment)
        number("recipe: learning_rate", self.learning_rate, above=0, error=InvalidExperiment)
        whole_number("recipe: warmup_steps", self.warmup_steps, 0, error=InvalidExperiment)
        whole_number("recipe: steps", self.steps, 1, error=InvalidExperiment)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0. Steps after the last one keep its rate."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = min((step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1), 1.0)
        return self.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)
