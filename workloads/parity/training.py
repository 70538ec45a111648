"""Trains one layout for a few steps on one rank and keeps its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workloads.engine.collectives.groups import Groups, make_groups
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring.step import Diverged, _batches, _finish, run_step
from workloads.parity.activations import Piece, Recorder
from workloads.parity.shards import Shard, shards_of
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One rank's results of one step."""

    loss: float
    grad_norm: float
    gradients: list[Shard]
    """Gradients before clipping."""
    weights: list[Shard]
    """Weights after the update."""
    activations: list[Piece] = field(default_factory=list)
    activation_gradients: list[Piece] = field(default_factory=list)
    mtp_loss: float | None = None
    """Mean loss of modules of multi-token prediction; None without any."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    initial: list[Shard]
    steps: list[StepTrace]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def mtp_losses(self) -> list[float]:
        """0 without modules of multi-token prediction."""
        return [step.mtp_loss or 0.0 for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [step.grad_norm for step in self.steps]


def train_rank(
    rank: int,
    experiment: Experiment,
    steps: int,
    device: str = "cpu",
    *,
    gradient_scale: float = 1.0,
    with_activations: bool = False,
    builder: Callable[[Experiment, Groups], Engine] = build,
) -> RankTrace:
    """Train in an initialised process group. ``gradient_scale`` multiplies gradients before they are clipped.

    Raises `workloads.measuring.step.Diverged` if a loss is not finite, and the engine's other errors.
    """
    choose_attention(experiment)
    with _default_dtype(torch.float64 if experiment.precision == "fp64" else torch.float32):
        groups = make_groups(experiment, rank, torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
        engine = builder(experiment, groups)
        recorder = Recorder(engine) if with_activations else None
        gradients: list[list[Shard]] = []
        finish, update = engine.optimizer.finish_gradients, engine.optimizer.step

        def finish_and_scale() -> None:
            finish()
            for named in engine.optimizer.parameters:
                named.gradient.mul_(gradient_scale)

        def keep_gradients_then_update(norm: Tensor) -> Tensor | None:
            scale = engine.optimizer.loss_scale
            factor = 1.0 if scale is None else 1.0 / scale.value
            gradients.append(shards_of(engine, lambda named: named.gradient * factor))
            return update(norm)

        if gradient_scale != 1.0:
            engine.optimizer.finish_gradients = finish_and_scale  # type: ignore[method-assign]
        engine.optimizer.step = keep_gradients_then_update  # type: ignore[method-assign]
        trace = RankTrace(_weights(engine), [])
        for step in range(steps):
            pending = run_step(engine, step, _batches(engine, step), is_warmup=False)
            engine.clock.finish()
            record = _finish(engine, pending)
            if record.skipped:
                raise Diverged(f"step {step}: gradients overflow at a loss scale of {record.loss_scale:g}")
            assert record.loss is not None and record.grad_norm is not None
            kept = recorder.take() if recorder is not None else ([], [])
            trace.steps.append(
                StepTrace(
                    record.loss, record.grad_norm, gradients[step], _weights(engine), *kept, mtp_loss=record.mtp_loss
                )
            )
        return trace


def _weights(engine: Engine) -> list[Shard]:
    return shards_of(engine, lambda named: local_shard(named.current))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
