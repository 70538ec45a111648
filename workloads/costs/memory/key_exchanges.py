"""Bytes of the backward of attention while context-parallel ranks exchange keys and values, and their gradients.

Symbols: Q bytes of a rank's queries, P of its keys and values; n context-parallel ranks. Sums over ranks are fp32 (f
bytes for each byte of an activation), but with two ranks, whose sums have two terms, in the dtype of activations.
"""

from __future__ import annotations

from workloads.costs.memory.activations import STATISTICS_BYTES
from workloads.costs.memory.kind_tensors import Sizes
from workloads.spec.layer_kinds.attention import Attention


def exchanging_keys(mixer: Attention, s: Sizes) -> int:
    """Bytes beside saved tensors, the gradients of the projection and of the output, and that of the stream, on the
    rank that needs most; 0 if ranks exchange heads, or nothing.

    ring       at its end: the keys and values received last (P) and the gradients that they get; the sums for other
               ranks as they are and as received (2 f P); those of this rank's keys (P, and half of it in fp32); and the
               queries' gradients in fp32. Or between two blocks, with more than two ranks: the gradients of both, the
               sums, and received keys and values (2 P with more than three)
    allgather  in the last block: all ranks' keys and values and the sums of their gradients (n P, n f P), the
               gradients that the block gives, and their copy in one message; own ones (P) are among the sums by then

    The gated output, if there is a gate, is free by then.
    """
    if s.e.cp == 1 or s.e.cp_kind == "ulysses":
        return 0
    n, queries = s.e.cp, s.split(mixer.heads * mixer.head_dim)
    keys = s.split(mixer.kv_heads * (mixer.head_dim + mixer.value_dim))
    freed = s.split(mixer.heads * mixer.value_dim) if mixer.gate != "none" else 0
    wide = n > 2 and s.c < STATISTICS_BYTES  # sums are another copy
    sums = STATISTICS_BYTES * keys // s.c if wide else keys
    of_queries = STATISTICS_BYTES * queries // s.c if wide else queries
    if s.e.cp_kind == "ring":
        # A rank's later half of queries sees all keys of a rank after it, all its queries the first half of others.
        of_block = max(queries // 2 + keys, queries + keys // 2)
        end = of_block + 2 * sums + 2 * keys + (sums // 2 + of_queries if wide else 0)
        between = 2 * of_block + 2 * sums + (2 if n > 3 else 1) * keys + of_queries - queries
        return (max(end, between) if n > 2 else end) - freed
    later, earlier = queries // 2 + 2 * (n - 1) * keys, queries + (n - 1) * keys
    return of_queries - queries + n * (keys + sums) - keys + max(later, earlier) - freed
