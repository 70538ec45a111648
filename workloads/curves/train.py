"""Trains one run on one rank, and says after every step what its curves show."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from workloads.engine.build import Engine, build, choose_attention
from workloads.engine.data import step_batches
from workloads.engine.groups import make_groups
from workloads.engine.text import held_out_steps, held_out_text
from workloads.experiment import Experiment
from workloads.recipe import Recipe
from workloads.step import _batches, _finish, run_step


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step; the columns of `results.curves` that a step fills."""

    step: int
    learning_rate: float
    loss: float
    """Of the global batch, in nats a token, before the update."""
    grad_norm: float
    """Before clipping."""
    held_out_loss: float | None = None
    """After the update, in nats a token; of the last step alone."""


def train_curve(rank: int, experiment: Experiment, recipe: Recipe, device: str) -> list[dict[str, object]]:
    """Every step as columns of `results.curves`, in an initialised process group. All ranks return the same.

    Raises what the engine raises: `workloads.step.Diverged` where a loss is not finite.
    """
    choose_attention(experiment)
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    engine = build(experiment, make_groups(experiment, rank, place), recipe)
    software = {
        "device": torch.cuda.get_device_name(place) if device == "cuda" else platform.machine(),
        "torch_version": torch.__version__,
    }
    return [{**software, **asdict(point)} for point in _points(engine, recipe)]


def _points(engine: Engine, recipe: Recipe) -> Iterator[CurvePoint]:
    for step in range(recipe.steps):
        pending = run_step(engine, step, _batches(engine, step), is_warmup=False)
        engine.clock.finish()
        record = _finish(engine, pending)
        assert record.loss is not None and record.grad_norm is not None
        held_out = held_out_loss(engine) if step == recipe.steps - 1 and recipe.data == "text" else None
        yield CurvePoint(step, recipe.rate(step), record.loss, record.grad_norm, held_out)


def held_out_loss(engine: Engine) -> float:
    """The mean loss of the held-out text in nats a token, the same on every rank.

    It runs whole steps, whose gradients are dropped: so it works on every layout and schedule without code of its own.
    """
    experiment, groups = engine.experiment, engine.groups
    steps = held_out_steps(experiment)
    total = torch.zeros((), dtype=torch.float64, device=groups.device)
    for step in range(steps):
        batches = step_batches(
            experiment, step, groups.data_rank, groups.device, groups.position["cp"], source=held_out_text
        )
        loss, _ = engine.pipeline.run(batches)
        if loss is not None and groups.axes["tp"].rank == 0:
            total += loss.double()
        for named in engine.optimizer.parameters:
            named.current.grad = None
    dist.all_reduce(total)
    mean = total.item() / steps
    assert math.isfinite(mean)
    return mean
