# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the weighted SwiGLU. A program takes one row; in the forward some of its columns."""

import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_columns import WARPS, blocks_of, own_columns


def forward(gate_up: Tensor, weights: Tensor, y: Tensor) -> None:
    rows, size = y.shape
    if y.numel():
        block, blocks = blocks_of(size)
        _forward_kernel[(rows * blocks,)](gate_up, weights, y, size, blocks, BLOCK=block, num_warps=WARPS)


def backward(gate_up: Tensor, weights: Tensor, dy: Tensor, d_gate_up: Tensor, d_weights: Tensor) -> None:
    rows, size = dy.shape
    if dy.numel():
        block, _ = blocks_of(size)
        _backward_kernel[(rows,)](gate_up, weights, dy, d_gate_up, d_weights, size, BLOCK=block, num_warps=WARPS)


@triton.jit
def _forward_kernel(gate_up_ptr, weights_ptr, y_ptr, size, blocks, BLOCK: tl.constexpr):
    row, column, inside = own_columns(size, blocks, BLOCK)
    gate_ptr = gate_up_ptr + row * size * 2
    weight = tl.load(weights_ptr + row)
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up * weight
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(gate_up_ptr, weights_ptr, dy_ptr, d_gate_up_ptr, d_weights_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gate_ptr = gate_up_ptr + row * size * 2
    d_gate_ptr = d_gate_up_ptr + row * size * 2
    weight = tl.load(weights_ptr + row)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        d_weight += dy * gate * sigmoid * up
        dy *= weight
        d_gate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        d_up = dy * gate * sigmoid
        tl.store(d_gate_ptr + column, d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=inside)
        tl.store(d_gate_ptr + size + column, d_up.to(d_gate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(d_weights_ptr + row, tl.sum(d_weight, axis=0))
