# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `workloads.engine.ops.permute`. A program computes some columns of one row."""

import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_columns import WARPS, blocks_of, own_columns


def gather(x: Tensor, order: Tensor, copies: int, y: Tensor) -> None:
    rows, size = y.shape
    if y.numel():
        block, blocks = blocks_of(size)
        _gather_kernel[(rows * blocks,)](x, order, y, size, blocks, copies, BLOCK=block, num_warps=WARPS)


def gather_sum(y: Tensor, place: Tensor, x: Tensor) -> None:
    rows, size = x.shape
    if x.numel():
        block, blocks = blocks_of(size)
        _gather_sum_kernel[(rows * blocks,)](
            y, place, x, size, blocks, COPIES=place.shape[1], BLOCK=block, num_warps=WARPS
        )


@triton.jit
def _gather_kernel(x_ptr, order_ptr, y_ptr, size, blocks, copies, BLOCK: tl.constexpr):
    row, column, inside = own_columns(size, blocks, BLOCK)
    index = tl.load(order_ptr + row)
    source = (index // copies).to(tl.int64)
    values = tl.load(x_ptr + source * size + column, mask=inside & (index >= 0), other=0.0)
    tl.store(y_ptr + row * size + column, values, mask=inside)


@triton.jit
def _gather_sum_kernel(y_ptr, place_ptr, x_ptr, size, blocks, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inside = own_columns(size, blocks, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        index = tl.load(place_ptr + row * COPIES + copy).to(tl.int64)
        values = tl.load(y_ptr + index * size + column, mask=inside & (index >= 0), other=0.0)
        total += values.to(tl.float32)
    tl.store(x_ptr + row * size + column, total.to(x_ptr.dtype.element_ty), mask=inside)
