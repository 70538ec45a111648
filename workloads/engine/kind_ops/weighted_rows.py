"""Rows times one number each: copies of tokens by the weight of their expert (Llama 4), shared experts by their gate.

Shapes: N rows, D columns. The products of a row's gradient are summed in fp32 (fp64 for fp64 rows).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops.backend import accumulation_dtype


def weighted_rows(x_ND: Tensor, weights_N: Tensor) -> Tensor:
    """[N, D] in the dtype of the rows. Both inputs are saved for backward."""
    return _WeightedRows.apply(x_ND, weights_N)


class _WeightedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return torch.mul(x, weights.unsqueeze(1), out=torch.empty_like(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        d_weights = (dy * x).sum(1, dtype=accumulation_dtype(x.dtype)).to(weights.dtype)
        return torch.mul(dy, weights.unsqueeze(1), out=torch.empty_like(dy)), d_weights
