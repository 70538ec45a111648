# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of activations, with or without one weight a row (`weighted_activations`, `activations`).

A program takes one row; in the forward some of its columns. Everything is computed in fp32 and rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from workloads.engine.ops.triton_columns import WARPS, blocks_of, own_columns
from workloads.spec.layer_kinds.mlp import DenseMLP


def forward(x: Tensor, weights: Tensor | None, y: Tensor, mlp: DenseMLP) -> None:
    """``y`` [N, F] of the rows ``x`` [N, C]; ``weights`` [N] in fp32."""
    rows, size = y.shape
    if y.numel():
        block, blocks = blocks_of(size)
        grid = (rows * blocks,)
        _forward_kernel[grid](x, weights, y, size, blocks, *_constants(mlp), mlp.activation, block, num_warps=WARPS)


def backward(
    x: Tensor, weights: Tensor | None, dy: Tensor, d_x: Tensor, d_weights: Tensor | None, mlp: DenseMLP
) -> None:
    """``d_x`` [N, C] and, with ``weights``, ``d_weights`` [N]."""
    rows, size = dy.shape
    if dy.numel():
        block, _ = blocks_of(size)
        arguments = x, weights, dy, d_x, d_weights, size, *_constants(mlp), mlp.activation, block
        _backward_kernel[(rows,)](*arguments, num_warps=WARPS)


def _constants(mlp: DenseMLP) -> tuple[float, float, float]:
    return mlp.limit, mlp.slope, mlp.offset


@triton.jit
def _load(ptr, column, inside):
    return tl.load(ptr + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gelu_sigmoid(gate):
    """s of ``gelu(x) = x s(x)``, the tanh form of GELU: the sigmoid of ``2 sqrt(2 / pi) (x + 0.044715 x^3)``."""
    return tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def _gelu_inner(gate):
    """Derivative of what `_gelu_sigmoid` takes the sigmoid of."""
    return 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * gate * gate)


@triton.jit
def _forward_kernel(
    x_ptr,
    weights_ptr,
    y_ptr,
    size,
    blocks,
    limit,
    slope,
    offset,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = own_columns(size, blocks, BLOCK)
    if ACTIVATION == "relu2":
        x = tl.maximum(_load(x_ptr + row * size, column, inside), 0.0)
        y = x * x
    else:
        gate = _load(x_ptr + row * size * 2, column, inside)
        up = _load(x_ptr + row * size * 2 + size, column, inside)
        if ACTIVATION == "silu":
            y = gate * tl.sigmoid(gate) * up
        elif ACTIVATION == "gelu_tanh":
            y = gate * _gelu_sigmoid(gate) * up
        else:
            gate = tl.minimum(gate, limit)
            y = gate * tl.sigmoid(slope * gate) * (tl.maximum(tl.minimum(up, limit), -limit) + offset)
    if weights_ptr is not None:
        y *= tl.load(weights_ptr + row)
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    x_ptr,
    weights_ptr,
    dy_ptr,
    d_x_ptr,
    d_weights_ptr,
    size,
    limit,
    slope,
    offset,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        dy = _load(dy_ptr + row * size, column, inside)
        if ACTIVATION == "relu2":
            x = tl.maximum(_load(x_ptr + row * size, column, inside), 0.0)
            d_weight += dy * x * x
            if weights_ptr is not None:
                dy *= tl.load(weights_ptr + row)
            d_x = 2.0 * x * dy
            tl.store(d_x_ptr + row * size + column, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        else:
            gate = _load(x_ptr + row * size * 2, column, inside)
            up = _load(x_ptr + row * size * 2 + size, column, inside)
            if ACTIVATION == "silu":
                sigmoid = tl.sigmoid(gate)
                curved = sigmoid * (1.0 + gate * (1.0 - sigmoid))
                passes = 1.0
            elif ACTIVATION == "gelu_tanh":
                sigmoid = _gelu_sigmoid(gate)
                curved = sigmoid * (1.0 + gate * (1.0 - sigmoid) * _gelu_inner(gate))
                passes = 1.0
            else:
                kept = gate <= limit
                passes = tl.where(tl.abs(up) <= limit, 1.0, 0.0)
                gate = tl.minimum(gate, limit)
                up = tl.maximum(tl.minimum(up, limit), -limit) + offset
                sigmoid = tl.sigmoid(slope * gate)
                curved = tl.where(kept, sigmoid * (1.0 + slope * gate * (1.0 - sigmoid)), 0.0)
            d_weight += dy * gate * sigmoid * up
            if weights_ptr is not None:
                dy *= tl.load(weights_ptr + row)
            d_gate, d_up = dy * up * curved, dy * gate * sigmoid * passes
            tl.store(d_x_ptr + row * size * 2 + column, d_gate.to(d_x_ptr.dtype.element_ty), mask=inside)
            tl.store(d_x_ptr + row * size * 2 + size + column, d_up.to(d_x_ptr.dtype.element_ty), mask=inside)
    if weights_ptr is not None:
        tl.store(d_weights_ptr + row, tl.sum(d_weight, axis=0))
