"""The interface between a rank and a training engine, and the implementation for each engine.

An engine is a class whose constructor takes (experiment, rank, device) once the default process group exists. The
constructor makes the process groups, `build` the model; `measure` runs steps and fills step records. Values that an
engine does not report are None.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from workloads.adapters.ultrasweep import Ultrasweep
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.costs.traffic.sent import Traffic
from workloads.measuring.step import BeforeStep, Measurements
from workloads.rules.engine_support import refused
from workloads.rules.installed_engines import unusable_here, works
from workloads.spec.engine_versions import ENGINE, runs_with
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Installable:
    """An engine that is imported only by a rank that needs it, because it may not be installed."""

    module: str
    name: str
    """Name of the class."""
    extra: str
    """EXTRA in ``pip install 'ultrasweep[EXTRA]'``."""


OTHERS = {
    "torchtitan": Installable("workloads.adapters.torchtitan", "Torchtitan", "torchtitan02"),
    "torchtitan 0.3.0": Installable("workloads.adapters.torchtitan03", "Torchtitan03", "torchtitan"),
    "megatron": Installable("workloads.adapters.megatron", "Megatron", "megatron"),
    "transformers": Installable("workloads.adapters.transformers", "Transformers", "transformers"),
}
"""By engine, or by engine and version of its package."""


class RankEngine(Protocol):
    """One rank's side of an engine."""

    coordinates: dict[str, int]
    """``dp``, ``tp``, ``cp``, ``pp`` and further coordinates of this rank."""

    def build(self) -> None:
        """Make the model, with our seed's weights, and the optimizer."""

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        """Run warm-up and timed steps, calling ``before_step(step, is_warmup)`` before each.

        Returns the measurements, and the traffic that one step sends (None if unknown).
        """

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        """Profile one more step. Returns its time breakdown and the trace's file name; None for what the engine cannot
        provide."""


_SEGMENTS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of one variable of torch's allocator: the present one and the older one."""


def set_environment(experiment: Experiment) -> None:
    """Set the environment variables that an engine's users set, unless they are set already. Call it before CUDA starts
    in this process.

    Segments of memory that grow let a tensor use the memory of several freed ones: six layouts of one device reserved
    up to 24 % more than they allocated without them, and up to 9 % with them (results/recorded/h200_flash4/NOTE.md).
    torchtitan's training script sets them too. A graph's collectives must then not register their buffers
    (``NCCL_GRAPH_REGISTER``): NCCL cannot register memory that is mapped in parts.

    Megatron-Core overlaps tensor parallelism only with one connection to the device (its option
    ``tp_comm_overlap`` and its training script ask for it).
    """
    engine = experiment.engine
    if engine in (ENGINE, "torchtitan") and not any(name in os.environ for name in _SEGMENTS):
        os.environ[_SEGMENTS[0]] = "expandable_segments:True"
    if engine == ENGINE:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if engine == "megatron" and runs_with(experiment.engine_version) and experiment.tp > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def engine_of(experiment: Experiment, rank: int, device: torch.device) -> RankEngine:
    """Make the experiment's engine. Raises `UnsupportedByEngine` if it cannot run the experiment or is not
    installed."""
    if reasons := refused(experiment, device.type):
        raise UnsupportedByEngine("; ".join(reasons))
    if experiment.engine == ENGINE:
        return Ultrasweep(experiment, rank, device)
    if (unusable := unusable_here(experiment)) is not None:
        raise UnsupportedByEngine(unusable)
    release = f"{experiment.engine} {experiment.engine_version.partition('+')[0]}"
    other = OTHERS.get(release) or OTHERS[experiment.engine]
    try:
        make: Callable[[Experiment, int, torch.device], RankEngine]
        make = getattr(importlib.import_module(other.module), other.name)
    except ModuleNotFoundError as error:
        raise UnsupportedByEngine(
            f"engine={experiment.engine} needs the package {error.name}: pip install 'ultrasweep[{other.extra}]'"
        ) from None
    except ImportError as error:  # a package of the right version without a name that the release has
        raise UnsupportedByEngine(f"{release} cannot be imported ({error}); {works(experiment.engine)}") from None
    return make(experiment, rank, device)
