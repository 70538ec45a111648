"""Makes torchtitan 0.3 run on a machine without accelerator, where it is tested and not measured.

- torchtitan treats such a machine as one with CUDA.
- gloo has no pre-multiplied sum, which FSDP requests if gradients are not divided.
- torch's flex attention has no backward pass on CPUs: plain attention with the same mask, which is
  not compiled, takes its place.
- Experts multiply in bf16 in every precision: here in that of their weights.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask
from torchtitan.models.common import attention as their_attention
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from workloads.adapters.mixtures.torchtitan_cpu_kernels import masked_attention, on_cpu
from workloads.adapters.torchtitan_gloo import use_gloo as use_gloo


def use_cpu() -> None:
    """Set the device in every module that read it when it was imported, and replace the kernel of flex attention."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.__dict__.update(device_type="cpu", device_module=torch.cpu)
    FlexAttention._compiled_flex_attn = staticmethod(_masked_attention)
    their_attention._compiled_create_block_mask = partial(create_block_mask, device="cpu")
    GptOssGroupedExperts.forward = on_cpu(GptOssGroupedExperts.forward)
    GroupedExperts.forward = on_cpu(GroupedExperts.forward)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` for what torchtitan's models ask of it."""
    out, sums = masked_attention(query, key, value, block_mask, scale, query.shape[1] // key.shape[1])
    return out, AuxOutput(lse=sums, max_scores=None)
