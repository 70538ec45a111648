"""Rotary position embedding (arXiv:2104.09864), half-split convention (the layout of Llama weights by Hugging Face).

Shapes: B sequences, S tokens a sequence, N query heads, K key heads, H head size. Element ``i`` of the first half of a
head rotates with element ``i`` of the second half, by the angle of its position:

    y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin

The backward is the rotation by the opposite angle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks


def apply_rope(q_BSNH: Tensor, k_BSKH: Tensor, cos_SH2: Tensor, sin_SH2: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; contiguous results in the inputs' shape and dtype.

    ``cos`` and ``sin`` are [S, H / 2], one row a position of this rank's tokens, or [B * S, H / 2], one row a token.
    ``q`` and ``k`` may be strided views of one fused projection. Only the tables are saved for backward.
    """
    if cos_SH2.shape[0] != q_BSNH.shape[1]:
        q, k = (x.flatten(0, 1).unsqueeze(0) for x in (q_BSNH, k_BSKH))
        q, k = apply_rope(q, k, cos_SH2, sin_SH2)
        return q.view(q_BSNH.shape), k.view(k_BSKH.shape)
    if torch.compiler.is_compiling():
        return _expression(q_BSNH, cos_SH2, sin_SH2), _expression(k_BSKH, cos_SH2, sin_SH2)
    return _Rope.apply(q_BSNH, k_BSKH, cos_SH2, sin_SH2)


def _expression(x_BSNH: Tensor, cos_SH2: Tensor, sin_SH2: Tensor) -> Tensor:
    dtype = accumulation_dtype(x_BSNH.dtype)
    first, second = x_BSNH.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_SH2.to(dtype).unsqueeze(1), sin_SH2.to(dtype).unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BSNH.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        assert cos.shape == sin.shape == (q.shape[1], q.shape[3] // 2), "one row of the tables for each position"
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dq, dk = _rotate(dq, dk, cos, sin, inverse=True)
        return dq, dk, None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> tuple[Tensor, Tensor]:
    rotated_q, rotated_k = q.new_empty(q.shape), k.new_empty(k.shape)
    backend = backend_of(q, k)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_rope

        triton_rope.rotate(q, k, cos, sin, rotated_q, rotated_k, inverse=inverse)
    elif backend is Backend.TORCH:
        sin = -sin if inverse else sin
        for x, rotated in ((q, rotated_q), (k, rotated_k)):
            for block in row_blocks(x.shape[1], x.numel() // x.shape[1]):
                rotated[:, block] = _expression(x[:, block], cos[block], sin[block])
    return rotated_q, rotated_k
