"""Which tokens of a packed sequence each context-parallel rank holds, if ranks have all heads.

A sequence is cut into chunks of equally many tokens, and every rank holds equally many chunks, in the order of the
sequence:

    none     2 cp chunks. Rank r holds chunk r and chunk 2 cp - 1 - r, which balances a sequence of one document
    greedy   chunks of 128 tokens, those with the longest attention first, each to the rank with least that still has
             room (as MagiAttention does: sandai.org, "MagiAttention", dispatch of chunks). A rank has at least four
             chunks: they have fewer tokens where 128 do not divide its part

128 tokens are a block of queries of FlexAttention (`workloads.engine.kind_ops.flex_attention`). Chunks of whole blocks
meet as many blocks of keys as the same queries of the whole sequence. To cut every document into 2 cp parts (WLB-LLM,
arXiv:2503.17924; Transformer Engine's layout ``thd``) balances scores as well, but blocks of queries then have several
documents' ends and beginnings: with documents of mean 1,500 in 16,384 tokens the ranks of cp = 2 compute 1.11 times as
many blocks, those of cp = 4 1.26 times.

Attention of tokens is stated as the sum of b^2 - a^2 over ranges from a to b of a document: twice their scores.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_BLOCK, _LEAST_CHUNKS = 128, 4


class Shares(NamedTuple):
    """Chunks of one sequence by context-parallel rank."""

    size: int
    """Tokens of a chunk."""
    chunks: tuple[tuple[int, ...], ...]
    """Indices of the chunks that each rank holds, in the order in which it holds them."""


@lru_cache(maxsize=65536)
def shares(lengths: tuple[int, ...], cp: int, balance: str) -> Shares:
    """Every chunk of the sequence of these documents is held by one of ``cp`` ranks."""
    seq_len = sum(lengths)
    if balance == "none":
        assert seq_len % (2 * cp) == 0, (seq_len, cp)
        return Shares(seq_len // (2 * cp), tuple((rank, 2 * cp - 1 - rank) for rank in range(cp)))
    size = _chunk_tokens(seq_len // cp)
    work = squares_of_chunks(lengths, size)
    held = greedy(range(len(work)), work, cp, len(work) // cp)
    return Shares(size, tuple(tuple(sorted(one)) for one in held))


def squares_of_ranks(lengths: tuple[int, ...], cp: int, balance: str) -> tuple[int, ...]:
    """Twice the scores of the tokens of each rank."""
    if cp == 1:
        return (sum(length * length for length in lengths),)
    size, held = shares(lengths, cp, balance)
    work = squares_of_chunks(lengths, size)
    return tuple(sum(work[chunk] for chunk in of_rank) for of_rank in held)


def squares_of_chunks(lengths: Sequence[int], size: int) -> list[int]:
    """Twice the scores of the tokens of each chunk of ``size`` tokens."""
    work, start = [0] * (sum(lengths) // size), 0
    for length in lengths:
        for chunk in range(start // size, (start + length - 1) // size + 1):
            first, last = max(start, chunk * size) - start, min(start + length, (chunk + 1) * size) - start
            work[chunk] += last * last - first * first
        start += length
    return work


def _chunk_tokens(tokens: int) -> int:
    """Tokens of a chunk on a rank that holds ``tokens`` of a sequence."""
    size = _BLOCK
    while size > 1 and (tokens % size or tokens // size < _LEAST_CHUNKS):
        size //= 2
    return size


def greedy(items: Sequence[int], work: Sequence[int], bins: int, room: int) -> list[tuple[int, ...]]:
    """``items`` in bins of ``room`` each: longest first, to the bin with least work that has room."""
    found: list[list[int]] = [[] for _ in range(bins)]
    open_bins = [(0, at) for at in range(bins)]
    for item in sorted(items, key=lambda at: (-work[at], at)):
        load, least = heapq.heappop(open_bins)
        found[least].append(item)
        if len(found[least]) < room:
            heapq.heappush(open_bins, (load + work[item], least))
    return [tuple(one) for one in found]
