# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of SwiGLU. A program takes some columns of one row."""

import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_columns import WARPS, blocks_of, own_columns
from workloads.engine.ops.triton_fp8 import bits_of, raise_largest


def forward(gate_up: Tensor, y: Tensor, largest: Tensor | None = None) -> None:
    """``largest`` (1,) must be zero: it becomes the bits of the largest absolute value of ``y``, as in
    `triton_fp8.largest`."""
    size, block, blocks, programs = _grid(y)
    _forward_kernel[(programs,)](gate_up, y, largest, size, blocks, BLOCK=block, num_warps=WARPS)


def backward(gate_up: Tensor, dy: Tensor, d_gate_up: Tensor, largest: Tensor | None = None) -> None:
    """``largest``: as in `forward`, of ``d_gate_up``."""
    size, block, blocks, programs = _grid(dy)
    _backward_kernel[(programs,)](gate_up, dy, d_gate_up, largest, size, blocks, BLOCK=block, num_warps=WARPS)


def _grid(y: Tensor) -> tuple[int, int, int, int]:
    """(columns of a row, columns of a block, blocks of a row, programs)."""
    size = y.shape[-1]
    block, blocks = blocks_of(size)
    return size, block, blocks, blocks * (y.numel() // size)


@triton.jit
def _forward_kernel(gate_up_ptr, y_ptr, largest_ptr, size, blocks, BLOCK: tl.constexpr):
    row, column, inside = own_columns(size, blocks, BLOCK)
    gate_ptr = gate_up_ptr + row * size * 2
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * size + column, y, mask=inside)
    if largest_ptr is not None:
        raise_largest(tl.max(bits_of(y.to(tl.float32)), axis=0), largest_ptr)


@triton.jit
def _backward_kernel(gate_up_ptr, dy_ptr, d_gate_up_ptr, largest_ptr, size, blocks, BLOCK: tl.constexpr):
    row, column, inside = own_columns(size, blocks, BLOCK)
    gate_ptr = gate_up_ptr + row * size * 2
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = (dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(d_gate_up_ptr.dtype.element_ty)
    d_up = (dy * gate * sigmoid).to(d_gate_up_ptr.dtype.element_ty)
    d_gate_ptr = d_gate_up_ptr + row * size * 2
    tl.store(d_gate_ptr + column, d_gate, mask=inside)
    tl.store(d_gate_ptr + size + column, d_up, mask=inside)
    if largest_ptr is not None:
        both = tl.maximum(bits_of(d_gate.to(tl.float32)), bits_of(d_up.to(tl.float32)))
        raise_largest(tl.max(both, axis=0), largest_ptr)
