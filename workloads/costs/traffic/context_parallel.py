"""Messages of context-parallel attention: calls and bytes of each kind. No torch here.

Per layer and micro-batch, of one rank. Symbols: T tokens of this rank (micro_batch_size * seq_len / cp); N query heads
and K key and value heads of this rank (heads / tp); H the size of queries and keys, V of values, X = H + V; c bytes of
the compute dtype; a bytes of the dtype of sums: 4 (8 in fp64), but c with cp = 2, where a sum has two terms and is
rounded once in any case. Bytes are those that one call sends to other ranks; as many are received:

| kind      | pass     | calls                      | bytes of each call                                        |
|-----------|----------|----------------------------|-----------------------------------------------------------|
| ring      | forward  | cp - 1 sends               | T K X c: keys and values                                  |
|           | backward | cp - 1 sends               | T K X c: keys and values again                            |
|           |          | cp - 1 sends               | T K X a: their gradients                                  |
| allgather | forward  | 1 all-gather               | (cp - 1) T K X c                                          |
|           | backward | 1 all-gather               | (cp - 1) T K X c                                          |
|           |          | 1 reduce-scatter           | (cp - 1) T K X a                                          |
| ulysses   | forward  | 1 all-to-all               | (cp - 1) / cp T (N H + K X) c: queries, keys and values   |
|           |          | 1 all-to-all               | (cp - 1) / cp T N V c: outputs                            |
|           | backward | both, in reverse order     | as forward                                                |

Ring: Ring Attention (arXiv:2310.01889). Ulysses: DeepSpeed-Ulysses (arXiv:2309.14509). A forward that is recomputed in
the backward (full recomputation) sends its messages again.

With latent attention keys and values are sent as every head has them. Sending the latent and the shared rotated key
instead would be C + R numbers a token instead of K X: 576 instead of 40,960 in DeepSeek-V3 without tensor parallelism,
71 times fewer. Every rank would then have to compute keys and values of all tokens itself, cp times the work of that
projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.spec.experiment import ContextKind


@dataclass(frozen=True, slots=True)
class AttentionMessages:
    """Calls of one kind and size."""

    op: Literal["send", "all_gather", "reduce_scatter", "all_to_all"]
    calls: int
    bytes_each: int
    """Bytes that one call sends to other ranks."""


def context_messages(
    kind: ContextKind,
    *,
    backward: bool,
    cp: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    compute_bytes: int,
    sum_bytes: int = 4,
) -> list[AttentionMessages]:
    """Messages of one layer's attention in the forward or the backward of one micro-batch (the table above), in order.

    ``tokens``, ``heads`` and ``kv_heads`` are those of one rank. ``compute_bytes`` and ``sum_bytes`` are bytes per
    number, the latter in sums of more than two terms. Empty if cp = 1.
    """
    if cp == 1:
        return []
    if kind == "ulysses":
        one = (cp - 1) * tokens * compute_bytes
        heads, kv_heads = heads // cp, kv_heads // cp
        inputs = heads * head_dim + kv_heads * (head_dim + value_dim)
        calls = [AttentionMessages("all_to_all", 1, numbers * one) for numbers in (inputs, heads * value_dim)]
        return calls[::-1] if backward else calls
    sum_bytes = compute_bytes if cp == 2 else sum_bytes
    numbers = tokens * kv_heads * (head_dim + value_dim)
    if kind == "ring":
        calls = [AttentionMessages("send", cp - 1, numbers * compute_bytes)]
        return calls + [AttentionMessages("send", cp - 1, numbers * sum_bytes)] * backward
    calls = [AttentionMessages("all_gather", 1, (cp - 1) * numbers * compute_bytes)]
    return calls + [AttentionMessages("reduce_scatter", 1, (cp - 1) * numbers * sum_bytes)] * backward
