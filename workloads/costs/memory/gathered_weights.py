"""Weights that FSDP has gathered in the backward of the layers of a pipeline rank.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from workloads.costs.memory.end_events import last_ahead
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn


def gathered_last(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes gathered in the last layer's backward. With ZeRO 3 the unit before it is gathered ahead. In the last
    backward the head's weight is freed after its reduction, and that of an earlier micro-batch may be gathered again
    ahead of the only layer."""
    if x.zero3:
        return min(part.whole, two_units(x, part, turn) + x.b_experts * part.experts)
    freed = turn.last and not turn.own_deferred and not turn.second_half
    ahead = last_ahead(x, part, turn) if part.num_layers == 1 and not part.has_embedding else 0
    return part.whole - (x.c * part.head - ahead if freed else 0)


def two_units(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes gathered with ZeRO 3 in the last layer, without its experts: it and the unit before it, which is a block,
    or before the only layer what `_ahead` says. A tied weight stays gathered."""
    before = x.b * part.before_last
    if part.num_layers == 1:
        before = 0 if part.tied else _ahead(x, part, turn)
    return x.b * part.last_block + before + x.c * part.tied


def _ahead(x: Shared, part: Part, turn: Turn) -> int:
    """Bytes that FSDP gathers ahead in the backward of the first layer with ZeRO 3: the embedding, or the tied weight,
    which stays gathered; else what `last_ahead` says."""
    return x.c * part.tied or (part.first_copy if part.has_embedding else last_ahead(x, part, turn))


def gathered_first(x: Shared, part: Part, turn: Turn, number: int, block: int, experts: int, before: int) -> int:
    """Bytes gathered in the backward of the first layer of a class, or of one ``before`` layers after it. ``block``,
    ``experts``: elements up to it. With ZeRO 3 FSDP gathers the next unit ahead."""
    size = part.classes[number].size
    if x.zero3:
        return x.b * size.block + x.b_experts * size.experts + following(x, part, turn, number, before)
    left = x.b * block + x.b_experts * experts + (part.first_copy if part.has_embedding else 0)
    left += x.c * part.head if turn.second_half else 0
    if turn.last and not part.has_embedding and not number and not before:
        left += last_ahead(x, part, turn)
    return min(part.whole, left) if turn.last else part.whole


def following(x: Shared, part: Part, turn: Turn, number: int, before: int) -> int:
    """Bytes of the unit that FSDP gathers ahead with ZeRO 3 in the backward of the layer of `gathered_first`: the block
    of the layer before it, or what `_ahead` says."""
    if number == 0 and before == 0:
        return _ahead(x, part, turn)
    if before:
        return x.b * part.classes[number].size.block
    alike = part.classes[number].place == sum(one.layers for one in part.classes[:number])
    return x.b * (part.classes[number - 1].size.block if alike else x.block)


def layers_after(part: Part, number: int) -> int:
    """How many layers come after the first layer of class ``number``."""
    return part.num_layers - 1 - part.classes[number].place
