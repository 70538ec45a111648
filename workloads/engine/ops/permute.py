"""Permutes rows of activations by an index, and sums them back: tokens to experts, and their outputs back to tokens.

Shapes: T tokens, k copies of each, N rows of copies, D columns. Row r of the copies is copy ``order_N[r]`` of T*k, a
copy of token ``order_N[r] // k``; copy j of token t is row ``place_Tk[t, j]``. A negative index means no row: such a
row is zeros, such a copy adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks


def spread_rows(x_TD: Tensor, order_N: Tensor, place_Tk: Tensor) -> Tensor:
    """Copy every token's row to the rows of its copies: [T, D] to [N, D]. Backward sums the gradients of a token's
    copies."""
    return _Spread.apply(x_TD, order_N, place_Tk)


def collect_rows(y_ND: Tensor, order_N: Tensor, place_Tk: Tensor) -> Tensor:
    """Sum each token's copies, rounded once: [N, D] to [T, D]. The adjoint of `spread_rows`."""
    return _Collect.apply(y_ND, order_N, place_Tk)


def reorder_rows(x_ND: Tensor, source_N: Tensor, target_N: Tensor) -> Tensor:
    """Permute rows: row r of the result is row ``source_N[r]``; ``target_N`` is the inverse permutation."""
    return _Spread.apply(x_ND, source_N, target_N.unsqueeze(1))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.order, ctx.place = order, place
        return _gather(x, order, place.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_sum(grad, ctx.place), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.order, ctx.place = order, place
        return _gather_sum(y, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.order, ctx.place.shape[1]), None, None


def _gather(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Returns rows of which row r is row ``order[r] // copies`` of ``x``; zeros where the index is negative."""
    x = x.contiguous()
    y = x.new_empty(order.shape[0], x.shape[1])
    backend = backend_of(x, order)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_permute

        triton_permute.gather(x, order, copies, y)
    elif backend is Backend.TORCH:
        for block in row_blocks(*y.shape):
            index = order[block]
            y[block] = x[index.clamp(min=0) // copies] * (index >= 0).unsqueeze(1)
    return y


def _gather_sum(y: Tensor, place: Tensor) -> Tensor:
    """Returns rows of which row t is the sum of the rows ``place[t]`` of ``y`` that are not negative."""
    y = y.contiguous()
    tokens, copies = place.shape
    x = y.new_empty(tokens, y.shape[1])
    backend = backend_of(y, place)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_permute

        triton_permute.gather_sum(y, place, x)
    elif backend is Backend.TORCH:
        dtype = accumulation_dtype(y.dtype)
        for block in row_blocks(tokens, copies * y.shape[1]):
            index = place[block]
            rows = y[index.clamp(min=0)].to(dtype) if y.shape[0] else y.new_zeros(*index.shape, y.shape[1], dtype=dtype)
            x[block] = (rows * (index >= 0).unsqueeze(2)).sum(1).to(y.dtype)
    return x
