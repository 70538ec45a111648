"""Activation recomputation of one block.

none       every saved activation is kept
selective  outputs of matmuls, attention and reductions are kept; norms, RoPE and the SwiGLU product are computed again
full       only the block's input is kept
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}


def _keep_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class RecomputedBlock(nn.Module):
    """A block whose activations are computed again in its backward."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.block = block
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if selective:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_expensive)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        return checkpoint(self.block, x_TD, cos_SH, sin_SH, **self.options)


def apply_recompute(block: nn.Module, recompute: str) -> nn.Module:
    if recompute == "none":
        return block
    return RecomputedBlock(block, selective=recompute == "selective")
