"""Adds to rows the bias of their group: biases of routed experts, by which gpt-oss differs from other mixtures.

Shapes as in `workloads.engine.ops.grouped_linear`: N rows sorted by group, G groups, O columns. The biases of all
groups are one column, [G*O, 1], as data parallelism shards the rows of any parameter. Which group a row belongs to is
found from the ends of the groups, on their device.

The gradient of a group's bias is the sum of its rows' gradients, a product with a column of ones: every run sums in the
same order. If rows are weighted, the column holds their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks
from workloads.engine.ops.grouped_linear import RowGroups, weight_gradients

_COLUMNS = 8
"""Columns of the products that sum gradients: grouped products on CUDA need rows of a multiple of 16 bytes."""


def add_group_bias(
    y_NO: Tensor, bias: Tensor, groups: RowGroups, weights_N: Tensor | None = None, part: int = 0
) -> Tensor:
    """``y + b_g``, with ``weights_N`` ``y + w b_g``, in the place of ``y``, which no backward may need.

    ``weights_N`` are fp32 (fp64 for fp64 rows). The bias and the weights are saved for backward if there are weights.
    ``part``: the bias may have fewer columns than the rows, and is then of this part of them.
    """
    return _AddGroupBias.apply(y_NO, bias, weights_N, groups, part)


@torch.no_grad()
def with_group_bias(y_NO: Tensor, bias: Tensor, groups: RowGroups) -> Tensor:
    """`add_group_bias` without weights and without a gradient."""
    return _add(y_NO, bias, None, groups, 0)


class _AddGroupBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, weights: Tensor | None, groups: RowGroups, part: int) -> Tensor:
        ctx.groups, ctx.columns = groups, _columns(bias, groups, part)
        ctx.mark_dirty(y)
        if weights is not None:
            ctx.save_for_backward(bias, weights)
        return _add(y, bias, weights, groups, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        own, groups = grad[:, ctx.columns].contiguous(), ctx.groups
        saved = ctx.saved_tensors  # asked for once: some are computed again when asked for
        if not saved:
            return grad, _sums(own, None, groups), None, None, None
        bias, weights = saved
        return grad, _sums(own, weights, groups), _products(own, bias, groups).to(weights.dtype), None, None


def _columns(bias: Tensor, groups: RowGroups, part: int) -> slice:
    columns = bias.shape[0] // len(groups)
    return slice(part * columns, (part + 1) * columns)


def _add(y: Tensor, bias: Tensor, weights: Tensor | None, groups: RowGroups, part: int) -> Tensor:
    backend = backend_of(y)
    if backend is Backend.SHAPES:
        return y
    group, bias_GO, columns = _group_of_row(y, groups), bias.view(len(groups), -1), _columns(bias, groups, part)
    if backend is Backend.TRITON:
        from workloads.engine.kind_ops import triton_group_bias

        triton_group_bias.add(y, bias_GO, weights, group, columns.start)
        return y
    for block in row_blocks(*y.shape):
        added = bias_GO[group[block]]
        if weights is not None:
            added = added * weights[block].unsqueeze(1)  # in fp32: rounded with the sum alone
        y[block, columns].add_(added)
    return y


def _group_of_row(y: Tensor, groups: RowGroups) -> Tensor:
    rows = torch.arange(y.shape[0], dtype=groups.ends_G.dtype, device=y.device)
    return torch.searchsorted(groups.ends_G, rows, right=True)


def _sums(grad_NO: Tensor, weights_N: Tensor | None, groups: RowGroups) -> Tensor:
    """Gradient of the biases, [G*O, 1]."""
    column = grad_NO.new_ones(grad_NO.shape[0]) if weights_N is None else weights_N.to(grad_NO.dtype)
    summed_GOC = weight_gradients(grad_NO, column.unsqueeze(1).repeat(1, _COLUMNS), groups)
    return summed_GOC[..., :1].flatten(0, 1).contiguous()


def _products(grad_NO: Tensor, bias: Tensor, groups: RowGroups) -> Tensor:
    """Product of each row with the bias of its group, [N], in the dtype of sums."""
    summed = grad_NO.new_empty(grad_NO.shape[0], dtype=accumulation_dtype(grad_NO.dtype))
    backend = backend_of(grad_NO)
    if backend is Backend.SHAPES:
        return summed
    group, bias_GO = _group_of_row(grad_NO, groups), bias.view(len(groups), -1)
    if backend is Backend.TRITON:
        from workloads.engine.kind_ops import triton_group_bias

        triton_group_bias.products(grad_NO, bias_GO, group, summed)
    else:
        for block in row_blocks(*grad_NO.shape):
            summed[block] = (grad_NO[block] * bias_GO[group[block]]).sum(1, dtype=summed.dtype)
    return summed
