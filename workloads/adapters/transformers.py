"""Runs a point with the models of `transformers` and the training loop of `accelerate`'s users.

FSDP2, gradient accumulation, activation checkpointing, compilation, mixed precision and clipping are accelerate's; the
optimizer is torch's fused AdamW. A rank imports both packages only after their versions have been checked: other
versions may not have what is imported.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from workloads.adapters.mixtures.transformers_balance import Balance
from workloads.adapters.steps import Ended, measure_steps
from workloads.adapters.transformers_kernels import choose
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.costs.traffic.sent import Traffic
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import step_batches
from workloads.engine.training.optimizer import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from workloads.measuring.step import BeforeStep, Measurements
from workloads.rules.installed_packages import missing, other_version
from workloads.spec import mesh
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


class Transformers:
    """Implements `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        if (unusable := missing(experiment) or other_version(experiment)) is not None:
            raise UnsupportedByEngine(unusable)
        self.experiment, self.device, self.clock = experiment, device, Clock(device)
        position = mesh.coordinates(experiment, rank)
        self.data_rank = position["dp_replicate"] * experiment.dp_shard + position["dp_shard"]
        self.coordinates = {**position, "dp": self.data_rank}
        warnings.filterwarnings("ignore", module=r"accelerate|transformers")
        try:
            choose(experiment, device)
            settings = importlib.import_module("workloads.adapters.transformers_accelerate")
            self._models = importlib.import_module("workloads.adapters.transformers_models")
        except ImportError as error:  # of what the packages import
            raise UnsupportedByEngine(f"transformers or accelerate cannot be imported: {error}") from None
        self._accelerator: Any = settings.accelerator_of(experiment, rank, device)
        self._model: Any = None
        self._optimizer: Any = None
        self._balance: Balance | None = None

    def build(self) -> None:
        e = self.experiment
        model = self._models.model_of(e, self.device)
        if e.model.moe is not None:
            self._balance = Balance(e, model)
        if e.recompute == "full" and not e.zero_stage:  # else by the FSDP plugin, around what is sharded together
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        return measure_steps(self._run, self.clock, self.device, spec, before_step), None

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return None, None

    def _run(self, step: int) -> Ended:
        e, accelerator, model, optimizer = self.experiment, self._accelerator, self._model, self._optimizer
        losses: list[torch.Tensor] = []
        norm: Any = None
        backward_end: Any = None
        for batch in step_batches(e, step, self.data_rank, self.device):
            tokens, targets = (rows.view(e.micro_batch_size, e.seq_len) for rows in batch)
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
                losses.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    backward_end = self.clock.mark()
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
        if self._balance is not None:
            self._balance.finish_step()
        mean = torch.stack(losses).double().mean() / e.dp
        dist.all_reduce(mean)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return Ended(float(mean), float(norm), backward_end)
