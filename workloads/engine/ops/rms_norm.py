"""RMSNorm (arXiv:1910.07467): ``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dim.

Shapes: T tokens, D features. With ``r = 1 / sqrt(mean(x^2) + eps)``, ``n = x * r`` and ``g = dy * weight``:

    dx = r * (g - n * mean(g * n))        dweight = sum over tokens of dy * n
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dim; computed in fp32 (fp64 for fp64) and rounded once, to the dtype of ``x``.

    Saved for backward: ``x``, ``weight`` and one fp32 number a token.
    """
    if torch.compiler.is_compiling():
        return _expression(x_TD, weight_D, eps)
    return _RMSNorm.apply(x_TD, weight_D, eps)


def _expression(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * _inverse_rms(wide, eps) * weight).to(x.dtype)


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        rstd = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
        ctx.save_for_backward(x, weight, rstd)
        backend = backend_of(x, weight)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_rms_norm

            triton_rms_norm.forward(x, weight, eps, y, rstd)
        elif backend is Backend.TORCH:
            _forward(x.flatten(0, -2), weight, eps, y.flatten(0, -2), rstd.flatten())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        backend = backend_of(x, weight)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_rms_norm

            triton_rms_norm.backward(dy, x, weight, rstd, dx, dweight)
        elif backend is Backend.TORCH:
            _backward(dy.flatten(0, -2), x.flatten(0, -2), weight, rstd.flatten(), dx.flatten(0, -2), dweight)
        return dx, dweight, None


def _forward(x: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor) -> None:
    for block in row_blocks(*x.shape):
        wide = x[block].to(rstd.dtype)
        inverse = _inverse_rms(wide, eps)
        rstd[block] = inverse.squeeze(-1)
        y[block] = wide * inverse * weight


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dweight: Tensor) -> None:
    total = torch.zeros_like(weight, dtype=rstd.dtype)
    for block in row_blocks(*x.shape):
        inverse = rstd[block].unsqueeze(-1)
        normed = x[block].to(rstd.dtype) * inverse
        grad = dy[block].to(rstd.dtype)
        total += (grad * normed).sum(dim=0)
        grad = grad * weight
        dx[block] = (grad - normed * (grad * normed).mean(dim=-1, keepdim=True)) * inverse
    dweight.copy_(total)
