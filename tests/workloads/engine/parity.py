"""The body of the parity tests: train one layout on all its ranks, hand back what to compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.engine.build import build, choose_attention
from workloads.engine.groups import make_groups
from workloads.experiment import Experiment
from workloads.step import _batches, _finish, run_step


@dataclass
class Shard:
    """One local gradient and what it is a piece of."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tp_dim: int | None
    position: dict[str, int]
    gradient: Tensor


@dataclass
class RankTrace:
    losses: list[float]
    grad_norms: list[float]
    shards: list[list[Shard]]
    """Of each step."""


def train_rank(rank: int, experiment: Experiment, steps: int, device: str = "cpu") -> RankTrace:
    choose_attention(experiment)
    torch.set_default_dtype(torch.float64 if experiment.precision == "fp64" else torch.float32)
    try:
        groups = make_groups(experiment, rank, torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
        engine = build(experiment, groups)
        shards: list[list[Shard]] = []
        update = engine.optimizer.step

        def keep_gradients_then_update(norm: Tensor) -> None:
            shards.append([])
            for named in engine.optimizer.parameters:
                shards[-1].append(
                    Shard(
                        names=tuple(part.name for part in named.spec.parts),
                        shapes=tuple(part.shape for part in named.spec.parts),
                        tp_dim=named.spec.tp_dim,
                        position=groups.position,
                        gradient=named.gradient.cpu().clone(),
                    )
                )
            update(norm)

        engine.optimizer.step = keep_gradients_then_update  # type: ignore[method-assign]
        records = []
        for step in range(steps):
            pending = run_step(engine, step, _batches(engine, step), is_warmup=False)
            engine.clock.finish()
            records.append(_finish(engine, pending))
        return RankTrace([r.loss for r in records], [r.grad_norm for r in records], shards)
    finally:
        torch.set_default_dtype(torch.float32)


def full_gradients(experiment: Experiment, traces: list[RankTrace], step: int) -> dict[str, Tensor]:
    """Put the ranks' gradient shards together; replicas must agree, and so must the copies of a tied embedding."""
    pieces: dict[tuple, dict[int, dict[int, Tensor]]] = {}
    kinds: dict[tuple, Shard] = {}
    for trace in traces:
        for shard in trace.shards[step]:
            p = shard.position
            key = (shard.names, p["pp"], p["dp_replicate"])
            kinds[key] = shard
            pieces.setdefault(key, {}).setdefault(p["tp"], {})[p["dp_shard"]] = shard.gradient
    result: dict[str, Tensor] = {}
    for key, by_tp in pieces.items():
        kind = kinds[key]
        by_part: list[list[Tensor]] = [[] for _ in kind.names]
        for tp_rank in range(experiment.tp):
            whole = torch.cat([by_tp[tp_rank][i] for i in range(experiment.dp_shard)])
            split = experiment.tp if kind.tp_dim == 0 else 1
            rows = [shape[0] // split for shape in kind.shapes]
            for part, piece in zip(by_part, whole.split(rows), strict=True):
                part.append(piece)
        for name, tensors in zip(kind.names, by_part, strict=True):
            value = tensors[0] if kind.tp_dim is None else torch.cat(tensors, kind.tp_dim)
            if kind.tp_dim is None:
                for other in tensors[1:]:
                    torch.testing.assert_close(other, value, rtol=1e-12, atol=0)
            if name in result:
                torch.testing.assert_close(value, result[name], rtol=1e-12, atol=1e-18)
            result[name] = value
    return result
