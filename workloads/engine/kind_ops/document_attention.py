"""Causal attention within documents that are packed into one sequence.

Shapes as in `workloads.engine.ops.attention`: S queries of this rank, T keys of the whole sequence. A query at index i
of the sequence, whose document begins at index f, sees the keys f to i. Both are tensors, so that every micro-batch may
have other documents without another compilation or another CUDA graph:

flash    FlashAttention's kernels on a GPU, for which every document is a sequence
         (`workloads.engine.kind_ops.document_kernels`)
flex     FlexAttention on a GPU, up to 32 bits: blocks of keys that no query of a block sees are skipped. The lists of
         blocks have the size of all blocks, whatever the documents are
plain    the plain formulas, a block of queries after the other (a CPU, float64). FakeTensors are only allocated

Saved for backward: queries, keys, values, output and log-sum-exp, as of attention without documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.kind_ops.document_kernels import Cuts, attention_by_length
from workloads.engine.ops.backend import Backend, accumulation_dtype, backend_of

_SCORES = 2**22
"""Scores of a block of the plain formulas, about."""


class Order(NamedTuple):
    """The order of tokens that ranks hold, one rank after the other, and the order of their sequences. Rows are tokens
    of a micro-batch [T, B], flattened."""

    held_F: Tensor
    """Row in the order of sequences of each row in the order of ranks, int64."""
    whole_F: Tensor
    """The inverse: row in the order of ranks of each row in the order of sequences, int64."""

    @classmethod
    def of(cls, held_RBS: Sequence[Tensor]) -> Order:
        """``held_RBS``: index in its sequence of each token of each rank."""
        index_TB = torch.cat([held_BS.mT for held_BS in held_RBS])
        batch = index_TB.shape[1]
        held_F = (index_TB * batch + torch.arange(batch, device=index_TB.device)).flatten()
        return cls(held_F, held_F.argsort())


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys each query of a micro-batch sees."""

    first_BS: Tensor
    """Index in its sequence of the first token of a query's document, int32."""
    index_BS: Tensor
    """Index of a query in its sequence, int32."""
    blocks: Any
    """FlexAttention's `BlockMask`, or `Cuts` for kernels; None where the plain formulas are used."""
    order: Order | None = None
    """How keys of several ranks are put in the order of their sequences."""

    @classmethod
    def of(
        cls,
        places_BS: Tensor,
        index_BS: Tensor,
        keys: int,
        like: Tensor,
        order: Order | None = None,
        limits: tuple[int, int] | None = None,
    ) -> Seen:
        """``places_BS``: place of each query in its document. ``keys``: tokens of a whole sequence. ``like``: a tensor
        of the device and dtype of queries. ``limits``: `workloads.spec.documents.kernels.extremes`, if FlashAttention's
        kernels take every document as a sequence."""
        first_BS, index_BS = (index_BS - places_BS).int(), index_BS.int()
        if backend_of(like, places_BS) is Backend.TORCH:
            return cls(first_BS, index_BS, None, order)
        if limits is not None:
            return cls(first_BS, index_BS, Cuts.of(places_BS, *limits), order)
        from workloads.engine.kind_ops.flex_attention import document_mask  # loads torch's compiler

        return cls(first_BS, index_BS, document_mask(first_BS, index_BS, keys), order)


def document_attention(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, seen: Seen) -> Tensor:
    """[B, N, S, V], with gradients."""
    if backend_of(q_BNSH) is Backend.TRITON:
        if isinstance(seen.blocks, Cuts):
            return attention_by_length(q_BNSH, k_BKTH, v_BKTV, seen.blocks)
        from workloads.engine.kind_ops.flex_attention import masked_attention

        return masked_attention(q_BNSH, k_BKTH, v_BKTV, seen.blocks)[0]
    return _DocumentAttention.apply(q_BNSH, k_BKTH, v_BKTV, seen)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Tensor:
        o, lse = document_forward(q, k, v, seen)
        ctx.seen = seen
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        return *document_backward(grad, q, k, v, o, lse, ctx.seen), None


def document_forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """(o [B, N, S, V], lse [B, N, S]) without autograd, for callers with a backward of their own."""
    if backend_of(q) is Backend.TRITON:
        from workloads.engine.kind_ops.flex_attention import masked_attention

        return masked_attention(q, k, v, seen.blocks)
    batch, heads, length, _ = q.shape
    o = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, length, dtype=accumulation_dtype(q.dtype))
    if backend_of(q) is Backend.SHAPES:
        return o, lse
    for queries in _blocks(q, k):
        z_BKGST = _scores(q, k, queries, seen)
        lse_BKGS = z_BKGST.logsumexp(-1)
        p = torch.exp(z_BKGST - lse_BKGS.unsqueeze(-1))
        o[:, :, queries] = (p @ v.to(p.dtype).unsqueeze(2)).flatten(1, 2).to(o.dtype)
        lse[:, :, queries] = lse_BKGS.flatten(1, 2)
    return o, lse


def document_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtype of the inputs. FlexAttention has no backward of its own: its forward runs again."""
    if backend_of(q) is Backend.TRITON:
        from workloads.engine.kind_ops.flex_attention import masked_attention

        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            again = masked_attention(q, k, v, seen.blocks)[0]
        dq, dk, dv = torch.autograd.grad(again, (q, k, v), grad_o)
        return dq, dk, dv
    dtype, groups = accumulation_dtype(q.dtype), (k.shape[1], -1)
    dq = torch.empty_like(q)
    if backend_of(q) is Backend.SHAPES:
        return dq, torch.empty_like(k), torch.empty_like(v)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    wide_k, wide_v = (x.to(dtype).unsqueeze(2) for x in (k, v))
    for queries in _blocks(q, k):
        z_BKGST = _scores(q, k, queries, seen)
        p_BKGST = torch.exp(z_BKGST - lse[:, :, queries].to(dtype).unflatten(1, groups).unsqueeze(-1))
        wide_grad, wide_o, wide_q = (x[:, :, queries].to(dtype).unflatten(1, groups) for x in (grad_o, o, q))
        row_sums = (wide_grad * wide_o).sum(-1, keepdim=True)
        dz = p_BKGST * (wide_grad @ wide_v.mT - row_sums) / math.sqrt(q.shape[-1])
        dq[:, :, queries] = (dz @ wide_k).flatten(1, 2).to(dq.dtype)
        dk += (dz.mT @ wide_q).sum(2)
        dv += (p_BKGST.mT @ wide_grad).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, heads, length, _ = q.shape
    size = max(16, _SCORES // (batch * heads * k.shape[2]))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _scores(q: Tensor, k: Tensor, queries: slice, seen: Seen) -> Tensor:
    """[B, K, N / K, queries, T], -inf where a key is of another document or comes after its query."""
    dtype = accumulation_dtype(q.dtype)
    grouped = q[:, :, queries].to(dtype).unflatten(1, (k.shape[1], -1)) / math.sqrt(q.shape[-1])
    z = grouped @ k.to(dtype).unsqueeze(2).mT
    key_T = torch.arange(k.shape[2], device=q.device)
    own_BST = key_T >= seen.first_BS[:, queries].unsqueeze(-1)
    own_BST &= key_T <= seen.index_BS[:, queries].unsqueeze(-1)
    return z.masked_fill(~own_BST[:, None, None], -math.inf)
