"""Describes each parameter apart from its sharding: canonical name, full shape and initial values.

Initial values depend on (seed, canonical name) alone, so every layout starts from the same weights: each rank
generates the full matrix on its device and keeps its shard. That costs a moment at start-up and no communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of the unsharded model; several may be fused into one parameter."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    """Normal initialisation; None means ones (norm weights)."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """``parts`` concatenated on dim 0, each split over the tensor-parallel group on ``tp_dim`` (None: replicated)."""

    parts: tuple[Part, ...]
    tp_dim: int | None
    split_among: Literal["tokens", "heads"] = "tokens"
    """Of a replicated parameter: what the tensor-parallel ranks divide among themselves where it is used. Heads are
    always divided, tokens only with sequence parallelism; then the gradient on one rank is a part of the sum."""


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
def initialise(root: nn.Module, seed: int, tp_size: int, tp_rank: int, shards: int, shard_rank: int) -> None:
    """Fill every parameter's local shard. Temporary memory: the largest parameter of the unsharded model, in fp32."""
    for named in named_parameters(root):
        local = local_shard(named.current)
        pieces = [
            _initial_part(part, seed, local.device, tp_size, tp_rank, named.spec.tp_dim) for part in named.spec.parts
        ]
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        rows = -(-whole.shape[0] // shards)  # FSDP shards dim 0 like torch.chunk: the last shards may be short or empty
        local.copy_(whole[shard_rank * rows : (shard_rank + 1) * rows])


def _initial_part(
    part: Part, seed: int, device: torch.device, tp_size: int, tp_rank: int, tp_dim: int | None
) -> Tensor:
    if part.std is None:
        full = torch.ones(part.shape, device=device)
    else:
        generator = torch.Generator(device).manual_seed(_stream(seed, part.name))
        full = torch.empty(part.shape, device=device, dtype=torch.float32).normal_(0.0, part.std, generator=generator)
    return full if tp_dim is None else full.tensor_split(tp_size, dim=tp_dim)[tp_rank]


def _stream(seed: int, name: str) -> int:
    """Seed of one parameter's random stream: 63 bits of a hash, so that no two parameters share one."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
