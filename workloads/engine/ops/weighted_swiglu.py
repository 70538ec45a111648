"""SwiGLU of routed experts: every row's product is multiplied by the weight that its token gives to the expert.

The outputs of a token's experts then only have to be summed, and backward needs none of them.

Shapes: N rows, F feed-forward columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks


def weighted_swiglu(gate_up_NF2: Tensor, weights_N: Tensor) -> Tensor:
    """``silu(gate) * up * weight`` of ``[gate | up]``: [N, 2F] and [N] to [N, F], rounded once.

    ``weights_N`` are fp32 (fp64 for fp64 rows). The two inputs are saved for backward.
    """
    return _WeightedSwiGLU.apply(gate_up_NF2, weights_N)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        gate_up, weights = gate_up.contiguous(), weights.contiguous()
        ctx.save_for_backward(gate_up, weights)
        y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        backend = backend_of(gate_up, weights)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_weighted_swiglu

            triton_weighted_swiglu.forward(gate_up, weights, y)
        elif backend is Backend.TORCH:
            dtype = accumulation_dtype(gate_up.dtype)
            for block in row_blocks(*gate_up.shape):
                gate, up = gate_up[block].to(dtype).chunk(2, dim=-1)
                y[block] = (functional.silu(gate) * up * weights[block].unsqueeze(1)).to(y.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weights = ctx.saved_tensors
        dy = dy.contiguous()
        d_gate_up, d_weights = torch.empty_like(gate_up), torch.empty_like(weights)
        backend = backend_of(gate_up, weights)
        if backend is Backend.TRITON:
            from workloads.engine.ops import triton_weighted_swiglu

            triton_weighted_swiglu.backward(gate_up, weights, dy, d_gate_up, d_weights)
        elif backend is Backend.TORCH:
            _backward(gate_up, weights, dy, d_gate_up, d_weights)
        return d_gate_up, d_weights


def _backward(gate_up: Tensor, weights: Tensor, dy: Tensor, d_gate_up: Tensor, d_weights: Tensor) -> None:
    dtype = accumulation_dtype(gate_up.dtype)
    for block in row_blocks(*gate_up.shape):
        gate, up = gate_up[block].to(dtype).chunk(2, dim=-1)
        d_gate, d_up = d_gate_up[block].chunk(2, dim=-1)
        grad, sigmoid = dy[block].to(dtype), gate.sigmoid()
        d_weights[block] = (grad * gate * sigmoid * up).sum(1).to(d_weights.dtype)
        grad = grad * weights[block].unsqueeze(1)
        d_gate.copy_(grad * up * sigmoid * (1 + gate * (1 - sigmoid)))
        d_up.copy_(grad * gate * sigmoid)
