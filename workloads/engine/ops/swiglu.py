"""SwiGLU, ``silu(gate) * up`` (arXiv:2002.05202), on the fused output of the gate and up projections.

Shapes: T tokens, F feed-forward columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks
from workloads.engine.ops.fp8 import record_largest


def swiglu(gate_up_TF2: Tensor, *, for_fp8: bool = False) -> Tensor:
    """``silu(gate) * up`` of ``[gate | up]``, joined on the last dim: [T, 2F] to [T, F], rounded once.

    Only ``gate_up`` is saved: recomputing the activation in one pass of the backward is cheaper than storing it.
    ``for_fp8``: output and gradient will be cast with one scale each, so the kernels also record their largest values.
    """
    if torch.compiler.is_compiling():
        return _expression(gate_up_TF2)
    y: Tensor
    y, largest = _SwiGLU.apply(gate_up_TF2, for_fp8)
    return y if largest is None else record_largest(y, largest)


def _expression(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, for_fp8: bool) -> tuple[Tensor, Tensor | None]:
        ctx.for_fp8, largest = for_fp8, None
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        backend = backend_of(gate_up)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_swiglu

            if for_fp8:
                largest = gate_up.new_zeros(1, dtype=torch.int32)
                ctx.mark_non_differentiable(largest)
            triton_swiglu.forward(gate_up, y, largest)
        elif backend is Backend.TORCH:
            rows, out = gate_up.flatten(0, -2), y.flatten(0, -2)
            for block in row_blocks(*rows.shape):
                out[block] = _expression(rows[block])
        return y, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        dy = dy.contiguous()
        d_gate_up = torch.empty_like(gate_up)
        backend = backend_of(gate_up)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_swiglu

            largest = gate_up.new_zeros(1, dtype=torch.int32) if ctx.for_fp8 else None
            triton_swiglu.backward(gate_up, dy, d_gate_up, largest)
            if largest is not None:
                record_largest(d_gate_up, largest)
        elif backend is Backend.TORCH:
            _backward(gate_up.flatten(0, -2), dy.flatten(0, -2), d_gate_up.flatten(0, -2))
        return d_gate_up, None


def _backward(gate_up: Tensor, dy: Tensor, d_gate_up: Tensor) -> None:
    dtype = accumulation_dtype(gate_up.dtype)
    for block in row_blocks(*gate_up.shape):
        gate, up = gate_up[block].to(dtype).chunk(2, dim=-1)
        d_gate, d_up = d_gate_up[block].chunk(2, dim=-1)
        grad, sigmoid = dy[block].to(dtype), gate.sigmoid()
        d_gate.copy_(grad * up * sigmoid * (1 + gate * (1 - sigmoid)))
        d_up.copy_(grad * gate * sigmoid)
