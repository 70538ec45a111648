"""Pieces of gradients and weights from all ranks of a layout, and how they make whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.engine.collectives.parameters import NamedParameter, ParameterSpec
from workloads.engine.training.build import Engine
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import expert_coordinates
from workloads.spec.weights import Placement


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's piece of a gradient or of a weight, and what it is a piece of."""

    spec: ParameterSpec
    position: dict[str, int]
    """On the axes of the layout; ``replicate`` and ``shard`` (and ``ep``, ``etp``) on the mesh of the parameter;
    ``copy`` counts a rank's own copies."""
    values: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.spec.parts)


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
    """The whole tensors, by the names of `workloads.spec.weights`, from the shards of all ranks in their order."""
    found: dict[tuple, dict[tuple[int, ...], dict[int, Tensor]]] = {}
    specs: dict[tuple, ParameterSpec] = {}
    for shards in ranks:
        for shard in shards:
            p = shard.position
            key = (shard.names, p["pp"], p["copy"], p["replicate"])
            specs[key] = shard.spec
            place = tuple(p[axis] for axis in _axes_of(shard.spec))
            found.setdefault(key, {}).setdefault(place, {})[p["shard"]] = shard.values
    result: dict[str, Whole] = {}
    for key, by_place in found.items():
        spec = specs[key]
        axes = _axes_of(spec)
        sizes = {axis: getattr(experiment, axis) for axis in axes}
        parts = {
            place: spec.taken_apart(torch.cat([pieces[i] for i in sorted(pieces)]), sizes)
            for place, pieces in by_place.items()
        }
        for number, part in enumerate(spec.parts):
            for copy in _along(axes, part.placement, {place: own[number] for place, own in parts.items()}):
                name = part.name
                result[name] = result[name].joined_by(copy) if name in result else Whole(copy)
    return result


def _axes_of(spec: ParameterSpec) -> tuple[str, ...]:
    """Axes other than data parallelism whose ranks hold a parameter."""
    return ("ep", "etp") if spec.placement.is_expert else ("tp",)


def _along(axes: tuple[str, ...], placement: Placement, parts: dict[tuple[int, ...], Tensor]) -> list[Tensor]:
    """Joins the parts that ranks along ``axes`` hold; several where they hold copies. Keys are their coordinates."""
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
        return [whole for found in wholes for whole in found]
    return _along(tuple(others), placement, {place: torch.cat(own, dim) for place, own in joined.items()})
