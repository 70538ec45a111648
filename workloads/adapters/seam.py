"""What a rank asks of a training engine, and where each engine's answer is found.

An engine is a class that is made of (experiment, rank, device) once the default process group exists. Making it makes
its groups, `build` its model, `measure` runs steps and fills step records. What an engine does not tell is None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from workloads.adapters.ultrasweep import Ultrasweep
from workloads.contract.protocol import Breakdown, MeasureSpec
from workloads.costs.traffic.sent import Traffic
from workloads.measuring.step import BeforeStep, Measurements
from workloads.rules.engine_support import refused
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import ENGINE, Experiment


@dataclass(frozen=True, slots=True)
class Installable:
    """An engine that is imported by the rank that needs it, and not before: it may not be installed."""

    module: str
    name: str
    """Of the class."""
    extra: str
    """Of ``pip install 'ultrasweep[EXTRA]'``."""


OTHERS = {
    "torchtitan": Installable("workloads.adapters.torchtitan", "Torchtitan", "torchtitan"),
    "megatron": Installable("workloads.adapters.megatron", "Megatron", "megatron"),
}


class RankEngine(Protocol):
    """One rank's side of an engine."""

    coordinates: dict[str, int]
    """``dp``, ``tp``, ``cp``, ``pp`` and further coordinates of this rank."""

    def build(self) -> None:
        """Make the model, with the seed's weights, and the optimizer."""

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        """Run warm-up and timed steps, ``before_step(step, is_warmup)`` before each; and what a step sends, or None."""

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        """Where the time of one more step goes, and the trace's file name; None where the engine cannot say."""


def engine_of(experiment: Experiment, rank: int, device: torch.device) -> RankEngine:
    """The experiment's engine. Raises `UnsupportedByEngine` when it cannot run the experiment or is not installed."""
    if found := refused(experiment, device.type):
        raise UnsupportedByEngine("; ".join(found))
    if experiment.engine == ENGINE:
        return Ultrasweep(experiment, rank, device)
    other = OTHERS[experiment.engine]
    try:
        make: Callable[[Experiment, int, torch.device], RankEngine]
        make = getattr(importlib.import_module(other.module), other.name)
    except ModuleNotFoundError as error:
        raise UnsupportedByEngine(
            f"engine={experiment.engine} needs the package {error.name}: pip install 'ultrasweep[{other.extra}]'"
        ) from None
    return make(experiment, rank, device)
