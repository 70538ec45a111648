"""Recurrences over sequences whose tokens are split over context-parallel ranks, between two exchanges.

An all-to-all turns this rank's tokens of all heads into all tokens of 1 / cp of the heads and groups. Convolution,
recurrence, gate and norm run on whole sequences, and a second all-to-all turns their output back. (Megatron-Core's
``MambaContextParallel`` is the same in outline.)

The other way would be to pass states from rank to rank. A convolution and a state need what is before them, so ranks
would compute one after the other, or twice: once without a state, and again from the state that arrives. With zig-zag
parts (`workloads.engine.collectives.context_parallel`) the chain would go through every rank twice. The exchange has
no chain, and is exact for every recurrence: its operations do not know of it. It sends more, all projections
and outputs of (cp - 1) / cp of the tokens, and needs a head and a group for each rank.

Shapes: B sequences, S tokens of a sequence on this rank, L = cp S tokens of a whole one, C columns of the inputs of all
heads of this rank, O of the output; P = 2 cp parts of a sequence, of h tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workloads.engine.collectives.communication import Axis, all_to_all_async, wait
from workloads.engine.collectives.context_parallel import ContextParallel, parts_of
from workloads.engine.kind_ops.fused_scan import columns, recurrence
from workloads.engine.kind_ops.head_shares import AnyStep, ShareOfHeads

Widths = Sequence[Sequence[int]]
"""Columns of the parts of each tensor that heads divide."""


@torch.compiler.disable  # one graph break, as the recurrence itself
def exchanged_recurrence(
    step: AnyStep, sequences: list[Tensor], parameters: Sequence[Tensor], cp: ContextParallel | None
) -> Tensor:
    """Outputs [B, S, O] of a recurrence over ``sequences`` [B, S, C], in their dtype, as
    `workloads.engine.kind_ops.fused_scan.recurrence` with every token of the sequences.

    Every rank passes the tokens of `local_positions`, in that order. The recurrence saves its inputs as they were
    received; with ``cp`` the list is emptied, so that what was sent is free while the recurrence runs."""
    if cp is None:
        return recurrence(step, sequences, parameters)
    axis, _ = cp
    whole = _ToHeads.apply(cp, columns(step), *sequences)
    sequences.clear()
    y = recurrence(ShareOfHeads(step, axis.rank, axis.size), whole, parameters)
    return _ToTokens.apply(y, cp)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, widths: Widths, *sequences: Tensor) -> tuple[Tensor, ...]:
        ctx.cp, ctx.widths = cp, widths
        return _to_heads(sequences, widths, cp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_to_tokens(grads, ctx.widths, ctx.cp)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp, ctx.widths = cp, [[cp[0].size * y.shape[2]]]
        return _to_tokens([y], ctx.widths, cp)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads([grad], ctx.widths, ctx.cp)[0], None


def _to_heads(sequences: Sequence[Tensor], widths: Widths, cp: ContextParallel) -> tuple[Tensor, ...]:
    """[B, S, C] of all heads as [B, L, C / cp] of this rank's, tokens in the order of their sequence; all of them are
    sent in one message and received in one tensor."""
    axis = cp[0]
    received_PhBC = _halves(wait(all_to_all_async(_by_heads(sequences, widths, axis), axis)))
    parts, half, batch, count = received_PhBC.shape
    whole_BPhC = received_PhBC.new_empty(batch, parts, half, count)
    for held, part in enumerate(_order(cp)):
        whole_BPhC[:, part].copy_(received_PhBC[held].transpose(0, 1))
    return whole_BPhC.flatten(1, 2).split([sum(one) // axis.size for one in widths], 2)


def _to_tokens(whole: Sequence[Tensor], widths: Widths, cp: ContextParallel) -> list[Tensor]:
    """Inverse of `_to_heads`, which is also its adjoint."""
    return _by_tokens(wait(all_to_all_async(_by_rank(whole, cp), cp[0])), widths)


def _by_rank(whole: Sequence[Tensor], cp: ContextParallel) -> Tensor:
    """What each rank gets of this rank's heads: its tokens, [cp, S, B, C / cp], of all tensors side by side."""
    axis, first = cp[0], whole[0]
    parts, half = 2 * axis.size, first.shape[1] // (2 * axis.size)
    sent_PhBC = first.new_empty(parts, half, first.shape[0], sum(x.shape[2] for x in whole))
    at = 0
    for x in whole:
        x_BPhC = x.unflatten(1, (parts, half))
        for held, part in enumerate(_order(cp)):
            sent_PhBC[held, :, :, at : at + x.shape[2]].copy_(x_BPhC[:, part].transpose(0, 1))
        at += x.shape[2]
    return sent_PhBC.unflatten(0, (axis.size, 2)).flatten(1, 2)


def _by_heads(sequences: Sequence[Tensor], widths: Widths, axis: Axis) -> Tensor:
    """What each rank gets of this rank's tokens: [cp, S, B, C / cp], of all sequences side by side."""
    batch, tokens, _ = sequences[0].shape
    found_RSBC = sequences[0].new_empty(axis.size, tokens, batch, sum(sum(one) for one in widths) // axis.size)
    at = 0
    for x, of_one in zip(sequences, widths, strict=True):
        for part in x.split(list(of_one), 2):
            by_rank = part.unflatten(2, (axis.size, -1)).permute(2, 1, 0, 3)
            found_RSBC[..., at : at + by_rank.shape[3]].copy_(by_rank)
            at += by_rank.shape[3]
    return found_RSBC


def _by_tokens(received_RSBC: Tensor, widths: Widths) -> list[Tensor]:
    """Inverse of `_by_heads`: [B, S, C] of every sequence."""
    ranks, at, found = received_RSBC.shape[0], 0, []
    for of_one in widths:
        x = received_RSBC.new_empty(received_RSBC.shape[2], received_RSBC.shape[1], sum(of_one))
        for part in x.split(list(of_one), 2):
            by_rank = part.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3)
            by_rank.copy_(received_RSBC[..., at : at + by_rank.shape[3]])
            at += by_rank.shape[3]
        found.append(x)
    return found


def _halves(x_RSBC: Tensor) -> Tensor:
    """[P, h, B, C]: both parts of every rank's tokens, a view."""
    return x_RSBC.unflatten(1, (2, -1)).flatten(0, 1)


def _order(cp: ContextParallel) -> list[int]:
    """Parts of the sequence in the order in which ranks hold them, rank after rank."""
    axis, kind = cp
    return [part for rank in range(axis.size) for part in parts_of(axis.size, rank, kind)]
