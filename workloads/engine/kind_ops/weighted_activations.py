"""Activations of experts, each row's product multiplied by the weight that its token gives to the expert.

The outputs of a token's experts then only have to be summed, and backward needs none of them.

Shapes: N rows, F columns of this rank, C of the first projection: 2F (``[gate | up]``) with a gate, F without.

silu           ``gate sigmoid(gate) * up``: SwiGLU
clamped_silu   ``g sigmoid(slope g) * (u + offset)``, where ``g = min(gate, limit)`` and u is ``up`` between ``-limit``
               and ``limit`` (gpt-oss and MiniMax-M3: slope 1.702, offset 1, limit 7; DeepSeek-V4: slope 1, offset 0,
               limit 10). What is clamped gets no gradient
gelu_tanh      ``gelu(gate) * up`` with the tanh form of GELU (Gemma 4)
relu2          ``relu(x)^2``, without a gate (Nemotron 3)

The two inputs are saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of, row_blocks
from workloads.spec.layer_kinds.mlp import DenseMLP

_aten = torch.ops.aten


def weighted_activation(x_NC: Tensor, weights_N: Tensor, mlp: DenseMLP) -> Tensor:
    """The activation of ``mlp`` times each row's weight: [N, C] and [N] to [N, F], rounded once.

    ``weights_N`` are fp32 (fp64 for fp64 rows). The two inputs are saved for backward.
    """
    return _WeightedActivation.apply(x_NC, weights_N, mlp)


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, mlp: DenseMLP) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, weights)
        ctx.mlp = mlp
        y = x.new_empty(x.shape[0], x.shape[1] // (2 if mlp.gated else 1))
        backend = backend_of(x, weights)
        if backend is Backend.TRITON:
            from workloads.engine.kind_ops import triton_activations

            triton_activations.forward(x, weights, y, mlp)
        elif backend is Backend.TORCH:
            dtype = accumulation_dtype(x.dtype)
            for block in row_blocks(*x.shape):
                product, _ = _activate(x[block].to(dtype), mlp, None)
                y[block] = product * weights[block].unsqueeze(1)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        mlp: DenseMLP = ctx.mlp
        dy = dy.contiguous()
        d_x, d_weights = torch.empty_like(x), torch.empty_like(weights)
        backend = backend_of(x, weights)
        if backend is Backend.TRITON:
            from workloads.engine.kind_ops import triton_activations

            triton_activations.backward(x, weights, dy, d_x, d_weights, mlp)
        elif backend is Backend.TORCH:
            dtype = accumulation_dtype(x.dtype)
            for block in row_blocks(*x.shape):
                grad = dy[block].to(dtype)
                product, d_block = _activate(x[block].to(dtype), mlp, grad * weights[block].unsqueeze(1))
                d_weights[block] = (grad * product).sum(1)
                assert d_block is not None
                d_x[block] = d_block
        return d_x, d_weights, None


def _activate(x: Tensor, mlp: DenseMLP, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The product of some rows and, with the gradient of the product, the gradient of the rows."""
    match mlp.activation:
        case "silu":
            return _silu(x, grad)
        case "clamped_silu":
            return _clamped_silu(x, mlp, grad)
        case "gelu_tanh":
            return _gelu_tanh(x, grad)
    assert mlp.activation == "relu2", "refused by the rules"
    return _relu2(x, grad)


def _silu(x: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = x.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    if grad is None:
        return gate * sigmoid * up, None
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return gate * sigmoid * up, torch.cat([d_gate, grad * gate * sigmoid], -1)


def _clamped_silu(x: Tensor, mlp: DenseMLP, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = x.chunk(2, dim=-1)
    clamped = gate.clamp(max=mlp.limit)
    sigmoid = (mlp.slope * clamped).sigmoid()
    shifted = up.clamp(-mlp.limit, mlp.limit) + mlp.offset
    if grad is None:
        return clamped * sigmoid * shifted, None
    d_gate = grad * shifted * sigmoid * (1 + mlp.slope * clamped * (1 - sigmoid)) * (gate <= mlp.limit)
    d_up = grad * clamped * sigmoid * (up.abs() <= mlp.limit)
    return clamped * sigmoid * shifted, torch.cat([d_gate, d_up], -1)


def _gelu_tanh(x: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = x.chunk(2, dim=-1)
    gelu = functional.gelu(gate, approximate="tanh")
    if grad is None:
        return gelu * up, None
    d_gate = _aten.gelu_backward(grad * up, gate, approximate="tanh")
    return gelu * up, torch.cat([d_gate, grad * gelu], -1)


def _relu2(x: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    positive = functional.relu(x)
    return positive.square(), None if grad is None else 2 * positive * grad
