"""RMSNorm of queries and of keys over all heads together, whose heads tensor-parallel ranks divide (MiniMax-M2).

Shapes: B sequences of S tokens, T = B*S; N and K query and key heads of this rank, H head size; D columns of all heads.

Each rank sums the squares of its columns, [T, 2] for queries and keys, and one message adds up those of all ranks:

    r = 1 / sqrt(sum(x^2) / D + eps)      y = x * r * weight
    n = x * r,  g = dy * weight:          dx = r * (g - n * sum(g * n) / D)        dweight = sum over tokens of dy * n

The backward adds up the sums of ``g * n`` in the same way. Of more ranks than key heads, several ranks hold copies of
one: its squares count once, and as each copy's gradient is a part, the second term of ``dx`` is divided by the copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.collectives.communication import all_reduce_async, wait
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.ops.backend import accumulation_dtype, row_blocks
from workloads.engine.ops.rms_norm import rms_norm


class WholeNorm(NamedTuple):
    """What of a layer the norm depends on."""

    columns: tuple[int, int]
    """Of all heads of queries and of keys."""
    copies: int
    """Ranks that hold the same key head."""
    eps: float
    tp: TensorParallel


def whole_norm(
    q_BSNH: Tensor, k_BSKH: Tensor, weight_C: Tensor, norm: WholeNorm
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normed queries and keys, contiguous, and the inverse roots [T, 2] for `normed_again`; None with one rank, whose
    norm is that of other layers. ``weight_C``: of this rank's queries and keys, one after the other."""
    if norm.tp.size == 1:
        return *_on_one_rank(q_BSNH, k_BSKH, weight_C, norm.eps), None
    q, k, roots_T2 = _WholeNorm.apply(_rows(q_BSNH), _rows(k_BSKH), weight_C, norm)
    return q.view(q_BSNH.shape), k.view(k_BSKH.shape), roots_T2


def normed_again(q_BSNH: Tensor, k_BSKH: Tensor, weight_C: Tensor, roots_T2: Tensor) -> tuple[Tensor, Tensor]:
    """The normed queries and keys once more, without a message."""
    inputs = [_rows(x) for x in (q_BSNH, k_BSKH)]
    q, k = (_scaled(*parts) for parts in zip(inputs, _weights(weight_C, inputs), roots_T2.unbind(1), strict=True))
    return q.view(q_BSNH.shape), k.view(k_BSKH.shape)


def _on_one_rank(q_BSNH: Tensor, k_BSKH: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """All heads as one head, a view that the kernel reads in place."""
    inputs = [x.flatten(2).unsqueeze(2) for x in (q_BSNH, k_BSKH)]
    q, k = (rms_norm(x, weight, eps) for x, weight in zip(inputs, _weights(weight_C, inputs), strict=True))
    return q.view(q_BSNH.shape), k.view(k_BSKH.shape)


def _weights(weight_C: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return weight_C.split([x.shape[-1] for x in inputs])


def _rows(x_BSNH: Tensor) -> Tensor:
    """[T, N H], a view of some columns of a projection."""
    return x_BSNH.flatten(0, 1).flatten(1)


class _WholeNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weight: Tensor, norm: WholeNorm) -> tuple[Tensor, Tensor, Tensor]:
        sums_T2 = _summed([_row_sums(x, x) for x in (q, k)], norm)
        roots_T2 = torch.rsqrt(_divided(sums_T2, norm.columns) + norm.eps)
        parts = zip((q, k), _weights(weight, [q, k]), roots_T2.unbind(1), strict=True)
        normed_q, normed_k = (_scaled(*part) for part in parts)
        ctx.save_for_backward(q, k, weight, roots_T2)
        ctx.norm = norm
        ctx.mark_non_differentiable(roots_T2)
        return normed_q, normed_k, roots_T2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, weight, roots_T2 = ctx.saved_tensors
        norm, gradients = ctx.norm, (dq, dk)
        weights, roots = _weights(weight, [q, k]), roots_T2.unbind(1)
        of_rows = [_row_sums(x, dy, w) * r for x, dy, w, r in zip((q, k), gradients, weights, roots, strict=True)]
        means_T2 = _divided(_summed(of_rows, norm), norm.columns)
        found = [
            _backward(x, dy, w, r, mean)
            for x, dy, w, r, mean in zip((q, k), gradients, weights, roots, means_T2.unbind(1), strict=True)
        ]
        return found[0][0], found[1][0], torch.cat([one[1] for one in found]), None


def _row_sums(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum of ``x * y (* weight)`` of each row, in the dtype of sums: [T]."""
    sums = x.new_empty(x.shape[0], dtype=accumulation_dtype(x.dtype))
    for block in row_blocks(*x.shape):
        product = x[block].to(sums.dtype) * y[block]
        sums[block] = (product if weight is None else product * weight).sum(1)
    return sums


def _summed(of_inputs: list[Tensor], norm: WholeNorm) -> Tensor:
    """Sums of all ranks, [T, 2]: those of keys without copies of heads."""
    sums_T2 = wait(all_reduce_async(torch.stack(of_inputs, 1), norm.tp.axis))
    return _divided(sums_T2, (1, norm.copies))


def _divided(sums_T2: Tensor, by: tuple[int, int]) -> Tensor:
    """Each column divided by its number, which no copy from the host brings: a captured step allows none."""
    return torch.stack([column / number for column, number in zip(sums_T2.unbind(1), by, strict=True)], 1)


def _scaled(x: Tensor, weight: Tensor, roots_T: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    for block in row_blocks(*x.shape):
        y[block] = x[block].to(roots_T.dtype) * roots_T[block, None] * weight
    return y


def _backward(x: Tensor, dy: Tensor, weight: Tensor, roots_T: Tensor, means_T: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the rows, of the weight). ``means_T``: mean of ``g * n`` over all columns."""
    dx, d_weight = x.new_empty(x.shape), torch.zeros_like(weight, dtype=roots_T.dtype)
    for block in row_blocks(*x.shape):
        root = roots_T[block, None]
        normed, grad = x[block].to(roots_T.dtype) * root, dy[block].to(roots_T.dtype)
        d_weight += (grad * normed).sum(0)
        dx[block] = (grad * weight - normed * means_T[block, None]) * root
    return dx, d_weight.to(weight.dtype)
