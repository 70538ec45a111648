"""Runs a point with torchtitan 0.2.2's trainer: our shapes, weights and tokens, its model and training step.

Its `Trainer` is subclassed and its ``train_step`` is unchanged. Three faults around it, which would give wrong results
without an error, are corrected:

- Under a pipeline it runs backward on the *sum* of the losses: gradients were tokens_per_step times too large, and so
  were their norms before clipping. The loss function divides by the tokens.
- Its DDP divides by the ranks after the loss was divided by all tokens: the loss function multiplies by the ranks.
- It sets ``context_parallel_rotate_method`` for validation but not for training, which then always gathers: it is set
  here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import Tensor
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec as specs
from torchtitan.train import Trainer

from workloads.adapters.steps import Ended, measure_steps
from workloads.adapters.torchtitan_config import FLOAT8, NAME, job_config
from workloads.adapters.torchtitan_models import fill, train_spec
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.costs.traffic.sent import Traffic
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import step_batches
from workloads.measuring.step import BeforeStep, Measurements
from workloads.spec import mesh
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


class Torchtitan:
    """Implements `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        if experiment.precision in FLOAT8 and importlib.util.find_spec("torchao") is None:
            raise UnsupportedByEngine(
                f"precision={experiment.precision} of torchtitan needs the package torchao: "
                "pip install 'ultrasweep[torchtitan02]'"
            )
        self._cpu: ModuleType | None = None
        if device.type == "cpu":
            self._cpu = importlib.import_module("workloads.adapters.torchtitan_cpu")
            self._cpu.use_cpu()
        logging.getLogger().setLevel(logging.WARNING)
        self.experiment, self.device, self.clock = experiment, device, Clock(device)
        position = mesh.coordinates(experiment, rank)
        self.data_rank = position["dp_replicate"] * experiment.dp_shard + position["dp_shard"]
        self.coordinates = {**position, "dp": self.data_rank}
        self._trainer: _Trainer | None = None

    def build(self) -> None:
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)  # the trainer reads its device from this variable
        self._trainer = _Trainer(self.experiment, self.clock)
        if self._cpu is not None:
            self._cpu.use_gloo(self._trainer.model_parts)
        fill(self._trainer.model_parts, self.experiment)

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        return measure_steps(self._run, self.clock, self.device, spec, before_step), None

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return None, None

    def _run(self, step: int) -> Ended:
        e, trainer = self.experiment, self._trainer
        assert trainer is not None
        rows = [
            tuple(t.view(e.micro_batch_size, e.seq_len) for t in batch)
            # the trainer splits sequences over cp
            for batch in step_batches(e.replace(cp=1), step, self.data_rank, torch.device("cpu"))
        ]
        if e.pp > 1:  # the trainer's schedules split one large batch
            rows = [(torch.cat([tokens for tokens, _ in rows]), torch.cat([targets for _, targets in rows]))]
        trainer.step = step + 1
        trainer.train_step(trainer.batch_generator(({"input": tokens}, targets) for tokens, targets in rows))
        loss, norm = trainer.metrics_processor.loss_and_norm
        if e.pp > 1:  # the other stages report -1
            on_stage = torch.tensor(loss if trainer.pp_has_last_stage else 0.0, dtype=torch.float64, device=self.device)
            dist.all_reduce(on_stage, group=trainer.parallel_dims.get_mesh("pp").get_group())
            loss = float(on_stage)
        return Ended(loss / trainer.loss_factor, norm, trainer.backward_end)


class _Trainer(Trainer):
    """torchtitan's trainer in an existing process group, on shapes and batches from outside."""

    def __init__(self, experiment: Experiment, clock: Clock) -> None:
        self.experiment, self.clock = experiment, clock
        self.backward_end: Any = None
        self.loss_factor = 1.0
        if experiment.pp > 1:
            self.loss_factor = 1.0 / experiment.tokens_per_step
        elif experiment.zero_stage == 0:
            self.loss_factor = float(experiment.dp)
        spec = train_spec(experiment)
        spec.build_dataloader_fn = spec.state_dict_adapter = None
        # None of its tokens are read, but where it makes masks it asks for one.
        spec.build_tokenizer_fn = (lambda *_: object()) if experiment.model.layers is not None else None
        spec.build_metrics_processor_fn = lambda *_: _LastMetrics()
        spec.build_loss_fn = lambda config, **_: _scaled(self.loss_factor, config)
        specs._extra_train_specs[NAME] = spec
        super().__init__(job_config(experiment))
        if experiment.cp > 1:
            set_rotate_method(self.job_config.parallelism.context_parallel_rotate_method)

    def init_distributed(self) -> ParallelDims:
        """Axes of the layout over the process group that the rank has made."""
        e = self.experiment
        return ParallelDims(
            dp_replicate=e.dp_replicate,
            dp_shard=e.dp_shard,
            cp=e.cp,
            tp=e.tp,
            pp=e.pp,
            ep=e.ep,
            etp=1,
            world_size=e.world_size,
        )

    def forward_backward_step(self, **batch: Any) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self.backward_end = self.clock.mark()
        return loss


class _LastMetrics:
    """Replaces the trainer's metrics processor: keeps the last step's numbers, writes nothing."""

    color = torchtitan.tools.utils.NoColor()

    def __init__(self) -> None:
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


def _scaled(factor: float, config: JobConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """torchtitan's loss, compiled if its configuration says so, times a factor."""
    plain = build_cross_entropy_loss(config)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return plain(logits, targets) * factor

    return loss
