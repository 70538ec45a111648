"""Causal attention over a sequence whose tokens are split over the ranks of one axis (context parallelism).

Shapes: B sequences, S tokens of a sequence on this rank (the sequence has cp * S), N query heads and K key and value
heads of this rank, H head size of queries and keys, V of values. ``X`` is a key and its value side by side, H + V.

ring       keys and values go round the ranks, point to point, while each rank computes with those it has (Ring
           Attention, arXiv:2310.01889); their gradients follow them round
allgather  every rank gathers all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2); the backward gathers them
           again, and a reduce-scatter returns their gradients
ulysses    an all-to-all turns shards of tokens into shards of heads, and another one turns the output back (DeepSpeed
           Ulysses, arXiv:2309.14509). Ordinary attention over whole sequences runs between them

Ring and allgather cut a sequence into 2 cp parts. Rank r holds part r and part 2 cp - 1 - r, in this order ("zig-zag"):
a causal mask then leaves every rank equally many scores. Another rank's tokens need no mask:

    this rank's tokens       all queries, all keys, causal: the later part comes after the earlier one
    of a rank before r       all queries, the keys of its first part, which come before both of ours
    of a rank after r        queries of our second part, all keys: both its parts come before it, and after our first

Ulysses keeps tokens in sequence order, rank after rank, since each of its ranks computes whole sequences.

`workloads.costs.traffic.context_parallel.context_messages` counts what each kind sends. Ring and allgather save for
backward what attention alone saves: queries, keys, values, output and log-sum-exp of this rank's tokens. Ulysses saves
queries, keys and values as they were received, the output before it is sent back, and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workloads.engine.collectives.communication import (
    Axis,
    gather_async,
    reduce_scatter_async,
    rotate_async,
    wait,
)
from workloads.engine.collectives.ulysses import ulysses_attention
from workloads.engine.kind_ops.span_attention import add_sinks, gradient_of_sinks
from workloads.engine.ops.attention import Saved, attention, attention_backward, attention_forward
from workloads.engine.ops.backend import accumulation_dtype
from workloads.spec.experiment_values import ContextKind

ContextParallel = tuple[Axis, ContextKind]


def local_positions(seq_len: int, cp: int, rank: int, kind: ContextKind) -> Tensor:
    """Positions in the sequence of the tokens that ``rank`` holds, in the order in which it holds them: int64, [S].

    They select the rank's tokens, targets and rows of the RoPE tables. ``seq_len`` must be a multiple of ``2 * cp`` if
    cp > 1.
    """
    if cp == 1:
        return torch.arange(seq_len)
    assert seq_len % (2 * cp) == 0, (seq_len, cp)
    return torch.arange(seq_len).view(2 * cp, -1)[list(parts_of(cp, rank, kind))].flatten()


def parts_of(cp: int, rank: int, kind: ContextKind) -> tuple[int, int]:
    """Which two of the 2 cp equal parts of a sequence ``rank`` holds, in the order in which it holds them."""
    return (2 * rank, 2 * rank + 1) if kind == "ulysses" else (rank, 2 * cp - 1 - rank)


def context_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, cp: Axis, kind: ContextKind, sinks_N: Tensor | None = None
) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence: [B, N, S, V].

    Every rank of ``cp`` passes the tokens of `local_positions`, in that order; queries and keys are already rotated by
    their positions. ``ulysses`` needs N and K to be multiples of cp. Sums over blocks and ranks are rounded to the
    dtype of the inputs once, at their end. ``sinks_N`` (ring and allgather): as of
    `workloads.engine.kind_ops.span_attention`.
    """
    if cp.size == 1:
        return attention(q_BNSH, k_BKSH, v_BKSV, causal=True)
    if kind == "ulysses":
        return ulysses_attention(q_BNSH, k_BKSH, v_BKSV, cp, partial(attention, causal=True))
    return _zigzag(q_BNSH, k_BKSH, v_BKSV, cp, kind, sinks_N)


# Shared by ring and allgather


@torch.compiler.disable  # one graph break; traced, there would be one at every choice of a kernel
def _zigzag(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, cp: Axis, kind: ContextKind, sinks_N: Tensor | None
) -> Tensor:
    assert q_BNSH.shape[2] == k_BKSH.shape[2] and q_BNSH.shape[2] % 2 == 0
    function = _Ring if kind == "ring" else _AllGather
    return function.apply(q_BNSH, k_BKSH, v_BKSV, cp, sinks_N)


def _pack(k_BKSH: Tensor, v_BKSV: Tensor) -> Tensor:
    """Keys and values in one message, tokens outermost: [S, B, K, X]."""
    return torch.cat([k_BKSH.permute(2, 0, 1, 3), v_BKSV.permute(2, 0, 1, 3)], dim=3)


def _unpack(kv_SBKX: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of a packed message, or of packed gradients: keys [B, K, S, H] and values [B, K, S, V]. ``size`` is H."""
    kv_BKSX = kv_SBKX.permute(1, 2, 0, 3)
    return kv_BKSX[..., :size], kv_BKSX[..., size:]


class _Output:
    """Running output of some queries over several blocks of keys.

    With ``z = log(exp(lse1) + exp(lse2))`` the output over two blocks is ``exp(lse1 - z) * o1 + exp(lse2 - z) * o2``.
    """

    def __init__(self, o_BNSH: Tensor, lse_BNS: Tensor, cp: Axis) -> None:
        """Start with the first block, which every query sees."""
        self.o, self.lse = o_BNSH.to(_sum_dtype(o_BNSH.dtype, cp)), lse_BNS.contiguous()

    def join(self, first: int, o_BNSH: Tensor, lse_BNS: Tensor) -> None:
        """Add another block, which is seen by the queries from ``first`` on."""
        o, lse = self.o[:, :, first:], self.lse[:, :, first:]
        both = torch.logaddexp(lse, lse_BNS)
        share, other_share = torch.exp(lse - both).unsqueeze(-1), torch.exp(lse_BNS - both).unsqueeze(-1)
        if o.dtype == share.dtype:
            o.mul_(share).addcmul_(o_BNSH, other_share)
        else:
            o.copy_((o * share).addcmul_(o_BNSH, other_share))  # in the precision of the shares
        lse.copy_(both)


def _sum_dtype(dtype: torch.dtype, cp: Axis) -> torch.dtype:
    """Dtype in which sums over blocks or ranks are kept and sent: fp32 (fp64 for fp64 inputs).

    With two ranks every sum has two terms. Adding them rounds once in any case, so the dtype of the inputs is as good.
    """
    return dtype if cp.size == 2 else accumulation_dtype(dtype)


def _finish(ctx: Any, q: Tensor, k: Tensor, v: Tensor, output: _Output, sinks: Tensor | None) -> Tensor:
    """Every block's backward takes the whole row's output and log-sum-exp, with sinks if there are any."""
    lse = output.lse if sinks is None else add_sinks(output.o, output.lse, sinks)
    o = output.o.to(q.dtype)
    ctx.save_for_backward(q, k, v, o, lse, sinks)
    return o


def _own_tokens(q: Tensor, k: Tensor, v: Tensor, cp: Axis) -> tuple[_Output, list[Saved]]:
    """First block, this rank's own keys: its output, to which others are added, and what its backward needs."""
    o, lse, saved = attention_forward(q, k, v, causal=True)
    return _Output(o, lse, cp), [saved]


def _block_backward(
    grad: Tensor, q: Tensor, seen_SBKX: Tensor, o: Tensor, lse: Tensor, saved: Saved, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for another rank's keys, which are seen by the queries from ``first`` on."""
    k, v = _unpack(seen_SBKX, q.shape[3])
    grad, q, o, lse = (x[:, :, first:] for x in (grad, q, o, lse))
    return attention_backward(grad, q, k, v, o, lse, saved, causal=False)


def _zeros(k_BKSH: Tensor, v_BKSV: Tensor, tokens: int, cp: Axis) -> Tensor:
    """Zeroed packed gradients of ``tokens`` keys and values, in the dtype of sums."""
    batch, heads, _, size = k_BKSH.shape
    both = size + v_BKSV.shape[3]
    return k_BKSH.new_zeros(tokens, batch, heads, both, dtype=_sum_dtype(k_BKSH.dtype, cp))


# Ring


class _Ring(torch.autograd.Function):
    """Ring attention. In step i a rank has the keys and values of the rank i before it (modulo cp).

    Each step starts to pass them on before it computes, and waits for the next ones afterwards.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Axis, sinks: Tensor | None) -> Tensor:
        pending = rotate_async(_pack(k, v), cp)
        output, kept = _own_tokens(q, k, v, cp)
        for step in range(1, cp.size):
            received = wait(pending)
            if step < cp.size - 1:
                pending = rotate_async(received, cp)
            first, seen = _seen(received, step, cp)
            o, lse, saved = attention_forward(q[:, :, first:], *_unpack(seen, k.shape[3]), causal=False)
            output.join(first, o, lse)
            kept.append(saved)
        ctx.cp, ctx.kept = cp, kept
        return _finish(ctx, q, k, v, output, sinks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
        """The gradients of a rank's keys and values start at the next rank, follow the keys and values round, and
        return with the sum of all other ranks' parts."""
        q, k, v, o, lse, sinks = ctx.saved_tensors
        d_sinks = None if sinks is None else gradient_of_sinks(grad, o, lse, sinks)
        cp, kept = ctx.cp, ctx.kept
        pending = rotate_async(_pack(k, v), cp)
        dq, dk, dv = attention_backward(grad, q, k, v, o, lse, kept[0], causal=True)
        dq = dq.to(_sum_dtype(q.dtype, cp))
        sums = _zeros(k, v, k.shape[2], cp)
        for step in range(1, cp.size):
            received = wait(pending)
            if step < cp.size - 1:
                pending = rotate_async(received, cp)
            first, seen = _seen(received, step, cp)
            parts = _block_backward(grad, q, seen, o, lse, kept[step], first)
            dq[:, :, first:] += parts[0]
            if step > 1:
                sums = wait(sums)
            for total, part in zip(_unpack(sums[: seen.shape[0]], k.shape[3]), parts[1:], strict=True):
                total += part
            sums = rotate_async(sums, cp)
        others_dk, others_dv = _unpack(wait(sums), k.shape[3])
        return dq.to(q.dtype), (others_dk + dk).to(k.dtype), (others_dv + dv).to(v.dtype), None, d_sinks


def _seen(received_SBKX: Tensor, step: int, cp: Axis) -> tuple[int, Tensor]:
    """(first query that sees them, the keys and values that are seen) for a message from the rank ``step`` before this
    one."""
    half = received_SBKX.shape[0] // 2
    return (0, received_SBKX[:half]) if step <= cp.rank else (half, received_SBKX)


# All-gather


class _AllGather(torch.autograd.Function):
    """All-gather attention. A rank computes its own tokens while the other ranks' keys and values are gathered."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Axis, sinks: Tensor | None) -> Tensor:
        pending = gather_async(_pack(k, v), cp)
        output, kept = _own_tokens(q, k, v, cp)
        gathered = wait(pending)
        for first, seen in _gathered_blocks(gathered, cp):
            o, lse, saved = attention_forward(q[:, :, first:], *_unpack(seen, k.shape[3]), causal=False)
            output.join(first, o, lse)
            kept.append(saved)
        ctx.cp, ctx.kept = cp, kept
        return _finish(ctx, q, k, v, output, sinks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        d_sinks = None if sinks is None else gradient_of_sinks(grad, o, lse, sinks)
        cp, kept = ctx.cp, ctx.kept
        half = k.shape[2] // 2
        pending = gather_async(_pack(k, v), cp)
        dq, dk, dv = attention_backward(grad, q, k, v, o, lse, kept[0], causal=True)
        dq = dq.to(_sum_dtype(q.dtype, cp))
        sums = _zeros(k, v, cp.size * k.shape[2], cp)
        own_rows = slice(2 * half * cp.rank, 2 * half * (cp.rank + 1))
        sums[own_rows] = _pack(dk, dv)
        del dk, dv
        gathered = wait(pending)
        for saved, (first, seen) in zip(kept[1:], _gathered_blocks(gathered, cp), strict=True):
            parts = _block_backward(grad, q, seen, o, lse, saved, first)
            dq[:, :, first:] += parts[0]
            # Every part of the keys is in one block only, so nothing has to be added up here.
            rows = _first_parts(sums[: own_rows.start], half) if first == 0 else sums[own_rows.stop :]
            rows.copy_(_pack(*parts[1:]).view(rows.shape))
        del gathered, seen, parts
        dk, dv = _unpack(wait(reduce_scatter_async(sums, cp)).to(k.dtype), k.shape[3])
        return dq.to(q.dtype), dk, dv, None, d_sinks


def _gathered_blocks(gathered: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """(first query that sees them, keys and values) of the ranks before this one and of the ranks after it."""
    tokens = gathered.shape[0] // cp.size
    if cp.rank > 0:
        yield 0, _first_parts(gathered[: cp.rank * tokens], tokens // 2).flatten(0, 1)
    if cp.rank < cp.size - 1:
        yield tokens // 2, gathered[(cp.rank + 1) * tokens :]


def _first_parts(ranks_SBKX: Tensor, half: int) -> Tensor:
    """First part of each rank's tokens, for the tokens of several ranks: [ranks, half, B, K, X], a view."""
    return ranks_SBKX.unflatten(0, (-1, 2, half))[:, 0]
