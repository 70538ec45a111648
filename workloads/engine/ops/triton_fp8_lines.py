# mypy: disable-error-code="no-untyped-def"
"""Triton kernels that cast rows to fp8, each row with its own scale, and that transpose matrices in fp8.

Shapes: R rows, C columns; G groups of R rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_columns import WARPS, blocks_of, own_columns
from workloads.engine.ops.triton_fp8 import bits_of, scale_of

_WIDEST = 4096
"""Columns that a program reads at a time."""
_SHORT, _LONG = (8192, 4), (4096, 8)
"""(values at a time, warps) for rows of up to `_WIDEST` columns and for longer ones: 4.0 TB/s with 2,048 columns and
3.2 with 16,384 on an H200. A row is read twice, first for its largest value: the second time it is still in a cache."""
_TILE, _TILE_WARPS = 128, 4


def cast_rows(x: Tensor, exponent: int, values: Tensor, factors: Tensor) -> None:
    """Write ``x`` [R, C] times one scale a row to ``values``, and the scales' inverses to ``factors`` [R].

    ``exponent``: that of the format's largest value.
    """
    rows, columns = x.shape
    block, (at_once, warps) = min(triton.next_power_of_2(columns), _WIDEST), _LONG if columns > _WIDEST else _SHORT
    rows_per_program = at_once // block
    _rows_kernel[(triton.cdiv(rows, rows_per_program),)](
        x, values, factors, rows, columns, EXPONENT=exponent, ROWS=rows_per_program, BLOCK=block, num_warps=warps
    )


def cast_rows_with(x: Tensor, bits: Tensor, exponent: int, values: Tensor) -> None:
    """Like `cast_rows`, with given bits of the largest value of each row, [R]."""
    rows, columns = x.shape
    block, blocks = blocks_of(columns)
    _rows_with_kernel[(rows * blocks,)](
        x, bits, values, columns, blocks, EXPONENT=exponent, BLOCK=block, num_warps=WARPS
    )


def transpose_groups(x: Tensor, out: Tensor) -> None:
    """Transpose every group's rows in fp8, [G*R, C] to [G, C, R]."""
    groups, columns, rows = out.shape
    tiles = triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE)
    _transpose_kernel[(groups * tiles[0] * tiles[1],)](
        x.view(torch.uint8), out.view(torch.uint8), rows, columns, *tiles, TILE=_TILE, num_warps=_TILE_WARPS
    )


@triton.jit
def _rows_kernel(
    x_ptr, values_ptr, factors_ptr, rows, columns, EXPONENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = row.to(tl.int64)[:, None] * columns
    largest = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + first + column[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, bits_of(x))
    scale, factor = scale_of(tl.max(largest, axis=1), EXPONENT)
    tl.store(factors_ptr + row, factor, mask=row < rows)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + first + column[None, :], mask=mask, other=0.0).to(tl.float32)
        y = (x * scale[:, None]).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + first + column[None, :], y, mask=mask)


@triton.jit
def _rows_with_kernel(x_ptr, bits_ptr, values_ptr, columns, blocks, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inside = own_columns(columns, blocks, BLOCK)
    scale, _ = scale_of(tl.load(bits_ptr + row), EXPONENT)
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(values_ptr + row * columns + column, (x * scale).to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, rows, columns, row_tiles, column_tiles, TILE: tl.constexpr):
    program = tl.program_id(0)
    group = (program // (row_tiles * column_tiles)).to(tl.int64)
    row = program // column_tiles % row_tiles * TILE + tl.arange(0, TILE)
    column = program % column_tiles * TILE + tl.arange(0, TILE)
    first = group * rows * columns
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + first + row.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0)
    turned = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out_ptr + first + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(x), mask=turned)
