"""Multiplies rows by the weight of their group: the matrix products of routed experts.

Shapes: N rows, sorted by group; G groups, of which group g has the rows from ``ends_G[g - 1]`` to ``ends_G[g]``; I
inputs, O outputs. The weights of all groups are one matrix, [G*O, I].

On CUDA in bf16 it is ``torch._grouped_mm``, which reads the ends from the device. Elsewhere each group is a separate
product, and the host must know the ends. In fp8: `workloads.engine.ops.fp8_grouped`. Weight gradients that are added to
sums in fp32 have a kernel of their own (`workloads.engine.ops.triton_grouped_sums`), because ``torch._grouped_mm``
writes bf16 only (torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workloads.engine.ops.backend import Backend, backend_of
from workloads.engine.ops.fp8_grouped import rows_by_weights
from workloads.engine.ops.fp8_linear import take_gradients_in
from workloads.engine.ops.linear import DeferredGradients, accumulate


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Assignment of rows to groups."""

    ends_G: Tensor
    """End of each group's rows, int32 on the device of the rows: the sum of the sizes of all groups up to this one."""
    sizes: Callable[[], list[int]]
    """Returns the groups' sizes on the host, for products without a kernel that reads the ends. It may wait for the
    device."""

    def __len__(self) -> int:
        return self.ends_G.shape[0]


def grouped_linear(
    x_NI: Tensor,
    weight: Tensor,
    groups: RowGroups,
    deferred: DeferredGradients | None = None,
    *,
    factors_G: Tensor | None = None,
) -> Tensor:
    """``x W_g^T`` for each group's rows: [N, I] and [G*O, I] to [N, O]. ``deferred`` as in `linear`. ``factors_G``:
    inverse scales of a weight in fp8; this product and the inputs' gradients are then in fp8
    (`workloads.engine.ops.fp8_grouped`)."""
    if factors_G is not None:
        take_gradients_in(weight, x_NI.dtype)
    return _GroupedLinear.apply(x_NI, weight, groups, deferred, factors_G)


def grouped_product(x_NI: Tensor, weight: Tensor, groups: RowGroups, factors_G: Tensor | None = None) -> Tensor:
    """`grouped_linear` without a gradient."""
    if factors_G is not None:
        return rows_by_weights(x_NI, weight, factors_G, groups.ends_G, groups.sizes)
    return _rows_by_weights(x_NI, weight.view(len(groups), -1, weight.shape[1]).transpose(1, 2), groups)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        groups: RowGroups,
        deferred: DeferredGradients | None,
        factors_G: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.deferred, ctx.factors_G = groups, deferred, factors_G
        # Not the saved tensor: the gradient belongs to this object, even after data parallelism has freed its storage.
        ctx.parameter = weight if deferred is not None else None
        return grouped_product(x, weight, groups, factors_G)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        x = x.detach()
        groups: RowGroups = ctx.groups
        grad = grad.contiguous()
        if ctx.factors_G is not None:
            grad_x = rows_by_weights(grad, weight, ctx.factors_G, groups.ends_G, groups.sizes, turned=True)
        else:
            grad_x = _rows_by_weights(grad, weight.view(len(groups), -1, weight.shape[1]), groups)

        deferred, parameter = ctx.deferred, ctx.parameter

        def make() -> Tensor | None:
            if deferred is None or deferred.sum_of is None:
                return weight_gradients(grad, x, groups).flatten(0, 1)
            so_far = deferred.sum_of(parameter)
            add_weight_gradients(so_far.total_OI, grad, x, groups, first=so_far.is_empty)
            return None

        later = deferred is not None and deferred.add(parameter, make)
        return grad_x, None if later else make(), None, None, None


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0


def _rows_by_weights(x_NI: Tensor, weights_GIO: Tensor, groups: RowGroups) -> Tensor:
    if backend_of(x_NI, weights_GIO) is Backend.SHAPES:
        return x_NI.new_empty(x_NI.shape[0], weights_GIO.shape[2])
    if _has_kernel(x_NI):
        return torch._grouped_mm(x_NI, weights_GIO, offs=groups.ends_G)
    y_NO = x_NI.new_empty(x_NI.shape[0], weights_GIO.shape[2])
    rows, outs = _parts(groups, x_NI, y_NO)
    for group_rows, weight, out in zip(rows, weights_GIO, outs, strict=True):
        torch.mm(group_rows, weight, out=out)
    return y_NO


def weight_gradients(grad_NO: Tensor, x_NI: Tensor, groups: RowGroups) -> Tensor:
    """Weight gradients [G, O, I]; zeros for a group without rows."""
    if backend_of(grad_NO, x_NI) is Backend.SHAPES:
        return x_NI.new_empty(len(groups), grad_NO.shape[1], x_NI.shape[1])
    if _has_kernel(x_NI):
        return torch._grouped_mm(grad_NO.t(), x_NI, offs=groups.ends_G)
    gradients = x_NI.new_empty(len(groups), grad_NO.shape[1], x_NI.shape[1])
    grads, rows = _parts(groups, grad_NO, x_NI)
    for grad, group_rows, out in zip(grads, rows, gradients, strict=True):
        torch.mm(grad.t(), group_rows, out=out)
    return gradients


def add_weight_gradients(total: Tensor, grad_NO: Tensor, x_NI: Tensor, groups: RowGroups, *, first: bool) -> None:
    """Add the weight gradients to ``total`` [G*O, I], in its dtype; its old content is ignored if ``first``."""
    if backend_of(grad_NO, x_NI) is Backend.SHAPES:
        return
    totals = total.view(len(groups), -1, total.shape[1])
    if _has_kernel(x_NI):
        from workloads.engine.ops import triton_grouped_sums

        triton_grouped_sums.add(totals, grad_NO, x_NI, groups.ends_G, first=first)
        return
    grads, rows = _parts(groups, grad_NO, x_NI)
    for of_group, grad, group_rows in zip(totals, grads, rows, strict=True):
        if len(group_rows) > 0:
            accumulate(of_group, grad, group_rows, first=first)
        elif first:
            of_group.zero_()


def _parts(groups: RowGroups, *tensors: Tensor) -> list[list[Tensor]]:
    """Rows of each tensor by group."""
    sizes = groups.sizes()
    return [list(tensor.split(sizes)) for tensor in tensors]
