"""Layouts that fit, with their predictions, as `sweep.advising.ranking` finds them."""

from __future__ import annotations

from dataclasses import dataclass

from sweep.grids.step_time import StepTime
from sweep.predicting.engine_memory import EnginePeak
from workloads.costs.memory.estimate import StageMemory
from workloads.spec.experiment import Experiment

Family = tuple[int, ...]
Peak = StageMemory | EnginePeak


def family_of(e: Experiment) -> Family:
    """Degrees, micro-batch and ZeRO stage of a layout."""
    return e.dp, e.tp, e.cp, e.pp, e.ep, e.etp, e.micro_batch_size, e.zero_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout that fits, with its predictions."""

    experiment: Experiment
    time: StepTime
    memory: Peak

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.experiment.tokens_per_step / self.time.step_time_s / self.experiment.world_size


@dataclass(slots=True, kw_only=True)
class Ranked:
    """The best layouts of one number of devices by `StepTime.cautious_s`, best first, one per family."""

    size: int
    best: list[RankedLayout]
    timed: int
    """Number of layouts timed in full."""
    open_bound_s: float | None = None
    """If the search was given up: lower estimate of the remaining layouts' cautious step times. None: the search was
    complete."""
