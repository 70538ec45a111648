"""Multiplies rows in fp8 by the weight of their group: products of routed experts.

Shapes: N rows, sorted by group; G groups; I inputs, O outputs. The weights of all groups are one matrix, [G*O, I], in
e4m3 with one scale for each group (`workloads.engine.training.fp8_gather`); rows are cast here, in e4m3 with one scale
each. ``torch._scaled_grouped_mm``, which has no other kernel on Hopper, takes scales of rows for both operands: a
group's scale is repeated for all its rows, and for all rows of its transpose. On other devices with fp8 each group is a
separate product, and the host must know the groups' sizes.

Both products contract features, so groups may have any number of rows. The weights' gradients contract rows: every
group's rows would have to be a multiple of 16 bytes, and each feature would need a separate scale in each group. These
stay bf16 products, as with ``rowwise`` scaling in dense layers (`workloads.engine.ops.fp8_linear`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workloads.engine.ops.backend import Backend, backend_of
from workloads.engine.ops.fp8 import Operand, cast, product, transposed_groups


def rows_by_weights(
    x: Tensor,
    weight: Tensor,
    factors_G: Tensor,
    ends_G: Tensor,
    sizes: Callable[[], list[int]],
    *,
    turned: bool = False,
) -> Tensor:
    """``x W_g^T`` for each group's rows, [N, I] to [N, O], or with ``turned`` ``x W_g``, [N, O] to [N, I].

    ``factors_G``: fp32, the inverses of the weights' scales. ``ends_G`` and ``sizes`` as in
    `workloads.engine.ops.grouped_linear.RowGroups`.
    """
    groups = len(factors_G)
    if len(x) == 0:
        return x.new_empty(0, weight.shape[1] if turned else weight.shape[0] // groups)
    values = weight.detach().view(groups, -1, weight.shape[1])
    if turned:
        values = transposed_groups(weight.detach(), groups)
    rows, _ = cast(x, "rowwise", "activation", columns=False)
    assert rows is not None
    backend = backend_of(x, weight)
    if backend is Backend.TRITON and _has_kernel(x.device):
        factors = factors_G[:, None].expand(-1, values.shape[1]).contiguous()
        return torch._scaled_grouped_mm(
            rows.values,
            values.transpose(1, 2),
            rows.factors,
            factors,
            offs=ends_G,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    y = x.new_empty(len(x), values.shape[1])
    if backend is Backend.SHAPES:
        return y
    first = 0
    for group, size in enumerate(sizes()):
        group_rows = slice(first, first := first + size)
        if backend is Backend.TORCH:
            of_group = Operand(values[group], factors_G[group : group + 1], "tensor")
            y[group_rows] = (rows.wide(group_rows) @ of_group.wide().t()).to(y.dtype)
        elif size > 0:
            factors = factors_G[group].expand(values.shape[1]).contiguous()
            # cuBLASLt needs scales at addresses that are multiples of 16; a group may begin at any address
            of_rows = Operand(rows.values[group_rows], rows.factors[group_rows].clone(), "row")
            y[group_rows] = product(of_rows, Operand(values[group], factors, "row"), y.dtype, fast=True)
    return y


def _has_kernel(device: torch.device) -> bool:
    """Whether ``torch._scaled_grouped_mm`` runs on the device: on compute capability 9.0 and 10.0 (PyTorch 2.11,
    2.13)."""
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
