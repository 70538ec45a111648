# mypy: disable-error-code="no-untyped-def"
"""Triton kernels that cast matrices to fp8: largest values, and one pass that writes a matrix and its transpose.

Shapes: R rows, C columns. Kernels read [R, C] and write [R, C] and [C, R], both contiguous, because tensor cores of
Hopper take fp8 operands with the contracted dim last only: a product and its two backward products need both.

Largest values are kept as the bits of a non-negative fp32, which order like integers; so a NaN is larger than all
numbers and is not lost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _TILE_WARPS = 128, 4
"""Rows and columns of a tile whose values share scales (1 by 128 of them if scales are blockwise), and its warps."""
_CAST_TILE, _CAST_WARPS = 64, 8
_FLAT, _FLAT_WARPS = 8192, 8
_MAX_PROGRAMS = 528
"""Programs at most: with so many, a cast and a search for the largest value reach 3.8 and 4.0 TB/s on an H200; a copy
reaches 4.3."""
_SHARED = {"tensor": 0, "column": 1}
"""Values that share a scale; `workloads.engine.ops.triton_fp8_lines` has scales by row."""


def largest(x: Tensor, shared: str) -> Tensor:
    """Bits of the largest absolute value (int32): [1], or one of each column [C]."""
    rows, columns = x.shape
    out = torch.zeros(1 if shared == "tensor" else columns, dtype=torch.int32, device=x.device)
    if shared == "tensor":
        programs = min(triton.cdiv(x.numel(), _FLAT), _MAX_PROGRAMS)
        _largest_kernel[(programs,)](x, out, x.numel(), BLOCK=_FLAT, num_warps=_FLAT_WARPS)
    else:
        grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
        _largest_of_columns_kernel[grid](x, out, rows, columns, TILE=_TILE, num_warps=_TILE_WARPS)
    return out


def cast(
    x: Tensor, bits: Tensor, shared: str, exponent: int, rows: Tensor | None, columns: Tensor | None, factors: Tensor
) -> None:
    """Write ``x`` times its scales to ``rows`` [R, C] and ``columns`` [C, R], and the scales' inverses to ``factors``.

    ``bits``: result of `largest`; ``exponent``: that of the format's largest value.
    """
    tiles = triton.cdiv(x.shape[0], _CAST_TILE), triton.cdiv(x.shape[1], _CAST_TILE)
    for pair in _results_per_launch(x, rows, columns):
        _cast_kernel[(tiles[0] * tiles[1],)](
            x, bits, *pair, factors, x.shape[0], x.shape[1], tiles[1],
            SHARED=_SHARED[shared], EXPONENT=exponent, TILE=_CAST_TILE, num_warps=_CAST_WARPS,
        )  # fmt: skip


def cast_blocks(
    x: Tensor, exponent: int, rows: Tensor | None, columns: Tensor | None, row_factors: Tensor, column_factors: Tensor
) -> None:
    """Cast with one scale for each 1 by 128 values along the last dim of each result: ``rows`` and ``columns``
    separately."""
    tiles = triton.cdiv(x.shape[0], _TILE), triton.cdiv(x.shape[1], _TILE)
    _blocks_kernel[(tiles[0] * tiles[1],)](
        x, rows, columns, row_factors, column_factors, x.shape[0], x.shape[1], tiles[1],
        EXPONENT=exponent, TILE=_TILE, num_warps=_TILE_WARPS,
    )  # fmt: skip


def cast_squares(
    x: Tensor, exponent: int, rows: Tensor | None, columns: Tensor | None, row_factors: Tensor, column_factors: Tensor
) -> None:
    """Cast with one scale for each 128 by 128 values, which ``rows`` and ``columns`` share."""
    tiles = triton.cdiv(x.shape[0], _TILE), triton.cdiv(x.shape[1], _TILE)
    for pair in _results_per_launch(x, rows, columns):
        _squares_kernel[(tiles[0] * tiles[1],)](
            x, *pair, row_factors, column_factors, x.shape[0], x.shape[1], tiles[1],
            row_factors.stride(0), column_factors.stride(0), EXPONENT=exponent, TILE=_TILE, num_warps=_TILE_WARPS,
        )  # fmt: skip


def _results_per_launch(
    x: Tensor, rows: Tensor | None, columns: Tensor | None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Which results one kernel may write. Triton 3.6 on Hopper stores a tile that was cast from fp32 wrongly if it
    writes both."""
    if x.dtype == torch.float32 and rows is not None and columns is not None:
        return [(rows, None), (None, columns)]
    return [(rows, columns)]


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_largest(bits, out_ptr):
    """Raise ``out`` to ``bits``, a scalar. For most programs ``out`` is already larger: they need no atomic."""
    if bits > tl.load(out_ptr):
        tl.atomic_max(out_ptr, bits)


@triton.jit
def scale_of(bits, EXPONENT: tl.constexpr):
    """(scale, its inverse): the largest power of two that brings a value with these bits to at most 1.75 * 2^EXPONENT.

    Adding 0x1FFFFF carries into the exponent exactly if the significand is above 1.75. Inf and NaN give NaN.
    """
    power = (tl.minimum(bits, 0x7F800000) + 0x1FFFFF) >> 23
    power = tl.maximum(power, EXPONENT + 1)
    scale = ((EXPONENT + 254 - power) << 23).to(tl.float32, bitcast=True)
    inverse = ((power - EXPONENT) << 23).to(tl.float32, bitcast=True)
    return scale, tl.where(bits >= 0x7F800000, float("nan"), inverse)


@triton.jit
def _largest_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, size, tl.num_programs(0) * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offset, mask=offset < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, bits_of(x))
    tl.atomic_max(out_ptr, tl.max(largest, axis=0))


@triton.jit
def _largest_of_columns_kernel(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.atomic_max(out_ptr + column, tl.max(bits_of(x), axis=0), mask=column < columns)


@triton.jit
def _store(y, rows_ptr, columns_ptr, row, column, rows, columns):
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    if rows_ptr is not None:
        tl.store(rows_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], y, mask=mask)
    if columns_ptr is not None:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(columns_ptr + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(y), mask=turned)


@triton.jit
def _tile(x_ptr, rows, columns, column_tiles, TILE: tl.constexpr):
    """(row and column of the tile, rows and columns in it, its values in fp32) of this program."""
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    row, column = row_tile * TILE + tl.arange(0, TILE), column_tile * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return row_tile, column_tile, row, column, x


@triton.jit
def _cast_kernel(
    x_ptr,
    bits_ptr,
    rows_ptr,
    columns_ptr,
    factors_ptr,
    rows,
    columns,
    column_tiles,
    SHARED: tl.constexpr,
    EXPONENT: tl.constexpr,
    TILE: tl.constexpr,
):
    row_tile, column_tile, row, column, x = _tile(x_ptr, rows, columns, column_tiles, TILE)
    if SHARED == 0:
        scale, factor = scale_of(tl.load(bits_ptr), EXPONENT)
        y = x * scale
        if row_tile + column_tile == 0:
            tl.store(factors_ptr, factor)
    else:
        scale, factor = scale_of(tl.load(bits_ptr + column, mask=column < columns, other=0), EXPONENT)
        y = x * scale[None, :]
        if row_tile == 0:
            tl.store(factors_ptr + column, factor, mask=column < columns)
    kind = columns_ptr.dtype.element_ty if rows_ptr is None else rows_ptr.dtype.element_ty
    _store(y.to(kind), rows_ptr, columns_ptr, row, column, rows, columns)


@triton.jit
def _blocks_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    row_factors_ptr,
    column_factors_ptr,
    rows,
    columns,
    column_tiles,
    EXPONENT: tl.constexpr,
    TILE: tl.constexpr,
):
    row_tile, column_tile, row, column, x = _tile(x_ptr, rows, columns, column_tiles, TILE)
    if rows_ptr is not None:
        scale, factor = scale_of(tl.max(bits_of(x), axis=1), EXPONENT)
        tl.store(row_factors_ptr + column_tile.to(tl.int64) * rows + row, factor, mask=row < rows)
        _store((x * scale[:, None]).to(rows_ptr.dtype.element_ty), rows_ptr, None, row, column, rows, columns)
    if columns_ptr is not None:
        scale, factor = scale_of(tl.max(bits_of(x), axis=0), EXPONENT)
        tl.store(column_factors_ptr + row_tile.to(tl.int64) * columns + column, factor, mask=column < columns)
        _store((x * scale[None, :]).to(columns_ptr.dtype.element_ty), None, columns_ptr, row, column, rows, columns)


@triton.jit
def _squares_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    row_factors_ptr,
    column_factors_ptr,
    rows,
    columns,
    column_tiles,
    row_stride,
    column_stride,
    EXPONENT: tl.constexpr,
    TILE: tl.constexpr,
):
    row_tile, column_tile, row, column, x = _tile(x_ptr, rows, columns, column_tiles, TILE)
    scale, factor = scale_of(tl.max(tl.max(bits_of(x), axis=1), axis=0), EXPONENT)
    if rows_ptr is not None:
        tl.store(row_factors_ptr + row_tile * row_stride + column_tile, factor)
        kind = rows_ptr.dtype.element_ty
        _store((x * scale).to(kind), rows_ptr, None, row, column, rows, columns)
    if columns_ptr is not None:
        tl.store(column_factors_ptr + column_tile * column_stride + row_tile, factor)
        other = columns_ptr.dtype.element_ty
        _store((x * scale).to(other), None, columns_ptr, row, column, rows, columns)
