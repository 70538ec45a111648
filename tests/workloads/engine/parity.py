"""What the parity tests are made of: train one layout on all its ranks, and compare it with the unsharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.pool import Pool
from tests.workloads.engine import reference
from workloads.engine import optimizer
from workloads.engine.build import Engine, build, choose_attention
from workloads.engine.groups import make_groups
from workloads.engine.parameters import NamedParameter, local_shard
from workloads.experiment import Experiment, ModelSpec
from workloads.mesh import data_degrees
from workloads.step import _batches, _finish, run_step
from workloads.weights import Placement

STEPS = 2
TOLERANCE = 1e-12


@dataclass
class Shard:
    """One rank's piece of a gradient or of a weight, and what it is a piece of."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    placement: Placement
    position: dict[str, int]
    """On the axes of the layout; ``replicate`` and ``shard`` on the data mesh; ``copy`` counts a rank's own copies."""
    values: Tensor


@dataclass
class RankTrace:
    losses: list[float]
    grad_norms: list[float]
    gradients: list[list[Shard]]
    """Of each step."""
    weights: list[Shard]
    """After the last step."""


def train_rank(
    rank: int,
    experiment: Experiment,
    steps: int,
    device: str = "cpu",
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
) -> RankTrace:
    """``gradient_scale``: multiplies gradients before they are clipped. ``clip_at``: a largest norm for this test."""
    choose_attention(experiment)
    largest_norm = optimizer.MAX_GRAD_NORM
    if clip_at is not None:
        optimizer.MAX_GRAD_NORM = clip_at
    torch.set_default_dtype(torch.float64 if experiment.precision == "fp64" else torch.float32)
    try:
        groups = make_groups(experiment, rank, torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
        engine = build(experiment, groups)
        gradients: list[list[Shard]] = []
        finish, update = engine.optimizer.finish_gradients, engine.optimizer.step

        def finish_and_scale() -> None:
            finish()
            for named in engine.optimizer.parameters:
                named.gradient.mul_(gradient_scale)

        def keep_gradients_then_update(norm: Tensor) -> None:
            gradients.append(_shards(engine, lambda named: named.gradient))
            update(norm)

        if gradient_scale != 1.0:
            engine.optimizer.finish_gradients = finish_and_scale  # type: ignore[method-assign]
        engine.optimizer.step = keep_gradients_then_update  # type: ignore[method-assign]
        records = []
        for step in range(steps):
            pending = run_step(engine, step, _batches(engine, step), is_warmup=False)
            engine.clock.finish()
            records.append(_finish(engine, pending))
        weights = _shards(engine, lambda named: local_shard(named.current))
        return RankTrace([r.loss for r in records], [r.grad_norm for r in records], gradients, weights)
    finally:
        optimizer.MAX_GRAD_NORM = largest_norm
        torch.set_default_dtype(torch.float32)


def _shards(engine: Engine, values: Callable[[NamedParameter], Tensor]) -> list[Shard]:
    mesh = engine.groups.data_mesh
    data = {name: mesh[name].get_local_rank() for name in ("replicate", "shard")}
    seen: Counter[tuple[str, ...]] = Counter()
    shards = []
    for named in engine.optimizer.parameters:
        names = tuple(part.name for part in named.spec.parts)
        shards.append(
            Shard(
                names=names,
                shapes=tuple(part.shape for part in named.spec.parts),
                placement=named.spec.placement,
                position={**engine.groups.position, **data, "copy": seen[names]},
                values=values(named).cpu().clone(),
            )
        )
        seen[names] += 1
    return shards


def put_together(experiment: Experiment, ranks: list[list[Shard]]) -> dict[str, Tensor]:
    """The whole tensors from the shards of all ranks. Replicas must agree, and so must copies of a tied embedding."""
    pieces: dict[tuple, dict[int, dict[int, Tensor]]] = {}
    kinds: dict[tuple, Shard] = {}
    shards_of_data = data_degrees(experiment)[1]
    for shards in ranks:
        for shard in shards:
            p = shard.position
            key = (shard.names, p["pp"], p["copy"], p["replicate"])
            kinds[key] = shard
            pieces.setdefault(key, {}).setdefault(p["tp"], {})[p["shard"]] = shard.values
    result: dict[str, Tensor] = {}
    for key, by_tp in pieces.items():
        kind = kinds[key]
        dim = kind.placement.dim("tp")
        by_part: list[list[Tensor]] = [[] for _ in kind.names]
        for tp_rank in range(experiment.tp):
            whole = torch.cat([by_tp[tp_rank][i] for i in range(shards_of_data)])
            rows = [shape[0] // (experiment.tp if dim == 0 else 1) for shape in kind.shapes]
            for part, piece in zip(by_part, whole.split(rows), strict=True):
                part.append(piece)
        for name, tensors in zip(kind.names, by_part, strict=True):
            value = tensors[0] if dim is None else torch.cat(tensors, dim)
            if dim is None:
                for other in tensors[1:]:
                    torch.testing.assert_close(other, value, rtol=1e-12, atol=0)
            if name in result:
                torch.testing.assert_close(value, result[name], rtol=1e-12, atol=1e-18)
            result[name] = value
    return result


def model(**changes: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "name": "parity",
        "num_layers": 5,  # not a multiple of 2 or 4: stages differ
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 48,
        "vocab_size": 96,
    }
    return ModelSpec(**{**shape, **changes})


def experiment(
    tie: bool = False, qk_norm: bool = False, num_kv_heads: int = 2, rounds: int | None = None, **layout: Any
) -> Experiment:
    """A small case in float64. ``rounds``: micro-batches of one sequence, instead of a global batch of 8."""
    fields = {"global_batch_size": 8, "seq_len": 16, "precision": "fp64", **layout}
    if rounds is not None:
        ranks = fields.get("dp") or fields.get("dp_replicate", 1) * fields.get("dp_shard", 1)
        fields |= {"global_batch_size": rounds * ranks, "micro_batch_size": 1}
    shape = model(tie_embeddings=tie, qk_norm=qk_norm, num_kv_heads=num_kv_heads)
    return Experiment.canonical(model=shape, **fields)


@cache
def trained_reference(
    pool: Pool,
    device: str,
    model: ModelSpec,
    global_batch_size: int,
    seq_len: int = 16,
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
) -> reference.Trace:
    case = Experiment.canonical(model=model, global_batch_size=global_batch_size, seq_len=seq_len, precision="fp64")
    (weights,) = pool.run(reference.draw_weights, 1, case, device)
    return reference.train(case, weights, STEPS, gradient_scale, clip_at)


def check(
    pool: Pool,
    case: Experiment,
    device: str = "cpu",
    body: Callable[..., RankTrace] = train_rank,
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
) -> None:
    """Train the layout and the reference, and compare losses, gradient norms, gradients and the final weights."""
    how = gradient_scale, clip_at
    expected = trained_reference(pool, device, case.model, case.global_batch_size, case.seq_len, *how)
    traces = pool.run(body, case.world_size, case, STEPS, device, *how, timeout_s=150)
    for trace in traces:
        torch.testing.assert_close(trace.losses, expected.losses, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=0)
    for step in range(STEPS):
        compare(case, [trace.gradients[step] for trace in traces], expected.gradients[step], f"gradient, step {step}")
    compare(case, [trace.weights for trace in traces], expected.weights, "weight after the last step")


def compare(case: Experiment, ranks: list[list[Shard]], expected: dict[str, Tensor], what: str) -> None:
    tensors = put_together(case, ranks)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        error = ((tensor - expected[name]).abs().max() / expected[name].abs().max()).item()
        assert error < TOLERANCE, f"{what}, {name}: relative error {error:.1e}"
