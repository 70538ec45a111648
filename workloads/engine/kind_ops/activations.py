"""Activations of feed-forward layers other than SwiGLU, forward and backward, on the output of the first projection.

Shapes: T tokens, F feed-forward columns of this rank.

relu2       ``relu(x)^2``, without a gate (Primer, arXiv:2109.08668; Nemotron): [T, F] to [T, F]
gelu_tanh   ``gelu(gate) * up`` with the tanh form of GELU (Gemma, arXiv:2403.08295): [T, 2F] to [T, F]

Only the input is saved for backward. On a GPU each pass is one kernel, except where blocks are compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workloads.engine.ops.backend import Backend, backend_of
from workloads.spec.layer_kinds.mlp import DenseMLP

_aten = torch.ops.aten


def relu2(x_TF: Tensor) -> Tensor:
    return functional.relu(x_TF).square() if torch.compiler.is_compiling() else _ReLU2.apply(x_TF)


def gelu_gated(gate_up_TF2: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        gate, up = gate_up_TF2.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up
    return _GeluGated.apply(gate_up_TF2)


_RELU2 = DenseMLP(width=0, activation="relu2", gated=False)
_GELU = DenseMLP(width=0, activation="gelu_tanh")


def _forward(x: Tensor, y: Tensor, mlp: DenseMLP) -> Tensor:
    from workloads.engine.kind_ops import triton_activations

    triton_activations.forward(x.flatten(0, -2), None, y.flatten(0, -2), mlp)
    return y


def _backward(x: Tensor, dy: Tensor, mlp: DenseMLP) -> Tensor:
    from workloads.engine.kind_ops import triton_activations

    d_x = torch.empty_like(x)
    triton_activations.backward(x.flatten(0, -2), None, dy.flatten(0, -2), d_x.flatten(0, -2), None, mlp)
    return d_x


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        if backend_of(x) is Backend.TRITON:
            return _forward(x, torch.empty_like(x), _RELU2)
        return functional.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if backend_of(x) is Backend.TRITON:
            return _backward(x, dy.contiguous(), _RELU2)
        return functional.relu(x).mul_(dy).mul_(2)


class _GeluGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        if backend_of(gate_up) is Backend.TRITON:
            return _forward(gate_up, gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2), _GELU)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if backend_of(gate_up) is Backend.TRITON:
            return _backward(gate_up, dy.contiguous(), _GELU)
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(dy, up, out=d_up)  # memory that d_up needs later
        _aten.gelu_backward.grad_input(d_up, gate, approximate="tanh", grad_input=d_gate)
        _aten.gelu.out(gate, approximate="tanh", out=d_up)
        d_up.mul_(dy)
        return d_gate_up
