"""How packed sequences are dealt over data-parallel ranks and micro-batches, and how long their attention is.

A token attends to the tokens of its own document up to itself, so a document of n tokens takes n^2 / 2 scores, as half
of all scores of a sequence are counted without documents. Attention of some tokens is stated as a length: that of a
sequence without documents whose tokens attend as much on average. It is the sum of n^2 over documents, divided by the
tokens, and whole sequences have ``seq_len``. Costs of attention are linear in it.

With context parallelism whose ranks have all heads a rank holds some chunks of a sequence
(`workloads.spec.documents.shares`), whose documents decide its scores. Sequences are dealt over data-parallel ranks:

    none     in the order of the sequences: rank d takes sequences (m * dp + d) * micro_batch_size ... in micro-batch m
    greedy   longest attention first, each to the rank with least that still has room; inside a rank likewise over its
             micro-batches, of which the heaviest come first, so that ranks have heavy ones at the same time

Whole sequences are dealt: every micro-batch has equally many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from workloads.spec.documents.lengths import packed
from workloads.spec.documents.shares import greedy, squares_of_ranks

Dealt = tuple[tuple[tuple[int, ...], ...], ...]
"""Sequences of the global batch by data-parallel rank and micro-batch."""


class Packing(NamedTuple):
    """What of an experiment decides which documents a rank has."""

    documents: str
    balance: str
    seq_len: int
    global_batch_size: int
    dp: int
    micro_batch_size: int
    cp: int = 1
    """Ranks that hold different tokens of a sequence with all heads; 1 with Ulysses, whose ranks share its heads."""

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def is_whole(self) -> bool:
        """Whether the batch and the sequences can be divided; the rules refuse others."""
        fits = self.global_batch_size % (self.dp * self.micro_batch_size) == 0
        return fits and (self.cp == 1 or self.seq_len % (2 * self.cp) == 0)


def squares(lengths: Sequence[int]) -> int:
    """Twice the scores of a sequence's documents."""
    return sum(length * length for length in lengths)


@lru_cache(maxsize=1024)
def dealt(packing: Packing) -> Dealt:
    """Every sequence of the global batch is in exactly one micro-batch of one rank."""
    dp, size, rounds = packing.dp, packing.micro_batch_size, packing.num_microbatches
    if packing.balance == "none":
        return tuple(
            tuple(tuple(range((m * dp + rank) * size, (m * dp + rank + 1) * size)) for m in range(rounds))
            for rank in range(dp)
        )
    sequences = packed(packing.documents, packing.seq_len, packing.global_batch_size)
    work = [squares(lengths) for lengths in sequences]
    of_ranks = greedy(range(len(work)), work, dp, rounds * size)
    return tuple(_micro_batches(held, work, rounds, size) for held in of_ranks)


def _micro_batches(held: Sequence[int], work: Sequence[int], rounds: int, size: int) -> tuple[tuple[int, ...], ...]:
    bins = greedy(held, work, rounds, size)
    return tuple(sorted(bins, key=lambda one: (-sum(work[at] for at in one), one)))


@lru_cache(maxsize=1024)
def attended(packing: Packing) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Lengths (see above) by data-parallel rank, micro-batch and context-parallel rank."""
    sequences = packed(packing.documents, packing.seq_len, packing.global_batch_size)
    of_ranks = [squares_of_ranks(lengths, packing.cp, packing.balance) for lengths in sequences]
    tokens = packing.micro_batch_size * packing.seq_len / packing.cp
    return tuple(
        tuple(
            tuple(sum(of_ranks[at][rank] for at in micro_batch) / tokens for rank in range(packing.cp))
            for micro_batch in of_rank
        )
        for of_rank in dealt(packing)
    )


def mean_length(packing: Packing) -> float:
    """The length (see above) of all tokens of a step."""
    sequences = packed(packing.documents, packing.seq_len, packing.global_batch_size)
    return sum(map(squares, sequences)) / (packing.global_batch_size * packing.seq_len)


def slowest_length(packing: Packing, *, together: bool, waiting: float) -> float:
    """The length of equal micro-batches with which a step takes as long as with those that are dealt.

    Ranks of context parallelism wait for each other in every layer, so the slowest counts in each micro-batch; those of
    data parallelism wait at the end of the step, or, where they are ``together`` in every micro-batch (ZeRO 2 and 3,
    experts), there. ``waiting``: micro-batches that a pipeline waits in addition, (pp - 1) / virtual_stages, each taken
    as long as the longest.
    """
    ranks = [[max(of_cp) for of_cp in of_rank] for of_rank in attended(packing)]
    if together:
        ranks = [[max(of_round) for of_round in zip(*ranks, strict=True)]]
    lengths = [(sum(rounds) + waiting * max(rounds)) / (len(rounds) + waiting) for rounds in ranks]
    return float(max(lengths))


def imbalance(packing: Packing) -> float:
    """FLOPs of attention that the most loaded data-parallel rank waits for, divided by the mean over ranks. Ranks of
    context parallelism wait for each other in every layer, so the most loaded of them counts in each micro-batch."""
    lengths = attended(packing)
    waited = [sum(max(of_cp) for of_cp in of_rank) for of_rank in lengths]
    return float(max(waited) / mean_length(packing) / packing.num_microbatches)
