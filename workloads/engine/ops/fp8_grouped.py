"""Products in fp8 of rows with the weight of the group that they are in: those of routed experts.

Shapes: N rows, sorted by group; G groups; I inputs, O outputs. The weights of all groups are one matrix, [G*O, I].

Every operand has one scale a row, a weight one for each row of each group, whatever recipe the other layers follow:
``torch._scaled_grouped_mm`` has no other kernel on Hopper. Weights that come in fp8 (`workloads.engine.fp8_gather`)
have one scale for each group: the same for all its rows, and for those of its transpose.

In both directions what is contracted is features, so that groups may have any number of rows. Contracted over rows, as
the weights' gradients are, every group's would have to be a multiple of 16 bytes, and each feature would need a scale
of its own in each group: these stay bf16 products, as those of the recipe ``rowwise`` in dense layers
(`workloads.engine.ops.fp8_linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.engine.ops.backend import Backend, backend_of
from workloads.engine.ops.fp8 import E4M3, EXPONENT, Operand, cast, transposed_groups


@dataclass(frozen=True, slots=True)
class GroupedOperand:
    """A matrix of each group in fp8, contracted dim last: ``values * factors[..., None]`` is what was cast."""

    values_GRC: Tensor
    factors_GR: Tensor
    """fp32"""

    def of_group(self, group: int) -> Operand:
        return Operand(self.values_GRC[group], self.factors_GR[group], "row")


def rows_by_weights(
    x: Tensor,
    weight: Tensor,
    ends_G: Tensor,
    sizes: Callable[[], list[int]],
    *,
    turned: bool = False,
    factors_G: Tensor | None = None,
) -> Tensor:
    """``x W_g^T`` of each group's rows, [N, I] to [N, O], or with ``turned`` ``x W_g``, [N, O] to [N, I].

    ``ends_G``, ``sizes``: as of `workloads.engine.ops.grouped_linear.RowGroups`. ``factors_G``: of a weight that comes
    in fp8, with one scale for each group.
    """
    if factors_G is None:
        weights = cast_weights(weight, len(ends_G), turned=turned)
    else:
        weights = _weights_in_fp8(weight.detach(), factors_G, turned=turned)
    rows, _ = cast(x, "rowwise", "activation", columns=False)
    assert rows is not None
    if backend_of(x, weight) is Backend.TRITON and len(x) > 0:
        return torch._scaled_grouped_mm(
            rows.values,
            weights.values_GRC.transpose(1, 2),
            rows.factors,
            weights.factors_GR,
            offs=ends_G,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    y = x.new_empty(len(x), weights.values_GRC.shape[1])
    if backend_of(x, weight) is Backend.TORCH:
        first = 0
        for group, size in enumerate(sizes()):
            own = slice(first, first := first + size)
            y[own] = (rows.wide(own) @ weights.of_group(group).wide().t()).to(y.dtype)
    return y


def _weights_in_fp8(weight: Tensor, factors_G: Tensor, *, turned: bool) -> GroupedOperand:
    groups = len(factors_G)
    values = transposed_groups(weight, groups) if turned else weight.view(groups, -1, weight.shape[1])
    return GroupedOperand(values, factors_G[:, None].expand(-1, values.shape[1]).contiguous())


def cast_weights(weight: Tensor, groups: int, *, turned: bool) -> GroupedOperand:
    """The weights of all groups to be contracted over their inputs, or with ``turned`` over their outputs."""
    outputs = weight.shape[0] // groups
    if not turned:
        rows, _ = cast(weight, "rowwise", "weight", columns=False)
        assert rows is not None
        return GroupedOperand(rows.values.view(groups, outputs, -1), rows.factors.view(groups, outputs))
    weight = weight.contiguous()
    values = weight.new_empty(groups, weight.shape[1], outputs, dtype=E4M3)
    factors = weight.new_empty(groups, weight.shape[1], dtype=torch.float32)
    backend = backend_of(weight)
    if backend is Backend.TRITON:
        from workloads.engine.ops import triton_fp8_lines

        triton_fp8_lines.cast_turned(weight, EXPONENT[E4M3], values, factors)
    elif backend is Backend.TORCH:
        for group, own in enumerate(weight.view(groups, outputs, -1)):
            _, columns = cast(own, "rowwise", "weight", rows=False)
            assert columns is not None
            values[group], factors[group] = columns.tensors
    return GroupedOperand(values, factors)
