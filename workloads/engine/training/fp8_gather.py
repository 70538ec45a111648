"""Gathers the weights of tensorwise fp8 layers, and of routed experts in fp8, as fp8: one byte an element in the
message and in the gathered copy.

FSDP lets a sharded tensor choose what is gathered (``fsdp_pre_all_gather``) and what becomes of the result
(``fsdp_post_all_gather``). It looks for both as attributes of the local tensor, so they are attached to the plain
tensors that the optimizer updates; nothing else in the engine sees another kind of tensor.

A scale belongs to a whole weight, of which every rank has a part. So the largest absolute values of all weights are
computed once a step, before its first gather, and reduced over the ranks that share weights in one small all-reduce.
Each matrix of a routed expert has a scale, whatever scaling the other layers use. The matrices of all experts are one
parameter, whose shards may begin at any row: so their largest absolute values are computed row by row, and reduced over
the ranks that share experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from typing import cast as cast_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from workloads.engine.collectives.groups import Groups
from workloads.engine.layers.experts import Experts
from workloads.engine.ops.fp8 import E4M3, cast_rows_with, cast_with, power_of_two
from workloads.engine.ops.fp8_linear import Fp8Products
from workloads.engine.training.data_parallel import fp8_scaling, initialise_shards, param_groups_of

_ALIGNED = 4
"""cuBLAS reads a scale only where its address is a multiple of 16 bytes."""


class Fp8Weights:
    """Scales of all weights of one rank that are gathered in fp8, except those of routed experts."""

    def __init__(self, chunks: Sequence[nn.Module], groups: Groups) -> None:
        shards = groups.data_mesh["shard"]
        self._group = shards.get_group() if shards.size() > 1 else None
        weights_and_products = [pair for chunk in chunks for pair in _fp8_parameters(chunk)]
        self._parameters = [parameter for parameter, _ in weights_and_products]
        device = groups.device
        self._bits = torch.zeros(len(weights_and_products), dtype=torch.int32, device=device)
        self._factors = torch.zeros(len(weights_and_products), _ALIGNED, dtype=torch.float32, device=device)
        for index, (parameter, products) in enumerate(weights_and_products):
            products.weight_factors = self._factors[index, :1]
            _gather_in_fp8(parameter, self._bits[index : index + 1])

    @torch.no_grad()
    def find_scales(self) -> None:
        """Compute the scales. Call it after the weights have changed and before they are gathered."""
        norms = torch._foreach_norm([parameter._sharded_param_data for parameter in self._parameters], float("inf"))
        torch.bitwise_and(torch.stack(norms).float().view(torch.int32), 0x7FFFFFFF, out=self._bits)
        if self._group is not None:
            dist.all_reduce(self._bits, op=dist.ReduceOp.MAX, group=self._group)
        self._factors[:, 0] = power_of_two(self._bits, E4M3)[1]


class Fp8Experts:
    """Scales of one rank's routed experts, by parameter and expert.

    Shapes: G experts, R rows of each in a parameter, S rows of the parameter's shard on this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module], groups: Groups) -> None:
        assert groups.expert_mesh is not None
        shards = groups.expert_mesh["shard"]
        self._group = shards.get_group() if shards.size() > 1 else None
        parameters = [parameter for chunk in chunks for parameter in _expert_parameters(chunk)]
        self._shards = [_shard(parameter) for parameter in parameters]
        moe = groups.experiment.model.moe
        assert moe is not None
        self._experts = moe.num_experts // groups.experiment.ep
        shape = len(parameters), self._experts
        self._bits = torch.zeros(shape, dtype=torch.int32, device=groups.device)
        self._factors = torch.zeros(shape, dtype=torch.float32, device=groups.device)
        self._expert_of_row = [self._experts_of_rows(parameter) for parameter in parameters]
        for parameter, bits_G, factors_G, of_row_S in zip(
            parameters, self._bits, self._factors, self._expert_of_row, strict=True
        ):
            parameter._module_info.module.factors[parameter._module_info.param_name] = factors_G
            _gather_in_fp8(parameter, bits_G, of_row_S)

    @torch.no_grad()
    def find_scales(self) -> None:
        """Compute the scales. Call it after the weights have changed and before they are gathered."""
        self._bits.zero_()
        for shard, bits_G, of_row_S in zip(self._shards, self._bits, self._expert_of_row, strict=True):
            largest_S = torch.linalg.vector_norm(shard, float("inf"), dim=1)
            bits_G.scatter_reduce_(0, of_row_S, largest_S.float().view(torch.int32) & 0x7FFFFFFF, "amax")
        if self._group is not None:
            dist.all_reduce(self._bits, op=dist.ReduceOp.MAX, group=self._group)
        self._factors.copy_(power_of_two(self._bits, E4M3)[1])

    def _experts_of_rows(self, parameter: Any) -> Tensor:
        """Expert of each row of the shard, [S]. Padding rows are zero and count as the last expert's."""
        rows = parameter.padded_sharded_param_size[0]
        first = parameter.mesh_info.shard_mesh_rank * rows
        index = torch.arange(first, first + rows, device=self._bits.device)
        return (index // (parameter._orig_size[0] // self._experts)).clamp(max=self._experts - 1)


def fp8_weights(chunks: Sequence[nn.Module], groups: Groups) -> list[Fp8Weights | Fp8Experts]:
    """Make the chunks gather in fp8 each weight that has one scale: with tensorwise scaling, and routed experts with
    every scaling. Empty in other precisions."""
    scaling = fp8_scaling(groups.experiment)
    weights: list[Fp8Weights | Fp8Experts] = [Fp8Weights(chunks, groups)] if scaling == "tensorwise" else []
    if scaling is not None and groups.expert_mesh is not None:
        weights.append(Fp8Experts(chunks, groups))
    return weights


def _fp8_parameters(chunk: nn.Module) -> Iterator[tuple[Any, Fp8Products]]:
    """FSDP's parameters that belong to fp8 products, without routed experts."""
    for parameter in _parameters_of(chunk):
        products = getattr(parameter._module_info.module, "fp8", None)
        if isinstance(products, Fp8Products):
            yield parameter, products


def _expert_parameters(chunk: nn.Module) -> Iterator[Any]:
    return (parameter for parameter in _parameters_of(chunk) if isinstance(parameter._module_info.module, Experts))


def _parameters_of(chunk: nn.Module) -> Iterator[Any]:
    """FSDP's parameters. Initialises FSDP first, because that may still move the shards."""
    initialise_shards(chunk)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups_of(module):
                yield from group.fsdp_params


def _shard(parameter: Any) -> Tensor:
    """Local shard that the optimizer updates, including padding rows."""
    return cast_type(Tensor, parameter._sharded_param_data.view(parameter.padded_sharded_param_size))


def _gather_in_fp8(parameter: Any, bits: Tensor, expert_of_row_S: Tensor | None = None) -> None:
    """Attach FSDP's extension points to the local tensor of one of its parameters (torch 2.11 to 2.13).

    ``bits``: bit pattern of the largest absolute value, [1]; with ``expert_of_row_S`` that of each expert, [G].

    The extension points hold the shard's memory, but no view of the local tensor. They are attributes of that tensor,
    and Python cannot see that a view leads back to it: such a circle, and so the memory, would never be freed.
    """
    view = _shard(parameter)
    shard = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())

    def pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        # As bytes: not every back end of collectives knows fp8.
        if expert_of_row_S is not None:
            return (cast_rows_with(shard, bits[expert_of_row_S], E4M3).view(torch.uint8),), None
        rows, _ = cast_with(shard, bits, E4M3, columns=False)
        assert rows is not None
        return (rows.values.view(torch.uint8),), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0].view(E4M3), ()) if out is None else None  # later gathers fill the same memory

    local = parameter._sharded_local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather
    parameter._init_extensions()
