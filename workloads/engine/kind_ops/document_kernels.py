"""Attention within packed documents by FlashAttention's kernels for sequences of variable length: those of torch, or
FlashAttention-4 if the process has chosen it (`workloads.engine.ops.attention.choose_flash4`).

Shapes as in `workloads.engine.ops.attention`; D documents. Queries are all tokens of their sequences, in 16 bits, and
values are as large as keys (`workloads.rules.document_cases`). The kernels take the rows at which documents begin
from the device, so nothing waits for it, and another micro-batch has lists of the same size. They run on CUDA only: the
plain formulas of `workloads.engine.kind_ops.document_attention` are their reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.ops import flash4
from workloads.engine.ops.attention import runs_flash4

_aten: Any = torch.ops.aten


class Cuts(NamedTuple):
    """Where the documents of a micro-batch begin, in its rows of tokens, sequence after sequence."""

    bounds_D: Tensor
    """First row of each document, and the number of rows, repeated up to the most documents that a micro-batch has:
    int32 [D + 1]."""
    longest: int
    """Most tokens in a document of any micro-batch."""

    @classmethod
    def of(cls, places_BS: Tensor, most: int, longest: int) -> Cuts:
        """``places_BS``: place of each token in its document; ``most``: of the documents in a micro-batch."""
        begins_R = (places_BS == 0).flatten()
        rows = len(begins_R)
        # As long as if each row were a document, so that its size does not depend on them; rows that begin none are
        # written to its end.
        bounds = torch.full((rows + 2,), rows, dtype=torch.int32, device=places_BS.device)
        at_R = torch.where(begins_R, begins_R.cumsum(0) - 1, rows + 1)
        bounds.scatter_(0, at_R, torch.arange(rows, dtype=torch.int32, device=places_BS.device))
        return cls(bounds[: most + 1], longest)


def attention_by_length(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cuts: Cuts) -> Tensor:
    """[B, N, S, H], with gradients."""
    o: Tensor = _ByLength.apply(q_BNSH, k_BKSH, v_BKSH, cuts)
    return o


class _ByLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cuts: Cuts) -> Tensor:
        ctx.cuts, ctx.by_flash4 = cuts, runs_flash4(q)
        bounds, longest = cuts
        rows = _rows(q), _rows(k), _rows(v)
        if ctx.by_flash4:
            o, lse = flash4.forward_by_length(*rows, bounds, longest)
        else:
            found = _aten._flash_attention_forward(*rows, bounds, bounds, longest, longest, 0.0, True, False)
            o, lse, *ctx.random = found[:4]
        o = _heads(o, q)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        bounds, longest = ctx.cuts
        rows = _rows(grad), _rows(q), _rows(k), _rows(v), _rows(o), lse, bounds
        if ctx.by_flash4:
            gradients = flash4.backward_by_length(*rows, longest)
        else:
            gradients = _aten._flash_attention_backward(*rows, bounds, longest, longest, 0.0, True, *ctx.random)
        dq, dk, dv = (_heads(one, q) for one in gradients)
        return dq, dk, dv, None


def _rows(x_BNSH: Tensor) -> Tensor:
    """[B S, N, H]: a view if heads of a token lie together, as projections write them."""
    return x_BNSH.transpose(1, 2).flatten(0, 1)


def _heads(rows_RNH: Tensor, like_BNSH: Tensor) -> Tensor:
    return rows_RNH.unflatten(0, (like_BNSH.shape[0], -1)).transpose(1, 2)
