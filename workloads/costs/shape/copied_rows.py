"""Rows of a parameter that several tensor-parallel ranks hold: key and value heads, of more ranks than heads.

Queries, keys and values are one parameter, of which data parallelism shards the rows; so one shard may have rows of
which there are copies, and others. The engine sums the copies' gradients and counts their norm by these rows, and the
closed form of traffic counts them. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workloads.spec.weights import Weight


class Rows(NamedTuple):
    """Rows of a rank's shard, of which as many tensor-parallel ranks in a row hold the same."""

    start: int
    stop: int
    copies: int


def rows_of_shard(parts: Sequence[Weight], tp: int, shards: int, shard: int) -> list[Rows]:
    """The rows of one shard of a parameter made of ``parts``, by number of copies; shards are rows as `torch.chunk` has
    them, and the last ones may have none."""
    sizes = [part.local_shape({"tp": tp})[0] for part in parts]
    chunk = -(-sum(sizes) // shards)
    first, end = shard * chunk, (shard + 1) * chunk
    found: list[Rows] = []
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        start, stop, copies = max(begin, first) - first, min(begin + size, end) - first, part.copies(tp)
        begin += size
        if stop <= start:
            continue
        if found and found[-1].copies == copies:
            start = found.pop().start
        found.append(Rows(start, stop, copies))
    return found
