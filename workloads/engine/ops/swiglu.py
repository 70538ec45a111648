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


def swiglu(gate_up_TF2: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate | up]``, joined on the last dim: [T, 2F] to [T, F], rounded once.

    Only ``gate_up`` is saved: one pass of its backward is cheaper than storing the activation.
    """
    if torch.compiler.is_compiling():
        return _expression(gate_up_TF2)
    return _SwiGLU.apply(gate_up_TF2)


def _expression(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        backend = backend_of(gate_up)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_swiglu

            triton_swiglu.forward(gate_up, y)
        elif backend is Backend.TORCH:
            rows, out = gate_up.flatten(0, -2), y.flatten(0, -2)
            for block in row_blocks(*rows.shape):
                out[block] = _expression(rows[block])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dy = dy.contiguous()
        d_gate_up = torch.empty_like(gate_up)
        backend = backend_of(gate_up)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_swiglu

            triton_swiglu.backward(gate_up, dy, d_gate_up)
        elif backend is Backend.TORCH:
            _backward(gate_up.flatten(0, -2), dy.flatten(0, -2), d_gate_up.flatten(0, -2))
        return d_gate_up


def _backward(gate_up: Tensor, dy: Tensor, d_gate_up: Tensor) -> None:
    dtype = accumulation_dtype(gate_up.dtype)
    for block in row_blocks(*gate_up.shape):
        gate, up = gate_up[block].to(dtype).chunk(2, dim=-1)
        d_gate, d_up = d_gate_up[block].chunk(2, dim=-1)
        grad, sigmoid = dy[block].to(dtype), gate.sigmoid()
        d_gate.copy_(grad * up * sigmoid * (1 + gate * (1 - sigmoid)))
        d_up.copy_(grad * gate * sigmoid)
