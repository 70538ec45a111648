"""Attention between exchanges that turn shards of tokens into shards of heads and back (Ulysses, arXiv:2309.14509).

Shapes as in `workloads.engine.collectives.context_parallel`, of which this is one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workloads.engine.collectives.communication import Axis, all_to_all_async, wait


class _AllToAll(torch.autograd.Function):
    """Sends part i of dim 0 to rank i. It is its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return wait(all_to_all_async(x, cp))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait(all_to_all_async(grad, ctx.cp)), None


def ulysses_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, cp: Axis, local: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Rank i gets the i-th of cp equal parts of the query heads, and of the key and value heads that belong to them.
    ``local``: attention of these heads to whole sequences."""
    heads = [x.shape[1] for x in (q_BNSH, k_BKSH, v_BKSV)]
    assert all(count % cp.size == 0 for count in heads), f"{heads} heads over {cp.size} ranks"
    # One message: [cp, S, B, (N H + K X) / cp] becomes the same shape with all tokens (cp * S) of this rank's heads.
    by_rank = [x.permute(2, 0, 1, 3).unflatten(2, (cp.size, -1)).movedim(2, 0) for x in (q_BNSH, k_BKSH, v_BKSV)]
    tokens = _AllToAll.apply(torch.cat([x.flatten(3) for x in by_rank], dim=3), cp).flatten(0, 1)
    parts = tokens.split([x.shape[3] * x.shape[4] for x in by_rank], dim=2)
    q, k, v = (part.unflatten(2, x.shape[3:]).permute(1, 2, 0, 3) for part, x in zip(parts, by_rank, strict=True))
    o = local(q, k, v)
    o_RSBNH = _AllToAll.apply(o.permute(2, 0, 1, 3).unflatten(0, (cp.size, -1)), cp)  # part r: the heads of rank r
    return o_RSBNH.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)
