"""Attention to a window over a sequence whose tokens are split over ranks: only the keys of the window are sent.

Shapes and zig-zag parts as in `workloads.engine.collectives.context_parallel`: rank r of cp holds parts r and
2 cp - 1 - r of a sequence. A query sees ``reach`` earlier tokens, at most as many as a part has, so a part needs the
last keys and values of the part before it alone:

    part before this rank's first one     first part of the rank before; nothing precedes the very first part
    part before its second one            second part of the next rank; of the last rank its own first part

Every rank sends one message of ``reach`` tokens to either neighbour, and two with gradients in the backward; those of
the two ends go round the ring and are not read. The queries of a part get ``reach`` rows of zeros before them, so that
attention is square; their outputs are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.collectives.communication import Axis, exchange_async, wait


def windowed_attention(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    reach: int,
    cp: Axis,
    local: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """[B, N, S, V] of this rank's queries. ``local``: attention of whole, consecutive tokens to the window."""
    half, size = q_BNSH.shape[2] // 2, k_BKSH.shape[3]
    assert 0 <= reach <= half, "refused by the rules"
    kv_SBKX = torch.cat([k_BKSH, v_BKSV], dim=3).permute(2, 0, 1, 3)
    parts = kv_SBKX[:half], kv_SBKX[half:]
    tails = tuple(part[half - reach :] for part in parts)
    before = _Tails.apply(*tails, cp) if reach else tails
    outputs = []
    for part, (own, earlier) in enumerate(zip(parts, before, strict=True)):
        first = cp.rank == 0 and part == 0
        seen_BKTX = (own if first else torch.cat([earlier, own])).permute(1, 2, 0, 3)
        q = q_BNSH[:, :, part * half : (part + 1) * half].transpose(1, 2)
        q = q if first else F.pad(q, (0, 0, 0, 0, reach, 0))
        o = local(q.transpose(1, 2), seen_BKTX[..., :size], seen_BKTX[..., size:])
        outputs.append(o.transpose(1, 2)[:, 0 if first else reach :])
    return torch.cat(outputs, dim=1).transpose(1, 2)


class _Tails(torch.autograd.Function):
    """Last tokens of this rank's parts to what precedes its parts."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, cp: Axis) -> tuple[Tensor, Tensor]:
        ctx.cp = cp
        pending = _shift(first, cp, 1), _shift(second, cp, -1)
        before_first, before_second = (wait(x) for x in pending)
        if cp.rank == cp.size - 1:
            before_second = first.contiguous()
        return before_first, before_second

    @staticmethod
    def backward(ctx: Any, of_first: Tensor, of_second: Tensor) -> tuple[Tensor, Tensor, None]:
        """What precedes the very first part is not seen: its gradient is zero where it arrives."""
        cp: Axis = ctx.cp
        pending = _shift(of_first, cp, -1), _shift(of_second, cp, 1)
        d_first, d_second = (wait(x) for x in pending)
        if cp.rank == cp.size - 1:
            d_first = of_second  # the next rank's part is the very first one
        if cp.rank == 0:
            d_second = torch.zeros_like(d_second)  # the second part of the first rank is the last of the sequence
        return d_first, d_second, None


def _shift(x: Tensor, cp: Axis, step: int) -> Tensor:
    """Start sending ``x`` to the rank ``step`` after this one, and receiving the same shape from the other side."""
    to, origin = [0] * cp.size, [0] * cp.size
    to[(cp.rank + step) % cp.size] = x.shape[0]
    origin[(cp.rank - step) % cp.size] = x.shape[0]
    return exchange_async(x, origin, to, cp)
