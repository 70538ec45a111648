"""Assembles whole gradients and weights from the shards of all ranks of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.engine.collectives.parameters import NamedParameter, ParameterSpec
from workloads.engine.training.build import Engine
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import expert_coordinates
from workloads.spec.weights import Placement, Weight


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of a gradient or weight, with the parameter that it belongs to."""

    spec: ParameterSpec
    position: dict[str, int]
    """Coordinates on the axes of the layout; ``replicate`` and ``shard`` (for experts ``ep`` and ``etp`` too) on the
    mesh of the parameter; ``copy`` counts several copies on one rank."""
    values: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.spec.parts)


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the unsharded model, assembled from the ranks of a layout."""

    value: Tensor
    """NaN where no rank had a piece."""
    spread: float = 0.0
    """Largest difference between two copies of an element, over the largest element. Replicas, whole weights on
    tensor-parallel ranks and the two ends of a tied embedding must agree."""

    def joined_by(self, other: Tensor) -> Whole:
        """Returns this tensor with its spread updated by another copy."""
        return Whole(self.value, max(self.spread, relative_difference(other, self.value)))


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Largest difference of two elements over the largest expected element; infinite if one is not finite."""
    if value.shape != expected.shape:
        return float("inf")
    if not expected.numel() or torch.equal(value, expected):
        return 0.0
    value, expected = value.double(), expected.double()
    # If all expected elements are zero, only zeros agree.
    relative = ((value - expected).abs().max() / expected.abs().max()).item()
    return relative if relative == relative else float("inf")


def shards_of(engine: Engine, values: Callable[[NamedParameter], Tensor]) -> list[Shard]:
    """Apply ``values`` to each parameter of this rank and copy the results to the host."""
    groups = engine.groups
    mesh = groups.data_mesh
    data = {name: mesh.get_local_rank(name) for name in ("replicate", "shard")}
    of_experts = expert_coordinates(groups.experiment, groups.rank) if groups.expert_mesh is not None else {}
    seen: Counter[tuple[str, ...]] = Counter()
    shards = []
    for named in engine.optimizer.parameters:
        names = tuple(part.name for part in named.spec.parts)
        shards.append(
            Shard(
                spec=named.spec,
                position={
                    **groups.position,
                    **(of_experts if named.spec.placement.is_expert else data),
                    "copy": seen[names],
                },
                values=values(named).cpu().clone(),
            )
        )
        seen[names] += 1
    return shards


def put_together(experiment: Experiment, ranks: Sequence[Sequence[Shard]]) -> dict[str, Whole]:
    """Whole tensors, by the names of `workloads.spec.weights`, assembled from the shards of all ranks in rank order."""
    shards_by_key: dict[tuple, dict[tuple[int, ...], dict[int, Tensor]]] = {}
    specs: dict[tuple, ParameterSpec] = {}
    for shards in ranks:
        for shard in shards:
            p = shard.position
            key = (shard.names, p["pp"], p["copy"], p["replicate"])
            specs[key] = shard.spec
            place = tuple(p[axis] for axis in _axes_of(shard.spec))
            shards_by_key.setdefault(key, {}).setdefault(place, {})[p["shard"]] = shard.values
    result: dict[str, Whole] = {}
    for key, by_place in shards_by_key.items():
        spec = specs[key]
        axes = _axes_of(spec)
        sizes = {axis: getattr(experiment, axis) for axis in axes}
        parts = {
            place: spec.taken_apart(torch.cat([pieces[i] for i in sorted(pieces)]), sizes)
            for place, pieces in by_place.items()
        }
        for number, part in enumerate(spec.parts):
            held = {place: parameter_parts[number] for place, parameter_parts in parts.items()}
            for of_heads in _by_copies(part, experiment.tp, held):
                for copy in _along(axes, part.placement, of_heads):
                    name, copy = part.name, copy[: len(copy) - part.padding]
                    result[name] = result[name].joined_by(copy) if name in result else Whole(copy)
    return result


def _axes_of(spec: ParameterSpec) -> tuple[str, ...]:
    """Axes other than data parallelism whose ranks hold a parameter."""
    return ("ep", "etp") if spec.placement.is_expert else ("tp",)


def _by_copies(part: Weight, tp: int, held: dict[tuple[int, ...], Tensor]) -> Iterator[dict[tuple[int, ...], Tensor]]:
    """What ranks hold of a weight, keyed by their coordinates, once for every copy of its key and value heads."""
    copies = part.copies(tp)
    for copy in range(copies):
        yield held if copies == 1 else {(rank,): values for (rank,), values in held.items() if rank % copies == copy}


def _along(axes: tuple[str, ...], placement: Placement, parts: dict[tuple[int, ...], Tensor]) -> list[Tensor]:
    """Join the parts that ranks along ``axes`` hold, keyed by their coordinates. Returns several tensors if ranks hold
    copies."""
    if not axes:
        return [parts[()]]
    *others, last = axes
    joined: dict[tuple[int, ...], list[Tensor]] = {}
    for place in sorted(parts):
        joined.setdefault(place[:-1], []).append(parts[place])
    dim = placement.dim(last)
    if dim is None:
        copies = zip(*joined.values(), strict=True)
        wholes = [_along(tuple(others), placement, dict(zip(joined, of, strict=True))) for of in copies]
        return [whole for joined_copies in wholes for whole in joined_copies]
    return _along(tuple(others), placement, {place: torch.cat(pieces, dim) for place, pieces in joined.items()})
