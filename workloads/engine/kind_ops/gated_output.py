"""The output gate of attention: ``y = o * sigmoid(g)``, with one gate for each element or for each head.

Shapes: B sequences, S tokens, N heads, V values of a head; one gate for each element [B, S, N, V] (Qwen3.5), or for
each head [B, S, N, 1] (Step). Saved for backward: ``o`` and ``g``, but not the sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gated_output(o_BSNV: Tensor, gate_BSNG: Tensor) -> Tensor:
    """Contiguous [B, S, N, V]; G is V or 1."""
    if torch.compiler.is_compiling():
        return o_BSNV * gate_BSNG.sigmoid()
    return _GatedOutput.apply(o_BSNV, gate_BSNG)


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(o, gate)
        return torch.mul(o, gate.sigmoid()).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        o, gate = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        d_gate = dy * o
        if gate.shape[-1] == 1:
            d_gate = d_gate.sum(-1, keepdim=True)
        return dy * sigmoid, d_gate.mul_(sigmoid * (1 - sigmoid))
