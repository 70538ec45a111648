"""Runs a point with torchtitan 0.3's trainer: our shapes, weights and tokens, its model and training step.

Its `Trainer` is subclassed and its ``train_step`` is unchanged. Two things that it expects from torch 2.14 are replaced
under torch 2.13: how parameters carry their sharding (`torchtitan03_config.BACKEND`) and pipeline schedules that take
lists of micro-batches (`_take_lists`).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import Tensor
from torchtitan.config import Configurable
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from workloads.adapters.graph_memory import GraphMemory
from workloads.adapters.steps import Ended, measure_steps
from workloads.adapters.torchtitan03_config import has_cuda_graphs, trainer_config
from workloads.adapters.torchtitan03_models import fill
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.costs.traffic.sent import Traffic
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import step_batches
from workloads.measuring.step import BeforeStep, Measurements
from workloads.spec import mesh
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


class Torchtitan03:
    """Implements `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        self._cpu: ModuleType | None = None
        if device.type == "cpu":
            self._cpu = importlib.import_module("workloads.adapters.torchtitan03_cpu")
            self._cpu.use_cpu()
        logging.getLogger().setLevel(logging.WARNING)
        self.experiment, self.device, self.clock = experiment, device, Clock(device)
        position = mesh.coordinates(experiment, rank)
        self.data_rank = position["dp_replicate"] * experiment.dp_shard + position["dp_shard"]
        self.coordinates = {**position, "dp": self.data_rank}
        self._trainer: _Trainer | None = None

    def build(self) -> None:
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)  # the trainer reads its device from this variable
        # The trainer does this only if it makes the process group itself: recomputation finds its meshes by thread.
        torch.autograd.set_multithreading_enabled(False)
        self._trainer = _Trainer(self.experiment, self.clock)
        if self._cpu is not None:
            self._cpu.use_gloo(self._trainer.model_parts)
        fill(self._trainer.model_parts, self.experiment)

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        e = self.experiment
        if self.clock.cuda and has_cuda_graphs(e) and e.num_microbatches == 1 and spec.warmup_steps < 2:
            raise UnsupportedByEngine(
                f"its second step is captured as a CUDA graph, but measure.warmup_steps is {spec.warmup_steps}; "
                "use 2 or more"
            )
        return measure_steps(self._run, self.clock, self.device, spec, before_step), None

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return None, None

    def _run(self, step: int) -> Ended:
        e, trainer = self.experiment, self._trainer
        assert trainer is not None
        trainer.step = step + 1
        trainer.graph_memory.start_step()
        trainer.train_step(trainer.batch_generator(self._batches(step)))
        loss, norm = trainer.metrics_processor.loss_and_norm
        if e.pp > 1:  # the other stages report -1
            on_stage = torch.tensor(loss if trainer.pp_has_last_stage else 0.0, dtype=torch.float64, device=self.device)
            dist.all_reduce(on_stage, group=trainer.parallel_dims.get_mesh("pp").get_group())
            loss = float(on_stage)
        return Ended(loss, norm, trainer.backward_end, trainer.graph_memory.peak_bytes)

    def _batches(self, step: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Micro-batches of whole sequences, which the trainer splits over cp, with the position of every token."""
        e = self.experiment
        for batch in step_batches(e.replace(cp=1), step, self.data_rank, torch.device("cpu")):
            tokens, targets = (t.view(e.micro_batch_size, e.seq_len) for t in batch)
            yield {"input": tokens, "positions": torch.arange(e.seq_len).expand_as(tokens).contiguous()}, targets


class _Trainer(Trainer):
    """torchtitan's trainer in an existing process group, on shapes and batches from outside."""

    def __init__(self, experiment: Experiment, clock: Clock) -> None:
        self.clock = clock
        self.backward_end: Any = None
        self.graph_memory = GraphMemory()
        self._is_graphed = clock.cuda and has_cuda_graphs(experiment)
        super().__init__(trainer_config(experiment, _LastMetrics.Config()))
        if experiment.pp > 1:
            _take_lists(self.pp_schedule)

    def init_distributed(self) -> ParallelDims:
        """Axes of the layout over the process group that the rank has made."""
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    def forward_backward_step(self, **batch: Any) -> Tensor:
        passes = partial(super().forward_backward_step, **batch)
        loss = self.graph_memory.call(passes) if self._is_graphed else passes()
        self.backward_end = self.clock.mark()
        return loss


class _LastMetrics(Configurable):
    """Replaces the trainer's metrics processor: keeps the last step's numbers, writes nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    color = torchtitan.tools.utils.NoColor()

    def __init__(self, config: Config, **_: Any) -> None:
        self.loss_and_norm = (0.0, 0.0)
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.device_memory_monitor = self
        self.device_name = "H200"  # for the trainer's table of peak rates, which is not used
        self.max_reserved_gib = self.max_reserved_pct = 0.0

    def get_peak_stats(self) -> _LastMetrics:
        return self

    def should_log(self, step: int) -> bool:
        self.data_loading_times.clear()
        return True

    def log(self, step: int, loss: float, largest: float, grad_norm: float, extra_metrics: object = None) -> None:
        self.loss_and_norm = (loss, grad_norm)


def _take_lists(schedule: Any) -> None:
    """Replace ``schedule.step`` if it has no argument for lists of micro-batches, as torchtitan passes them: torch's
    pipeline schedules take them from 2.14 on, and before a whole batch alone, which they split themselves."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return
    stages = getattr(schedule, "_stages", None) or [schedule._stage]

    def step(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any) -> None:
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)

    schedule.step = step
