"""Makes torchtitan 0.3 run on a machine without accelerator, where it is tested and not measured.

- torchtitan treats such a machine as one with CUDA.
- gloo has no pre-multiplied sum, which FSDP requests if gradients are not divided.
- torch's flex attention has no backward pass on CPUs: plain attention with the same mask takes its place.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_mask
from torchtitan.models.common.attention import FlexAttention

from workloads.adapters.torchtitan_gloo import use_gloo as use_gloo


def use_cpu() -> None:
    """Set the device in every module that read it when it was imported, and replace the kernel of flex attention."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.__dict__.update(device_type="cpu", device_module=torch.cpu)
    FlexAttention._compiled_flex_attn = staticmethod(_masked_attention)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` for what torchtitan's dense models ask of it."""
    size, rows, columns = query.shape[0], query.shape[2], key.shape[2]
    mask = create_mask(block_mask.mask_mod, size, 1, rows, columns, device=query.device)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput(lse=None, max_scores=None)
