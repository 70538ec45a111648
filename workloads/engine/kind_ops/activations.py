"""Activations of feed-forward layers other than SwiGLU, forward and backward, on the output of the first projection.

Shapes: T tokens, F feed-forward columns of this rank.

relu2       ``relu(x)^2``, without a gate (Primer, arXiv:2109.08668; Nemotron): [T, F] to [T, F]
gelu_tanh   ``gelu(gate) * up`` with the tanh form of GELU (Gemma, arXiv:2403.08295): [T, 2F] to [T, F]

Only the input is saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_aten = torch.ops.aten


def relu2(x_TF: Tensor) -> Tensor:
    return functional.relu(x_TF).square() if torch.compiler.is_compiling() else _ReLU2.apply(x_TF)


def gelu_gated(gate_up_TF2: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        gate, up = gate_up_TF2.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up
    return _GeluGated.apply(gate_up_TF2)


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return functional.relu(x).mul_(dy).mul_(2)


class _GeluGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(dy, up, out=d_up)  # memory that d_up needs later
        _aten.gelu_backward.grad_input(d_up, gate, approximate="tanh", grad_input=d_gate)
        _aten.gelu.out(gate, approximate="tanh", out=d_up)
        d_up.mul_(dy)
        return d_gate_up
