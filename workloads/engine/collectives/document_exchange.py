"""Attention within packed documents over sequences whose tokens are split over ranks.

Shapes as in `workloads.engine.collectives.context_parallel`. Ranks hold the tokens of
`workloads.engine.training.data.held_tokens`.

allgather  a rank gathers the keys and values of all ranks and puts them in the order of their sequences; its queries
           see those of their own documents (`workloads.engine.kind_ops.document_attention`). The backward gathers
           again, and a reduce-scatter returns gradients. Messages and what is saved are those of the all-gather kind
           without documents. There is one block of keys instead of three, because a document may lie on any ranks, and
           for the same reason all keys are gathered. Nothing is computed while they are on their way. FlexAttention
           runs its forward again in the backward, since gathered keys are not kept
ulysses    attention to documents between the exchanges of `workloads.engine.collectives.ulysses`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.collectives.communication import Axis, gather_async, reduce_scatter_async, wait
from workloads.engine.collectives.context_parallel import ContextParallel, _pack, _sum_dtype, _unpack
from workloads.engine.collectives.ulysses import ulysses_attention
from workloads.engine.kind_ops.document_attention import (
    Order,
    Seen,
    document_attention,
    document_backward,
    document_forward,
)


def seen_keys(
    places_T: Tensor,
    others: Sequence[Tensor],
    index_T: Tensor,
    cp: ContextParallel | None,
    like: Tensor,
    limits: tuple[int, int] | None = None,
) -> Seen:
    """Which keys the queries of a micro-batch see. ``places_T``: place of each of this rank's tokens in its document;
    ``others``: the parts of other ranks (`workloads.engine.training.data.Batch`). ``index_T``: all indices of a
    sequence. ``like``: a tensor of the device and dtype of queries. ``limits``: as `Seen.of` takes them."""
    keys = len(index_T)
    own = keys if cp is None else keys // cp[0].size
    by_sequence = [part.view(-1, own) for part in (places_T, *others)]
    if cp is None:
        return Seen.of(by_sequence[0], index_T.expand(len(by_sequence[0]), -1), keys, like, limits=limits)
    axis, kind = cp
    if kind == "ulysses":
        places_BT = torch.cat(by_sequence[1:], 1)
        return Seen.of(places_BT, index_T.expand_as(places_BT), keys, like, limits=limits)
    return Seen.of(by_sequence[0], by_sequence[1 + axis.rank], keys, like, Order.of(by_sequence[1:]))


@torch.compiler.disable  # one graph break, as with ring attention: attention to documents is compiled by itself
def packed_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, cp: ContextParallel | None, seen: Seen) -> Tensor:
    """[B, N, S, V] of this rank's queries."""
    if cp is None:
        return document_attention(q_BNSH, k_BKSH, v_BKSV, seen)
    axis, kind = cp
    if kind == "ulysses":
        return ulysses_attention(q_BNSH, k_BKSH, v_BKSV, axis, partial(document_attention, seen=seen))
    assert kind == "allgather" and seen.order is not None, "refused by the rules"
    return _GatheredDocuments.apply(q_BNSH, k_BKSH, v_BKSV, axis, seen)


class _GatheredDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Axis, seen: Seen) -> Tensor:
        order = seen.order
        assert order is not None
        whole = _in_order(wait(gather_async(_pack(k, v), cp)), order)
        o, lse = document_forward(q, *_unpack(whole, k.shape[3]), seen)
        ctx.cp, ctx.seen = cp, seen
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        cp, order = ctx.cp, ctx.seen.order
        whole = _in_order(wait(gather_async(_pack(k, v), cp)), order)
        dq, *parts = document_backward(grad, q, *_unpack(whole, k.shape[3]), o, lse, ctx.seen)
        del whole
        sums = _by_rank(_pack(*parts).to(_sum_dtype(k.dtype, cp)), order)
        del parts
        dk, dv = _unpack(wait(reduce_scatter_async(sums, cp)).to(k.dtype), k.shape[3])
        return dq, dk, dv, None, None


def _in_order(gathered_TBKX: Tensor, order: Order) -> Tensor:
    """Tokens of all ranks, rank after rank, in the order of their sequences."""
    return gathered_TBKX.flatten(0, 1).index_select(0, order.whole_F).view_as(gathered_TBKX)


def _by_rank(whole_TBKX: Tensor, order: Order) -> Tensor:
    """Inverse of `_in_order`."""
    return whole_TBKX.flatten(0, 1).index_select(0, order.held_F).view_as(whole_TBKX)
