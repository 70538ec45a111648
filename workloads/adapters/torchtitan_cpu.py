"""Makes torchtitan 0.2.2 run on a machine without accelerator, where it is tested and not measured.

- torchtitan treats such a machine as one with CUDA.
- gloo has no pre-multiplied sum, which FSDP requests if gradients are not divided.
- torch's ring attention and its sharding of heads support only the kernels of CUDA.
- Flex attention has no backward pass on CPUs, and its mask is compiled; copies are sorted by a
  kernel of Triton and counted as whole numbers.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.models import attention as their_attention
from torchtitan.models.moe import MoE
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.kernels import generate_permute_indices

from workloads.adapters.mixtures.torchtitan_cpu_kernels import masked_attention, on_cpu
from workloads.adapters.torchtitan_gloo import use_gloo as use_gloo

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_HEADS, _SEQUENCE = 1, 2
"""Dims of queries, keys and values that tensor and context parallelism divide."""


def use_cpu() -> None:
    """Set the device in every module that read it when it was imported, and add CPU kernels to ring attention."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.__dict__.update(device_type="cpu", device_module=torch.cpu)
    kernels: dict[Any, Any] = {_FORWARD: _attend, _BACKWARD: _attend_backward}
    ring.custom_ops.update(kernels)
    register_sharding(_FORWARD)(_by_heads)
    register_sharding(_BACKWARD)(_by_heads_backward)
    their_attention.FlexAttentionWrapper._compiled_flex_attn = staticmethod(_flex)
    their_attention._compiled_create_block_mask = partial(create_block_mask, device="cpu")
    MoE.forward = on_cpu(MoE.forward)
    moe_utils.generate_permute_indices = partial(generate_permute_indices, use_cpu=True)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float | None, return_lse: bool, **_: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.flex_attention.flex_attention` for what torchtitan's gpt-oss asks of it."""
    out, sums = masked_attention(query, key, value, block_mask, scale, query.shape[1] // key.shape[1])
    return (out, sums) if return_lse else out


def _attend(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    query, key, value, dropout_p, is_causal = _positional(args)
    outputs = ring._templated_ring_attention(
        query.device_mesh.get_group(),
        _SEQUENCE,
        op,
        query.to_local(),
        key.to_local(),
        value.to_local(),
        is_causal,
        dropout_p=dropout_p,
        **kwargs,
    )
    out, logsumexp = (_divided(x, query) for x in outputs)
    return out, logsumexp


def _attend_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    *tensors, dropout_p, is_causal = args
    grad_out, query, key, value, out, logsumexp = (x.to_local() for x in tensors)
    gradients = ring._templated_ring_attention_backward(
        tensors[1].device_mesh.get_group(),
        _SEQUENCE,
        op,
        grad_out,
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal,
        dropout_p=dropout_p,
        **kwargs,
    )
    return tuple(_divided(x, tensors[1]) for x in gradients)


def _by_heads(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    """Allowed placements of the kernel's tensors on tensor-parallel ranks: all sharded by heads, or all replicated."""
    return [([kind] * 2, [kind] * 3 + [None] * (len(args) - 3)) for kind in (Shard(_HEADS), Replicate())]


def _by_heads_backward(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    return [([kind] * 3, [kind] * 6 + [None] * (len(args) - 6)) for kind in (Shard(_HEADS), Replicate())]


def _positional(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(query, key, value, dropout_p, is_causal), with defaults for trailing arguments that were omitted."""
    return (*args, 0.0, False)[:5] if len(args) == 3 else (*args, False)[:5]


def _divided(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, [Shard(_SEQUENCE)], run_check=False)
