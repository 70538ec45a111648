"""Makes parameters from the table of weights, and records the parts of each and how the ranks hold it.

Initial values depend on (seed, canonical name) alone, so every layout starts from the same weights: each rank generates
the full matrix on its device and keeps its shard. That costs a moment at start-up and no communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workloads.engine.collectives.communication import Axis
from workloads.spec.weights import Placement, Weight, fused_shape


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Weights that make up one parameter: ``parts``, all of one placement, concatenated on dim 0.

    Stacked experts (3 dims) are concatenated on dim 1, each expert's matrices together, and held as one matrix of all
    experts' rows, so that data parallelism shards the rows of any parameter alike.
    """

    parts: tuple[Weight, ...]

    @property
    def placement(self) -> Placement:
        return self.parts[0].placement

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of this rank's part; ``sizes`` are degrees by axis."""
        return fused_shape(self.parts, **sizes)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Concatenate this rank's part of each of ``parts`` into its part of the parameter."""
        if self.placement.is_expert:
            return torch.cat(list(pieces), dim=1).flatten(0, 1)
        return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]

    def taken_apart(self, value: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
        """Inverse of `joined`."""
        shapes = [part.local_shape(sizes) for part in self.parts]
        if self.placement.is_expert:
            return list(value.unflatten(0, (shapes[0][0], -1)).split([shape[1] for shape in shapes], dim=1))
        return list(value.split([shape[0] for shape in shapes]))


def add_parameter(module: nn.Module, attribute: str, parts: Sequence[Weight], sizes: Mapping[str, int]) -> None:
    """Give ``module`` a parameter for ``parts``, without values, and record its spec in ``module.specs``."""
    spec = ParameterSpec(tuple(parts))
    assert all(part.placement == spec.placement for part in parts), f"{attribute}: parts of several placements"
    module.register_parameter(attribute, nn.Parameter(torch.empty(spec.local_shape(sizes))))
    module.__dict__.setdefault("specs", {})[attribute] = spec


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter's place in the module tree, which stays valid when FSDP swaps the parameter object."""

    module: nn.Module
    attribute: str
    spec: ParameterSpec

    @property
    def current(self) -> nn.Parameter:
        """The parameter as registered now: an FSDP shard (DTensor) or the gathered tensor."""
        parameter: nn.Parameter = getattr(self.module, self.attribute)
        return parameter

    @property
    def gradient(self) -> Tensor:
        """This rank's shard of the gradient, after data parallelism has reduced it."""
        gradient = self.current.grad
        assert gradient is not None, f"{self.attribute} of {self.spec.parts[0].name} has no gradient"
        return local_shard(gradient)


def named_parameters(root: nn.Module) -> Iterator[NamedParameter]:
    """Every parameter below ``root`` with its spec, each storage once (a tied embedding is one parameter)."""
    seen: set[int] = set()
    for module in root.modules():
        for attribute, spec in getattr(module, "specs", {}).items():
            parameter = getattr(module, attribute)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield NamedParameter(module, attribute, spec)


def local_shard(parameter: Tensor) -> Tensor:
    """This rank's rows of a parameter or gradient, without autograd history (and without DTensor's dispatch)."""
    return parameter._local_tensor.detach() if isinstance(parameter, DTensor) else parameter.detach()


@torch.no_grad()
def initialise(
    root: nn.Module, seed: int, axes: Mapping[str, Axis], place: Callable[[ParameterSpec], tuple[int, int]]
) -> None:
    """Fill every parameter's local shard. Temporary memory: the largest parameter of the unsharded model in fp32 (for
    stacked experts only those of this rank).

    ``axes`` maps names to axes. ``place`` returns, for a parameter, how many ranks share its master weights and the
    index of this rank among them.
    """
    for named in named_parameters(root):
        local = local_shard(named.current)
        whole = named.spec.joined([initial_part(part, seed, local.device, axes) for part in named.spec.parts])
        shards, shard_rank = place(named.spec)
        rows = -(-whole.shape[0] // shards)  # FSDP shards dim 0 like torch.chunk: the last shards may be short or empty
        local.copy_(whole[shard_rank * rows : (shard_rank + 1) * rows])


def initial_part(part: Weight, seed: int, device: torch.device, axes: Mapping[str, Axis]) -> Tensor:
    """This rank's part of a weight; the whole weight if no axis divides it. Every expert has its own random stream, so
    a rank generates only its experts."""
    if part.placement.is_expert:
        ep = axes.get("ep")
        count = part.shape[0] // (ep.size if ep is not None else 1)
        first = count * ep.rank if ep is not None else 0
        numbers = range(first, first + count)
        value = torch.stack([_drawn(part.shape[1:], part.std, seed, f"{part.name}.{i}", device) for i in numbers])
    else:
        rows, *rest = part.shape
        value = _drawn((rows - part.padding, *rest), part.std, seed, part.name, device)
        if part.padding:
            value = torch.cat([value, value.new_zeros(part.padding, *rest)])
    for axis, dim in part.placement.split:
        if axis == "ep":
            continue
        if axis in axes:
            copies = part.copies(axes[axis].size)
            value = value.tensor_split(axes[axis].size // copies, dim=dim)[axes[axis].rank // copies]
    return value


def _drawn(shape: tuple[int, ...], std: float | None, seed: int, name: str, device: torch.device) -> Tensor:
    if std is None:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(_stream(seed, name))
    return torch.empty(shape, device=device, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _stream(seed: int, name: str) -> int:
    """Seed of one parameter's random stream: 63 bits of a hash, so that no two parameters share one."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
