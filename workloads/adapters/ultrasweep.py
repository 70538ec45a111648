"""This project's engine behind the interface of `workloads.adapters.seam`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.costs.traffic.sent import Traffic
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing.traffic import TrafficCounter, axes_of
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring.profiled import profile
from workloads.measuring.step import BeforeStep, Measurements, measure
from workloads.spec.experiment import Experiment


class Ultrasweep:
    """Implements `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        self.experiment = experiment
        self.groups = make_groups(experiment, rank, device)
        self.coordinates = {**self.groups.position, "dp": self.groups.data_rank}
        self._engine: Engine | None = None
        self.before_replay: BeforeStep | None = None
        """Called instead of ``before_step`` before the replay of a captured step."""

    @property
    def engine(self) -> Engine:
        """The engine that `build` has made."""
        assert self._engine is not None
        return self._engine

    def build(self) -> None:
        choose_attention(self.experiment)
        self._engine = build(self.experiment, self.groups)

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        counter = TrafficCounter(axes_of(self.groups), devices_per_node)
        measurements = measure(self.engine, spec, before_step, counter, self.before_replay)
        if counter.problem is not None:
            sys.stderr.write(f"the traffic of a step is not counted: {counter.problem}\n")
        return measurements, counter.traffic

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return profile(self.engine, folder, first_step, before_step)
