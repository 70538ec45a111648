"""What surrounds the scan of Mamba-2 on kernels: its inputs of every head, and the skip.

Torch's operations on these broadcast and strided tensors reach 1.1 to 1.9 TB/s of an H200's 4.8, and take as long as
the scan itself (results/recorded/h200x1_recurrent_profile/NOTE.md).

Shapes: B sequences, L tokens, H heads of P channels in G groups, N numbers of the state of a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, backend_of

_SKIP_TOKENS = 32
"""Tokens whose part of the skip's gradient one program sums."""


def spread(x_BLHP: Tensor, b_BLGN: Tensor, c_BLGN: Tensor, steps_BLH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` times its steps [B, L, H, P], and B and C [B, L, H, N] of every head, which are those of its group.
    ``steps``: fp32, rounded to the dtype of ``x``."""
    return _Spread.apply(x_BLHP, b_BLGN, c_BLGN, steps_BLH)  # type: ignore[no-any-return]


def with_skip(y_BLHP: Tensor, x_BLHP: Tensor, skip_H: Tensor, z_BLW: Tensor) -> tuple[Tensor, Tensor]:
    """``y + skip x``, and the gates ``z``, some columns of a wider tensor, as a contiguous one."""
    return _Skip.apply(y_BLHP, x_BLHP, skip_H, z_BLW)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor, c: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, steps)
        ctx.of_groups = b.shape
        of_heads = (*x.shape[:3], b.shape[3])
        outputs = torch.empty_like(x), x.new_empty(of_heads), x.new_empty(of_heads)
        if backend_of(x) is not Backend.SHAPES:
            from workloads.engine.kind_ops import triton_mamba

            triton_mamba.spread(x, b, c, steps, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dv: Tensor, dk: Tensor, dq: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, steps = ctx.saved_tensors
        results = (
            torch.empty_like(x),
            x.new_empty(ctx.of_groups),
            x.new_empty(ctx.of_groups),
            torch.empty_like(steps),
        )
        if backend_of(x) is not Backend.SHAPES:
            from workloads.engine.kind_ops import triton_mamba

            grads = dv.contiguous(), dk.contiguous(), dq.contiguous()
            triton_mamba.gathered(x, steps, grads, results)
        return results


class _Skip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, skip: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, skip)
        y = y.contiguous()
        out, gate = torch.empty_like(y), z.new_empty(z.shape)
        if backend_of(x) is not Backend.SHAPES:
            from workloads.engine.kind_ops import triton_mamba

            triton_mamba.skipped(y, x, skip, z, out, gate, _SKIP_TOKENS)
        return out, gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, skip = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        programs = -(-x.shape[0] * x.shape[1] // _SKIP_TOKENS)
        parts = x.new_empty((programs, x.shape[2]), dtype=torch.float32)
        if backend_of(x) is not Backend.SHAPES:
            from workloads.engine.kind_ops import triton_mamba

            triton_mamba.skip_gradients(dy, x, skip, dx, parts, _SKIP_TOKENS)
        return dy, dx, parts.sum(0).to(skip.dtype), dz
