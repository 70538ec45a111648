"""The gated delta rule in chunks (Yang et al. 2024, arXiv:2412.06464, section 3.3; with a decay for each channel: Kimi
Linear, arXiv:2510.26692, section 3).

Shapes: B sequences, L tokens, H heads with K numbers of a key and V of a value, c tokens of a chunk, m chunks. With the
state S [K, V] of a head, for a token t with the decay a (one number, or one for each row of the state) and the rate b:

    S_t = a S_{t-1} + k_t u_t^T      u_t = b_t (v_t - (a S_{t-1})^T k_t)      o_t = S_t^T q_t

With G the sum of log decays from the chunk's start, all u of a chunk follow from the state S before it by one
triangular system (the WY form): ``(1 + tril(b K K^T exp(G_t - G_s), -1)) U = b (V - (K exp(G)) S)``. No exponent is
positive, so nothing overflows however strong the decay is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.engine.kind_ops.segments import from_chunks, in_chunks

CHUNK = 64
"""Tokens of a chunk, as in the kernels of flash-linear-attention."""
BLOCK = 8
"""Tokens of which each pair has its own decay of every channel, where channels decay by themselves."""
_EPSILON = 1e-6
"""Added to the sum of squares of a key or query in the published modelling code (transformers: qwen3_5,
kimi_linear)."""


def unit(x: Tensor) -> Tensor:
    """Keys or queries of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def delta_rule(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, log_decay: Tensor, rate_BLH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs [B, L, H, V], state after). ``log_decay``: [B, L, H], or [B, L, H, K] for each channel."""
    length = q_BLHK.shape[1]
    size = min(CHUNK, -(-length // BLOCK) * BLOCK)
    q, k, v, rate = (in_chunks(x, size) for x in (q_BLHK, k_BLHK, v_BLHV, rate_BLH.unsqueeze(3)))  # [B, m, H, c, ...]
    sums = in_chunks(log_decay, size).cumsum(3)
    if sums.dim() == 4:
        sums = sums.unsqueeze(4)
        of_keys, of_queries = _scores(q, k, sums)
    else:
        of_keys, of_queries = _scores_by_channel(q, k, sums)
    from_start, to_end = sums.exp(), k * (sums[:, :, :, -1:] - sums).exp()
    system, right = (of_keys * rate).tril(-1), torch.cat([v, k * from_start], 4) * rate
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    alone, of_state = solved.split([v.shape[4], k.shape[4]], 4)
    of_chunks = from_start[:, :, :, -1].unsqueeze(4)
    state, before, added = state_BHKV, [], []
    for at in range(q.shape[1]):
        before.append(state)
        added.append(alone[:, at] - of_state[:, at] @ state)
        state = state * of_chunks[:, at] + to_end[:, at].transpose(2, 3) @ added[-1]
    o = of_queries @ torch.stack(added, 1) + (q * from_start) @ torch.stack(before, 1)
    return from_chunks(o, length), state


def _scores(q: Tensor, k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Products of keys, and of queries, with the keys up to their own token, decayed since: [B, m, H, c, c]."""
    size = k.shape[3]
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    decays = (sums - sums.transpose(3, 4)).masked_fill(later, -torch.inf).exp()
    return (k @ k.transpose(3, 4)) * decays, (q @ k.transpose(3, 4)) * decays


def _scores_by_channel(q: Tensor, k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """`_scores` where every channel decays by itself: within blocks of tokens pair by pair, and of a block with all
    before it as a product, in which the decay up to the block's start is on one side and that since then on the
    other."""
    size, rows = k.shape[3], torch.stack([k, q], 4)  # [B, m, H, c, 2, K]
    k_n, sums_n, rows_n = (x.unflatten(3, (-1, BLOCK)) for x in (k, sums, rows))
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=k.device).triu(1).unsqueeze(2)
    pairs = (sums_n.unsqueeze(5) - sums_n.unsqueeze(4)).masked_fill(later, -torch.inf).exp()
    within = rows_n @ (k_n.unsqueeze(4) * pairs).transpose(5, 6)  # [B, m, H, blocks, t, 2, s]
    found = []
    for at in range(size // BLOCK):
        first, scores = at * BLOCK, within[:, :, :, at]
        if at:
            start = sums[:, :, :, first - 1 : first]
            since = (sums_n[:, :, :, at] - start).exp().unsqueeze(4)
            until = k[:, :, :, :first] * (start - sums[:, :, :, :first]).exp()
            earlier = (rows_n[:, :, :, at] * since).flatten(3, 4) @ until.transpose(3, 4)
            scores = torch.cat([earlier.unflatten(3, (BLOCK, 2)), scores], 5)
        found.append(torch.nn.functional.pad(scores, (0, size - first - BLOCK)))
    of_keys, of_queries = torch.cat(found, 3).unbind(4)
    return of_keys, of_queries
