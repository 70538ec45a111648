"""Number of token copies per expert when the choice depends on a token's position alone. No torch here.

The engine makes the same choice with tensors (`workloads.engine.layers.routing.forced_choice`); a test compares both.

balanced  copy j of the token at position p visits expert (p k + j) mod E
skewed    loads fall geometrically from the first expert, whose load is a given multiple of the mean; the copies of a
          token are k equally spaced points of the cumulated loads
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from workloads.spec.experiment import Experiment
from workloads.spec.mesh import coordinates
from workloads.spec.model_spec import MoESpec

_GOLDEN = 0.6180339887498949


@lru_cache(maxsize=64)
def skewed_loads(experts: int, imbalance: float) -> tuple[float, ...]:
    """Shares of all copies that visit each expert: a geometric series that starts with ``imbalance / experts``."""
    low, high = 0.0, 1.0
    for _ in range(100):  # the first load falls as the ratio rises
        ratio = (low + high) / 2
        first = 1.0 / sum(ratio**i for i in range(experts))
        low, high = (ratio, high) if first * experts > imbalance else (low, ratio)
    loads = [high**i for i in range(experts)]
    total = sum(loads)
    return tuple(load / total for load in loads)


def imbalance_of(experiment: Experiment) -> float | None:
    """Imbalance of skewed loads; None if balanced. Learned routing is assumed to have ``routing_imbalance``."""
    e = experiment
    return e.routing_imbalance if e.routing != "balanced" and e.routing_imbalance > 1 else None


def rows_from(experiment: Experiment, sender: int, experts: range) -> int:
    """Number of rows that rank ``sender`` sends to contiguous ``experts`` for one micro-batch, with forced routing."""
    e, moe = experiment, experiment.model.moe
    assert moe is not None
    position = coordinates(e, sender)
    part = position["tp"] if e.etp == 1 else None
    return _rows(e, position["cp"], part, experts)


def sent_tokens(experiment: Experiment) -> int:
    """Number of tokens of a micro-batch whose copies one rank sends; with ``etp = 1`` its share of the tensor-parallel
    ranks'."""
    e = experiment
    return e.micro_batch_size * e.seq_len // e.cp // (e.tp // e.etp)


@lru_cache(maxsize=4096)
def _rows(e: Experiment, cp_rank: int, part: int | None, experts: range) -> int:
    moe = e.model.moe
    assert moe is not None
    before = _counts(moe, imbalance_of(e), e.seq_len, experts)
    return sum(before[held.stop] - before[held.start] for held in _positions(e, cp_rank, part))


@lru_cache(maxsize=64)
def _counts(moe: MoESpec, imbalance: float | None, seq_len: int, experts: range) -> tuple[int, ...]:
    """Number of copies, of all tokens before a position, that visit ``experts``; by position, and for the end."""
    copies, first, last = moe.experts_per_token, experts.start, experts.stop
    if imbalance is None:
        of_cycle = len(experts)
        before = (position * copies for position in range(seq_len + 1))
        return tuple(
            count // moe.num_experts * of_cycle + min(max(count % moe.num_experts - first, 0), of_cycle)
            for count in before
        )
    bounds = list(accumulate(skewed_loads(moe.num_experts, imbalance)))

    def visits(position: int) -> int:
        offset = position * _GOLDEN % 1.0
        chosen = (bisect_right(bounds, (offset + copy) / copies) for copy in range(copies))
        return sum(first <= min(expert, moe.num_experts - 1) < last for expert in chosen)

    return (0, *accumulate(visits(position) for position in range(seq_len)))


def _positions(e: Experiment, cp_rank: int, part: int | None) -> Iterator[range]:
    """Positions of the tokens of a micro-batch on one rank, in pieces. ``part``: the rank's index among tensor-parallel
    ranks if they divide the tokens."""
    size = e.seq_len // (2 * e.cp) if e.cp > 1 else e.seq_len
    if e.cp == 1:
        pieces = [range(e.seq_len)]
    elif e.cp_kind == "ulysses":
        pieces = [range(2 * cp_rank * size, 2 * (cp_rank + 1) * size)]
    else:
        mirror = 2 * e.cp - 1 - cp_rank
        pieces = [range(cp_rank * size, (cp_rank + 1) * size), range(mirror * size, (mirror + 1) * size)]
    pieces *= e.micro_batch_size
    tokens = sum(len(piece) for piece in pieces)
    share = tokens // e.tp if part is not None else tokens
    start = share * (part or 0)
    for piece in pieces:
        yield piece[max(0, start) : max(0, start + share)]
        start -= len(piece)
