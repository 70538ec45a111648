# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of `group_bias`. A program takes one row; where a bias is added, some of its columns."""

import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_columns import WARPS, blocks_of, own_columns


def add(y: Tensor, bias_GO: Tensor, weights: Tensor | None, group_N: Tensor, first: int) -> None:
    """Add to the columns of ``y`` [N, C] from ``first`` on the bias of each row's group, in fp32, rounded once."""
    if y.numel():
        size = bias_GO.shape[1]
        block, blocks = blocks_of(size)
        grid = (y.shape[0] * blocks,)
        _add_kernel[grid](y, bias_GO, weights, group_N, size, y.shape[1], first, blocks, block, num_warps=WARPS)


def products(grad: Tensor, bias_GO: Tensor, group_N: Tensor, summed: Tensor) -> None:
    """``summed`` [N]: the product of each row of ``grad`` [N, O] with the bias of its group, in fp32."""
    if grad.numel():
        size = bias_GO.shape[1]
        block, _ = blocks_of(size)
        _products_kernel[(grad.shape[0],)](grad, bias_GO, group_N, summed, size, block, num_warps=WARPS)


@triton.jit
def _add_kernel(y_ptr, bias_ptr, weights_ptr, group_ptr, size, columns, first, blocks, BLOCK: tl.constexpr):
    row, column, inside = own_columns(size, blocks, BLOCK)
    group = tl.load(group_ptr + row).to(tl.int64)
    bias = tl.load(bias_ptr + group * size + column, mask=inside, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        bias *= tl.load(weights_ptr + row)
    own = y_ptr + row * columns + first + column
    y = tl.load(own, mask=inside, other=0.0).to(tl.float32) + bias
    tl.store(own, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _products_kernel(grad_ptr, bias_ptr, group_ptr, summed_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.load(group_ptr + row).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        grad = tl.load(grad_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + group * size + column, mask=inside, other=0.0).to(tl.float32)
        total += grad * bias
    tl.store(summed_ptr + row, tl.sum(total, axis=0))
