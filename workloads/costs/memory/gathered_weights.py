"""Weights that FSDP has gathered in the backward of the layers of a pipeline rank.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.end_events import last_ahead
from workloads.costs.memory.layer_classes import Place
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn


def gathered(x: Shared, part: Part, turn: Turn, place: Place) -> int:
    """Bytes gathered in a layer's backward. With ZeRO 3 the unit before it is gathered ahead. In the last backward
    what was reduced is free, but for the head in an input-gradient pass, which is not the end of its micro-batch, and
    in a weight-gradient pass, at whose end it is reduced."""
    if x.zero3:
        return min(part.whole, two_units(x, part, turn, place) + x.b_experts * place.size.experts)
    if not turn.last:
        return part.whole
    freed = 0 if turn.own_deferred or turn.second_half else x.c * part.head
    ahead = last_ahead(x, part, turn) if place.earlier is None and not part.has_embedding else 0
    return part.whole - freed - x.b * place.rest - x.b_experts * place.experts + ahead


def two_units(x: Shared, part: Part, turn: Turn, place: Place) -> int:
    """Bytes gathered with ZeRO 3 in a layer's backward, without its experts: it and the unit that FSDP gathers ahead,
    which is the block before it, or before the first layer the embedding, or else what `last_ahead` says. A tied weight
    stays gathered."""
    if place.earlier is not None:
        ahead = x.b * place.earlier.block
    elif part.tied:
        ahead = 0
    else:
        ahead = part.first_copy if part.has_embedding else last_ahead(x, part, turn)
    return x.b * place.size.block + ahead + x.c * part.tied
