"""Gathers the weights of tensorwise fp8 layers in fp8: one byte an element on the way and in the gathered copy.

FSDP lets a sharded tensor say what is gathered of it (``fsdp_pre_all_gather``) and what becomes of that
(``fsdp_post_all_gather``). It looks for both as attributes of the local tensor, so they are attached to the plain
tensors that the optimizer updates; nothing else of the engine sees another kind of tensor.

One scale is for a whole weight, of which every rank has a part. So the largest values of all weights are found once a
step, before its first gather, and made the same on the ranks that share weights in one small all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from workloads.engine.data_parallel import fp8_recipe, param_groups_of
from workloads.engine.groups import Groups
from workloads.engine.ops.fp8 import E4M3, cast_with, power_of_two
from workloads.engine.ops.fp8_linear import Fp8Products

_ALIGNED = 4
"""cuBLAS reads a scale only where its address is a multiple of 16 bytes."""


class Fp8Weights:
    """The scales of all weights of one rank that are gathered in fp8."""

    def __init__(self, chunks: Sequence[nn.Module], groups: Groups) -> None:
        shards = groups.data_mesh["shard"]
        self._group = shards.get_group() if shards.size() > 1 else None
        found = [pair for chunk in chunks for pair in _fp8_parameters(chunk)]
        self._parameters = [parameter for parameter, _ in found]
        device = groups.device
        self._bits = torch.zeros(len(found), dtype=torch.int32, device=device)
        self._factors = torch.zeros(len(found), _ALIGNED, dtype=torch.float32, device=device)
        for index, (parameter, products) in enumerate(found):
            products.weight_factors = self._factors[index, :1]
            _gather_in_fp8(parameter, self._bits[index : index + 1])

    @torch.no_grad()
    def find_scales(self) -> None:
        """To be called after the weights have changed and before they are gathered."""
        norms = torch._foreach_norm([parameter._sharded_param_data for parameter in self._parameters], float("inf"))
        torch.bitwise_and(torch.stack(norms).view(torch.int32), 0x7FFFFFFF, out=self._bits)
        if self._group is not None:
            dist.all_reduce(self._bits, op=dist.ReduceOp.MAX, group=self._group)
        self._factors[:, 0] = power_of_two(self._bits, E4M3)[1]


def fp8_weights(chunks: Sequence[nn.Module], groups: Groups) -> Fp8Weights | None:
    """Let the chunks gather in fp8, where one scale is enough for a weight; None in other precisions."""
    return Fp8Weights(chunks, groups) if fp8_recipe(groups.experiment) == "tensorwise" else None


def _fp8_parameters(chunk: nn.Module) -> Iterator[tuple[Any, Fp8Products]]:
    """FSDP's parameters that belong to fp8 products. FSDP is started first: that may still move the shards."""
    assert isinstance(chunk, FSDPModule)
    state: Any = chunk._get_fsdp_state()
    state._lazy_init()
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups_of(module):
                for parameter in group.fsdp_params:
                    products = getattr(parameter._module_info.module, "fp8", None)
                    if isinstance(products, Fp8Products):
                        yield parameter, products


def _gather_in_fp8(parameter: Any, bits: Tensor) -> None:
    """Attach FSDP's extension points to the local tensor of one of its parameters (torch 2.11 to 2.13)."""

    shard = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)  # the memory that is updated

    def pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        rows, _ = cast_with(shard, bits, E4M3, columns=False)
        assert rows is not None
        return (rows.values,), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0], ()) if out is None else None  # later gathers fill the same memory

    local = parameter._sharded_local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather
    parameter._init_extensions()
