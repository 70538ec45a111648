"""Attention within packed documents over a sequence whose tokens are split over ranks, by all-gathers.

Shapes and zig-zag parts as in `workloads.engine.collectives.context_parallel`. A rank gathers the keys and values of
all ranks and puts them in the order of the sequence; its queries see those of their own documents
(`workloads.engine.kind_ops.document_attention`). The backward gathers again, and a reduce-scatter returns gradients.
Messages and what is saved are those of the all-gather kind without documents. There is one block of keys instead of
three, because a document may lie in any parts. Nothing is computed while keys and values are on their way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.collectives.communication import Axis, gather_async, reduce_scatter_async, wait
from workloads.engine.collectives.context_parallel import ContextParallel, _pack, _sum_dtype, _unpack
from workloads.engine.kind_ops.document_attention import Seen, document_attention, document_backward, document_forward


def packed_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, cp: ContextParallel | None, seen: Seen) -> Tensor:
    """[B, N, S, V] of this rank's queries, with context parallelism those of `local_positions`."""
    if cp is None:
        return document_attention(q_BNSH, k_BKSH, v_BKSV, seen)
    axis, kind = cp
    assert kind == "allgather", "refused by the rules"
    return _GatheredDocuments.apply(q_BNSH, k_BKSH, v_BKSV, axis, seen)


class _GatheredDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Axis, seen: Seen) -> Tensor:
        whole = _in_order(wait(gather_async(_pack(k, v), cp)), cp)
        o, lse = document_forward(q, *_unpack(whole, k.shape[3]), seen)
        ctx.cp, ctx.seen = cp, seen
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        cp = ctx.cp
        whole = _in_order(wait(gather_async(_pack(k, v), cp)), cp)
        dq, *parts = document_backward(grad, q, *_unpack(whole, k.shape[3]), o, lse, ctx.seen)
        del whole
        sums = _by_rank(_pack(*parts).to(_sum_dtype(k.dtype, cp)), cp)
        del parts
        dk, dv = _unpack(wait(reduce_scatter_async(sums, cp)).to(k.dtype), k.shape[3])
        return dq, dk, dv, None, None


def _in_order(gathered: Tensor, cp: Axis) -> Tensor:
    """Tokens of all ranks, rank after rank, in the order of the sequence."""
    first, second = gathered.unflatten(0, (cp.size, 2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def _by_rank(whole: Tensor, cp: Axis) -> Tensor:
    """Inverse of `_in_order`."""
    first, second = whole.unflatten(0, (2, cp.size, -1)).unbind(0)
    return torch.stack([first, second.flip(0)], dim=1).flatten(0, 2)
