# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of RMSNorm. Forward: a program normalises one tile of whole rows.

Inputs are [rows, size], contiguous, or [tokens, heads, size], some heads of a fused projection; outputs are contiguous.

Backward: a fixed number of programs loop over the tiles. Each keeps its share of the weight's gradient in registers and
writes it once; a final reduction sums the shares. There are no atomics, so the result does not change from run to run.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_fp8 import bits_of, raise_largest

_TILE = 4096
_PIPELINED_TILE = 8192
"""Largest tile for which the following tiles are prefetched; larger ones would not fit in shared memory."""
_BACKWARD_THREADS = 512
"""Threads per multiprocessor in the backward: each needs about 120 of its 65,536 registers."""


def forward(x: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor, largest: Tensor | None = None) -> None:
    """``largest`` (1,) must be zero: it becomes the bits of the largest absolute value of ``y``, as in
    `triton_fp8.largest`."""
    size = x.shape[-1]
    rows, tile_rows, block, warps = _tiling(x)
    heads, token_stride = _heads(x)
    _forward_kernel[(triton.cdiv(rows, tile_rows),)](
        x, token_stride, weight, y, rstd, largest, rows, size, eps,
        HEADS=heads, ROWS=tile_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dweight: Tensor) -> None:
    size = x.shape[-1]
    rows, tile_rows, block, warps = _tiling(x)
    heads, token_stride = _heads(x)
    tiles = triton.cdiv(rows, tile_rows)
    programs = min(tiles, _multiprocessors(x.device) * max(1, _BACKWARD_THREADS // (32 * warps)))
    shares = x.new_empty(programs, size, dtype=torch.float32)
    _backward_kernel[(programs,)](
        dy, x, token_stride, weight, rstd, dx, shares, rows, size, tiles,
        HEADS=heads, ROWS=tile_rows, BLOCK=block,
        STAGES=3 if tile_rows * block <= _PIPELINED_TILE else 1, num_warps=warps,
    )  # fmt: skip
    dweight.copy_(shares.sum(dim=0))


def _heads(x: Tensor) -> tuple[int, int]:
    """(heads of a token, elements from one token to the next); 0 heads for a contiguous matrix of rows."""
    return (0 if x.dim() == 2 else x.shape[1]), x.stride(0)


def _tiling(x: Tensor) -> tuple[int, int, int, int]:
    """(rows, rows of a tile, padded row length, warps of a program); 16 elements a thread where that is possible."""
    block = triton.next_power_of_2(x.shape[-1])
    tile_rows = max(1, _TILE // block)
    warps = min(max(tile_rows * block // 512, 4), 16 if block <= 16384 else 32)
    return x.numel() // x.shape[-1], tile_rows, block, warps


@cache
def _multiprocessors(device: torch.device) -> int:
    """Number of programs that run in parallel; on a CPU, where kernels are interpreted, two, to exercise the
    reduction."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _place_in_projection(row, column, token_stride, size, HEADS: tl.constexpr):
    token = (row // HEADS).to(tl.int64)
    return (token * token_stride + row % HEADS * size)[:, None] + column[None, :]


@triton.jit
def _forward_kernel(
    x_ptr,
    token_stride,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    largest_ptr,
    rows,
    size,
    eps,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < size)[None, :]
    offset = row.to(tl.int64)[:, None] * size + column[None, :]
    source = offset
    if HEADS > 0:
        source = _place_in_projection(row, column, token_stride, size, HEADS)
    x = tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    y = (x * rstd[:, None] * weight[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offset, y, mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if largest_ptr is not None:
        raise_largest(tl.max(tl.max(bits_of(y.to(tl.float32)), axis=1), axis=0), largest_ptr)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    token_stride,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    shares_ptr,
    rows,
    size,
    tiles,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        offset = row.to(tl.int64)[:, None] * size + column[None, :]
        source = offset
        if HEADS > 0:
            source = _place_in_projection(row, column, token_stride, size, HEADS)
        x = tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = x * rstd
        weighted = dy * weight[None, :]
        mean = (tl.sum(weighted * normed, axis=1) / size)[:, None]
        dx = (weighted - normed * mean) * rstd
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        share += dy * normed
    tl.store(shares_ptr + program.to(tl.int64) * size + column, tl.sum(share, axis=0), mask=inside)
