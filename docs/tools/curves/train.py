"""Trains one run on one rank, and returns the values of its curves after every step."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from docs.tools.curves.book import held_out_steps, held_out_text, training_text
from docs.tools.curves.recipe import TrainingRecipe
from workloads.costs.shape.partition import experiment_layers
from workloads.engine.collectives.groups import make_groups
from workloads.engine.layers.routing import Router
from workloads.engine.layers.transformer import routers
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.engine.training.data import step_batches
from workloads.measuring.step import _batches, _finish, run_step
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step: the columns of `docs.tools.curves.curve_table` that a step fills."""

    step: int
    learning_rate: float
    loss: float
    """Mean loss of the global batch in nats per token, before the update."""
    grad_norm: float | None
    """Gradient norm before clipping; None if it overflowed."""
    loss_scale: float | None
    skipped: bool | None
    load_entropy: list[float] | None
    """Entropy of the step's tokens over the experts relative to an even load, for every layer with learned routing.
    None without such layers."""
    load_imbalance: list[float] | None
    """Tokens of the most loaded expert over the mean, for the same layers."""
    held_out_loss: float | None = None
    """Held-out loss after the update, in nats per token; only for the last step."""


def train_curve(rank: int, experiment: Experiment, recipe: TrainingRecipe, device: str) -> list[dict[str, object]]:
    """Every step as columns of `docs.tools.curves.curve_table`, in an initialised process group. All ranks return the
    same.

    Raises the engine's errors: `workloads.measuring.step.Diverged` if a loss is not finite.
    """
    choose_attention(experiment)
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    source = training_text if recipe.data == "text" else None
    engine = build(experiment, make_groups(experiment, rank, place), recipe.rate, source)
    software = {
        "device": torch.cuda.get_device_name(place) if device == "cuda" else platform.machine(),
        "torch_version": torch.__version__,
    }
    return [{**software, **asdict(point)} for point in _points(engine, recipe)]


def _points(engine: Engine, recipe: TrainingRecipe) -> Iterator[CurvePoint]:
    loads = Loads(engine)
    for step in range(recipe.steps):
        pending = run_step(engine, step, _batches(engine, step), is_warmup=False)
        engine.clock.finish()
        record = _finish(engine, pending)
        assert record.loss is not None
        of_experts = loads.of_step()
        held_out = held_out_loss(engine) if step == recipe.steps - 1 and recipe.data == "text" else None
        yield CurvePoint(
            step=step,
            learning_rate=engine.optimizer.learning_rate,
            loss=record.loss,
            grad_norm=record.grad_norm,
            loss_scale=record.loss_scale,
            skipped=record.skipped,
            load_entropy=None if of_experts is None else [entropy(load) for load in of_experts],
            load_imbalance=None if of_experts is None else [max(load) * len(load) / sum(load) for load in of_experts],
            held_out_loss=held_out,
        )


class Loads:
    """Tokens that the routers of all layers sent to their experts in each step."""

    def __init__(self, engine: Engine) -> None:
        e, self.groups = engine.experiment, engine.groups
        moe, layers = e.model.moe, experiment_layers(e)
        self.own: list[tuple[int, Router]] = []
        if moe is None or e.routing != "learned":
            return
        self.routed, self.experts = range(moe.num_dense_layers, e.model.num_layers), moe.num_experts
        for number, chunk in enumerate(engine.chunks):
            in_chunk = [layer for layer in layers[self.groups.stage_of(number)] if layer in self.routed]
            self.own += zip(in_chunk, routers(chunk), strict=True)
        self.before = self._totals()

    def of_step(self) -> list[list[float]] | None:
        """Tokens of every expert, for every routed layer of the model, since the last call, up to a common factor.

        None without learned routing. A collective of all ranks.
        """
        if not hasattr(self, "before"):
            return None
        now = self._totals()
        # Ranks of one tensor-parallel group may hold the same tokens: then all experts are counted equally often.
        of_step = now - self.before
        self.before = now
        dist.all_reduce(of_step)
        loads: list[list[float]] = of_step.double().tolist()
        return loads

    def _totals(self) -> Tensor:
        totals = torch.zeros(len(self.routed), self.experts, dtype=torch.int64, device=self.groups.device)
        for layer, router in self.own:
            totals[layer - self.routed.start] = router.total
        return totals


def entropy(load: Sequence[float]) -> float:
    """Entropy of shares relative to even shares: 1 is even, 0 is one expert for all."""
    shares = [value / sum(load) for value in load if value > 0]
    return -sum(share * math.log(share) for share in shares) / math.log(len(load))


def held_out_loss(engine: Engine) -> float:
    """Mean loss of the held-out text in nats per token, the same on every rank.

    It runs whole steps and drops their gradients, so it works on every layout and schedule without special code. The
    routers' counters are restored afterwards.
    """
    counted = [router.load for chunk in engine.chunks for router in routers(chunk)]
    before = [load.clone() for load in counted]
    experiment, groups = engine.experiment, engine.groups
    steps = held_out_steps(experiment)
    total = torch.zeros((), dtype=torch.float64, device=groups.device)
    for step in range(steps):
        batches = step_batches(
            experiment, step, groups.data_rank, groups.device, groups.position["cp"], source=held_out_text
        )
        losses, _ = engine.pipeline.run(batches)
        if losses and groups.axes["tp"].rank == 0:
            total += losses[0].double()
        for named in engine.optimizer.parameters:
            named.current.grad = None
    for load, was in zip(counted, before, strict=True):
        load.copy_(was)
    dist.all_reduce(total)
    mean = total.item() / steps
    assert math.isfinite(mean)
    return mean
