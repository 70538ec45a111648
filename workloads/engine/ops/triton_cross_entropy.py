# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of cross-entropy over a chunk of logits [C, V]: one reads them, one replaces them by gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.backend import ROW_ALIGNMENT

_BLOCK = 4096
_MAX_PROGRAMS = 2048


def statistics(logits: Tensor, targets: Tensor, first_row: int, out: Tensor, cap: float = 0.0) -> None:
    """Rows of ``out`` [3, C], fp32: largest logit, sum of ``exp(z - largest)``, target's logit (0 on other ranks).
    ``cap``: of the logits, which stay as they are in memory; 0: none.

    A program reads one row. Every lane keeps a maximum and a sum for the elements it loads itself, 16 bytes at a time;
    the lanes are combined once, at the end of the row.
    """
    assert logits.stride(0) % ROW_ALIGNMENT == 0
    width = 16 // logits.element_size()
    _statistics_kernel[(logits.shape[0],)](
        logits, logits.stride(0), targets, first_row, logits.shape[1], out, out.stride(0), cap, _lowest(logits),
        ALIGNMENT=ROW_ALIGNMENT, LANES=_BLOCK // width, WIDTH=width, CAPPED=cap > 0, num_warps=8,
    )  # fmt: skip


def logits_to_gradient(
    logits: Tensor,
    targets: Tensor,
    first_row: int,
    lse: Tensor,
    scale: float,
    gradient_scale: Tensor | None = None,
    cap: float = 0.0,
) -> None:
    """``logits <- scale * gradient_scale * (exp(logits - lse) - onehot(targets))``, in place; with a cap from those
    before it, and times its derivative."""
    assert logits.stride(0) % ROW_ALIGNMENT == 0
    rows, columns = logits.shape
    blocks = triton.cdiv(columns, _BLOCK)
    _gradient_kernel[(rows * blocks,)](
        logits, logits.stride(0), targets, first_row, columns, lse, scale, gradient_scale, blocks, cap,
        _lowest(logits), ALIGNMENT=ROW_ALIGNMENT, BLOCK=_BLOCK, CAPPED=cap > 0, num_warps=4,
    )  # fmt: skip


def _lowest(logits: Tensor) -> float:
    """Logit of rows that stand for no token, which no cap raises."""
    return torch.finfo(logits.dtype).min


def multiply_(tensor: Tensor, factor: Tensor) -> None:
    """``tensor *= factor`` without asking the device for the factor; its memory is not touched when that is 1."""
    size = tensor.numel()
    programs = min(triton.cdiv(size, _BLOCK), _MAX_PROGRAMS)
    _multiply_kernel[(programs,)](tensor, factor, size, BLOCK=_BLOCK, num_warps=8)
    torch.autograd.graph.increment_version(tensor)


@triton.jit
def _statistics_kernel(
    logits_ptr,
    stride,
    targets_ptr,
    first_row,
    columns,
    out_ptr,
    out_stride,
    cap,
    lowest,
    ALIGNMENT: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    element = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # Not -inf: a lane past the end of a short row would then subtract infinity from itself.
    largest = tl.full([LANES], -1e30, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    padded = tl.cdiv(columns, ALIGNMENT) * ALIGNMENT
    for start in range(0, columns, LANES * WIDTH):
        column = start + element
        z = tl.load(row_ptr + column, mask=column < padded, other=0.0).to(tl.float32)
        if CAPPED:
            z = tl.where(z > lowest, cap * _tanh(z / cap), z)
        z = tl.where(column < columns, z, -float("inf"))
        larger = tl.maximum(largest, tl.max(z, axis=1))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger[:, None]), axis=1)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    target = tl.load(targets_ptr + row) - first_row
    mine = (target >= 0) & (target < columns)
    tl.store(out_ptr + row, row_largest)
    tl.store(out_ptr + out_stride + row, tl.sum(total * tl.exp(largest - row_largest), axis=0))
    target_logit = tl.load(row_ptr + target, mask=mine, other=0.0).to(tl.float32)
    if CAPPED:
        target_logit = cap * _tanh(target_logit / cap)
    tl.store(out_ptr + 2 * out_stride + row, target_logit)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    stride,
    targets_ptr,
    first_row,
    columns,
    lse_ptr,
    scale,
    gradient_scale_ptr,
    blocks,
    cap,
    lowest,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    pointer = logits_ptr + row.to(tl.int64) * stride + column
    inside = column < tl.cdiv(columns, ALIGNMENT) * ALIGNMENT
    z = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets_ptr + row) - first_row
    if CAPPED:
        tanh = _tanh(z / cap)
        z = tl.where(z > lowest, cap * tanh, z)
    probability = tl.exp(z - tl.load(lse_ptr + row))
    if gradient_scale_ptr is not None:
        scale = scale * tl.load(gradient_scale_ptr)
    gradient = tl.where(column == target, probability - 1.0, probability) * scale
    if CAPPED:
        gradient *= 1.0 - tanh * tanh
    tl.store(pointer, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _multiply_kernel(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, size, tl.num_programs(0) * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offset, mask=offset < size, other=0.0).to(tl.float32)
            tl.store(x_ptr + offset, (x * factor).to(x_ptr.dtype.element_ty), mask=offset < size)
