"""RMSNorm (arXiv:1910.07467): ``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dim.

Shapes: T tokens, D features; or B sequences of S tokens with N heads of D features. With ``r = 1 / sqrt(mean(x^2) +
eps)``, ``n = x * r`` and ``g = dy * weight``:

    dx = r * (g - n * mean(g * n))        dweight = sum over rows of dy * n
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks
from workloads.engine.ops.fp8 import record_largest


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, for_fp8: bool = False) -> Tensor:
    """Normalise the last dim; computed in fp32 (fp64 for fp64) and rounded once, to the dtype of ``x``.

    ``x`` may be [B, S, N, D], some heads of one fused projection: they are read in place, and the result is contiguous.
    Saved for backward: ``x``, ``weight`` and one fp32 number a row. ``for_fp8``: the result will be cast with one
    scale, so the kernel also records its largest value.
    """
    if torch.compiler.is_compiling():
        return _expression(x, weight_D, eps)
    y: Tensor
    y, largest = _RMSNorm.apply(x, weight_D, eps, for_fp8)
    return y if largest is None else record_largest(y, largest)


def _expression(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * _inverse_rms(wide, eps) * weight).to(x.dtype)


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, for_fp8: bool) -> tuple[Tensor, Tensor | None]:
        largest = None
        if not _is_heads_of_projection(x):
            x = x.contiguous()
        y = x.new_empty(x.shape)
        rstd = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
        ctx.save_for_backward(x, weight, rstd)
        backend = backend_of(x, weight)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_rms_norm

            if for_fp8:
                largest = x.new_zeros(1, dtype=torch.int32)
                ctx.mark_non_differentiable(largest)
            triton_rms_norm.forward(_rows(x), weight, eps, y, rstd, largest)
        elif backend is Backend.TORCH:
            rows = _rows(x)
            _forward(rows, weight, eps, y.view(rows.shape), rstd.view(rows.shape[:-1]))
        return y, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dweight = x.new_empty(x.shape), torch.empty_like(weight)
        backend = backend_of(x, weight)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_rms_norm

            triton_rms_norm.backward(dy, _rows(x), weight, rstd, dx, dweight)
        elif backend is Backend.TORCH:
            rows = _rows(x)
            shape = rows.shape
            _backward(dy.view(shape), rows, weight, rstd.view(shape[:-1]), dx.view(shape), dweight)
        return dx, dweight, None, None


def _is_heads_of_projection(x: Tensor) -> bool:
    """Whether ``x`` is [B, S, N, D] with consecutive heads and the same distance between all consecutive tokens."""
    return x.dim() == 4 and x.stride()[2:] == (x.shape[3], 1) and x.stride(0) == x.shape[1] * x.stride(1)


def _rows(x: Tensor) -> Tensor:
    """A view: [rows, D] if ``x`` is contiguous, else [tokens, heads, D]."""
    return x.flatten(0, -2) if x.is_contiguous() else x.flatten(0, 1)


def _forward(x: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor) -> None:
    for block in row_blocks(x.shape[0], math.prod(x.shape[1:])):
        wide = x[block].to(rstd.dtype)
        inverse = _inverse_rms(wide, eps)
        rstd[block] = inverse.squeeze(-1)
        y[block] = wide * inverse * weight


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dweight: Tensor) -> None:
    total = torch.zeros_like(weight, dtype=rstd.dtype)
    for block in row_blocks(x.shape[0], math.prod(x.shape[1:])):
        inverse = rstd[block].unsqueeze(-1)
        normed = x[block].to(rstd.dtype) * inverse
        grad = dy[block].to(rstd.dtype)
        total += (grad * normed).flatten(0, -2).sum(dim=0)
        grad = grad * weight
        dx[block] = (grad - normed * (grad * normed).mean(dim=-1, keepdim=True)) * inverse
    dweight.copy_(total)
