"""Pieces of gradients and weights from all ranks of a layout, and how they make whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.engine.build import Engine
from workloads.engine.parameters import NamedParameter
from workloads.experiment import Experiment
from workloads.mesh import data_degrees
from workloads.weights import Placement


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's piece of a gradient or of a weight, and what it is a piece of."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    placement: Placement
    position: dict[str, int]
    """On the axes of the layout; ``replicate`` and ``shard`` on the data mesh; ``copy`` counts a rank's own copies."""
    values: Tensor


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the unsharded model, put together from the ranks of a layout."""

    value: Tensor
    """Where no rank had a piece, it is NaN."""
    spread: float = 0.0
    """The largest difference between two copies of an element, over the largest element. Replicas, whole weights on
    tensor-parallel ranks and the two ends of a tied embedding must agree."""

    def joined_by(self, other: Tensor) -> Whole:
        """With another copy."""
        return Whole(self.value, max(self.spread, relative_difference(other, self.value)))


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """The largest difference of two elements over the largest expected element; infinite where one is not finite."""
    if value.shape != expected.shape:
        return float("inf")
    if not expected.numel() or torch.equal(value, expected):
        return 0.0
    value, expected = value.double(), expected.double()
    # A tensor of zeros is met by zeros alone.
    found = ((value - expected).abs().max() / expected.abs().max()).item()
    return found if found == found else float("inf")


def shards_of(engine: Engine, values: Callable[[NamedParameter], Tensor]) -> list[Shard]:
    """What ``values`` has of each parameter of this rank, copied to the host."""
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


def put_together(experiment: Experiment, ranks: Sequence[Sequence[Shard]]) -> dict[str, Whole]:
    """The whole tensors, by the names of `workloads.weights`, from the shards of all ranks in their order."""
    pieces: dict[tuple, dict[int, dict[int, Tensor]]] = {}
    kinds: dict[tuple, Shard] = {}
    shards_of_data = data_degrees(experiment)[1]
    for shards in ranks:
        for shard in shards:
            p = shard.position
            key = (shard.names, p["pp"], p["copy"], p["replicate"])
            kinds[key] = shard
            pieces.setdefault(key, {}).setdefault(p["tp"], {})[p["shard"]] = shard.values
    result: dict[str, Whole] = {}
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
            copies = tensors if dim is None else [torch.cat(tensors, dim)]
            for copy in copies:
                result[name] = result[name].joined_by(copy) if name in result else Whole(copy)
    return result
