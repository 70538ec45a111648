# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of weight gradients of grouped products that are added to sums.

Shapes: N rows, sorted by group; G groups; I inputs, O outputs. A program computes one tile of one group's weight and
adds it without reading the sum: by a reduction of the tensor memory accelerator on compute capability 9.0 and newer (on
older devices Triton makes atomic additions of it). No two programs add to one tile, so no order of theirs changes the
sum. A sum in bf16 is read, since a reduction would round the product before it is added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_OUTPUTS, _ROWS, _STAGES = 128, 64, 3
"""Outputs of a tile, rows that are added to it at a time, and how many times as many are on their way."""
_MANY_ROWS = 2048
"""Rows of a group from which on wider tiles are faster: on an H200 (torch 2.11, Triton 3.6) by 7 % with 64 groups of
2,048 rows, while they are slower by 8 % with 512."""


def add(totals_GOI: Tensor, grad_NO: Tensor, x_NI: Tensor, ends_G: Tensor, *, first: bool) -> None:
    """``total_g (+)= grad_g^T x_g`` for each group's rows, in fp32, rounded once; the old content of ``totals_GOI`` is
    ignored if ``first``. ``ends_G`` as in `workloads.engine.ops.grouped_linear.RowGroups`. All are contiguous,
    with I and O multiples of 8, as ``torch._grouped_mm`` requires."""
    groups, outputs, inputs = totals_GOI.shape
    columns, warps = (256, 8) if len(x_NI) >= _MANY_ROWS * groups else (128, 4)
    tiles = triton.cdiv(outputs, _OUTPUTS), triton.cdiv(inputs, columns)
    grad = TensorDescriptor.from_tensor(grad_NO, [_ROWS, _OUTPUTS])
    x = TensorDescriptor.from_tensor(x_NI, [_ROWS, columns])
    totals = TensorDescriptor.from_tensor(totals_GOI, [1, _OUTPUTS, columns])
    _add_kernel[(groups * tiles[0] * tiles[1],)](
        grad, x, ends_G, totals, tiles[0] * tiles[1], tiles[1],
        FIRST=first, READ=not first and totals_GOI.dtype != torch.float32,
        OUTPUTS=_OUTPUTS, COLUMNS=columns, ROWS=_ROWS, num_stages=_STAGES, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _add_kernel(
    grad_of,
    x_of,
    ends_ptr,
    total_of,
    tiles,
    tiles_i,
    FIRST: tl.constexpr,
    READ: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    if FIRST or start < end:
        output, column = tile // tiles_i * OUTPUTS, tile % tiles_i * COLUMNS
        total = tl.zeros([OUTPUTS, COLUMNS], dtype=tl.float32)
        whole = start + (end - start) // ROWS * ROWS
        for row in range(start, whole, ROWS):
            total = tl.dot(tl.trans(grad_of.load([row, output])), x_of.load([row, column]), total)
        if whole < end:  # rows of the next group, or of none, follow
            inside = (whole + tl.arange(0, ROWS) < end)[:, None]
            grad = tl.where(inside, grad_of.load([whole, output]), 0.0)
            x = tl.where(inside, x_of.load([whole, column]), 0.0)
            total = tl.dot(tl.trans(grad), x, total)
        if READ:
            total += total_of.load([group, output, column]).reshape([OUTPUTS, COLUMNS]).to(tl.float32)
        values = total.to(total_of.dtype)[None, :, :]
        if FIRST or READ:
            total_of.store([group, output, column], values)
        else:
            total_of.atomic_add([group, output, column], values)
