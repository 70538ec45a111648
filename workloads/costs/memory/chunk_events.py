"""Timelines of a pipeline rank with several chunks, or with backwards in two halves.

Each chunk is gathered and reduced by itself. A chunk's backward is therefore that of a rank that has only this chunk,
next to the activations, gathered parameters and gradients that the other chunks hold at that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from workloads.costs.memory.end_events import head_forward, head_reduction, last_unit, next_forward
from workloads.costs.memory.events import Live, Step, Timeline, highest
from workloads.costs.memory.kind_tensors import routed_tensors
from workloads.costs.memory.layer_classes import LayerSizes
from workloads.costs.memory.layer_events import layer_steps
from workloads.costs.memory.sizes import Part, Shared
from workloads.costs.memory.turn import Turn
from workloads.costs.memory.weight_products import highest_of
from workloads.costs.shape.partition import StageParams, experiment_chunks, part_of_experiment
from workloads.costs.shape.schedule import SUMMED, V_SHAPED, Backwards, ChunkState, Held, Kind, held_by_chunk
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of

ACTIONS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


class Chunk(NamedTuple):
    """A chunk that one or several ranks hold, and its backwards as far as they are known."""

    e: Experiment
    """The experiment with the word of recomputation of this chunk."""
    x: Shared
    second: Shared
    """``x`` in a weight-gradient pass."""
    part: Part
    later: Part
    """The part in a weight-gradient pass."""
    holds: list[tuple[int, int, int]]
    """`_others_hold` by state."""
    backwards: dict[tuple[Kind, bool, bool, bool, int, int], tuple[Live, list[Step], int]]
    """By kind, `Backwards.last`, `Backwards.forward_follows`, `Turn.earlier`, the bytes of earlier gradients and
    `Turn.flat`: what exists at the start, the steps and their highest bytes, all without what the rank holds besides
    this backward."""

    @classmethod
    def of(cls, e: Experiment, x: Shared, held: StageParams) -> Chunk:
        """``x``: as in the chunk."""
        second = _in_second_half(e, x) if x.splits else x
        part = later = Part.of(e, x, held)
        if x.splits:
            later = Part.of(e, second, held)._replace(saved=part.deferred, output=0, packed=0)
        return cls(e, x, second, part, later, [_others_hold(e, x, part, at) for at in ChunkState], {})


def timelines_of_chunks(
    e: Experiment, x: Shared, stage: int, always: Live, known: dict[StageParams, Chunk]
) -> list[Timeline]:
    """The timeline of the first of the highest backwards of a rank's chunks, with what all chunks hold when it starts.
    ``always``: what exists all the time. ``known``: the chunks of earlier ranks, to which this rank's are added."""
    chunks: list[Chunk] = []
    for held in experiment_chunks(e)[stage]:
        if held not in known:
            own = part_of_experiment(e, held)
            known[held] = Chunk.of(own, Shared.of(own) if held.recompute else x, held)
        chunks.append(known[held])
    saved = [one.part.saved + one.part.packed + one.part.of_head for one in chunks]
    deferred = [one.part.deferred for one in chunks]
    ahead = x.zero3
    # The last rank of a V has two stages in a row: the output of one is the input that the other saves.
    handed = x.stream if e.pp_schedule in V_SHAPED and stage == e.pp - 1 else 0
    waits = handed > 0 and _input_feeds(e, experiment_chunks(e)[stage][-1])
    most, timelines = -1, []
    of_schedule = e.pp_schedule, stage, e.pp, e.num_microbatches, e.virtual_stages
    backwards = _highest_backwards(of_schedule, not x.unsharded, ahead, x.only_sums)
    for number, (chunk, of_chunk) in enumerate(zip(chunks, backwards, strict=True)):
        for kind, last, forward_follows, at, gathered, latest, held_at_start in of_chunk:
            activations = max(
                sum(map(mul, held.activations, saved))
                + sum(map(mul, held.for_weights, deferred))
                - (_twice(held, waits=waits) * handed if handed else 0)
                + (_gathered(chunks, number, gathered, held) if ahead else 0)
                for held in held_at_start
            )
            activations -= chunk.part.deferred if kind == "W" else saved[number]
            others = [one.holds[at[other]] for other, one in enumerate(chunks) if other != number]
            # In a weight-gradient pass the gradients of embedding and head are counted with those it creates.
            _, prior, flat = chunk.holds[at[number]]
            if x.only_sums:  # one object reads the sums of all chunks
                others = [(weights, gradients, 0) for weights, gradients, _ in others]
                flat = _read_last(chunks, at, *latest)
            if kind == "W" and at[number] not in SUMMED:
                prior = 0
            key = kind, last, forward_follows, gathered[number], prior, flat
            evaluated = chunk.backwards
            if key not in evaluated:
                evaluated[key] = _backward(chunk, *key)
            start, steps, total = evaluated[key]
            total += activations + sum(map(sum, others))
            if total > most:
                most = total
                start = always | start | {"deferred": activations}
                for place, tensor in enumerate(("other_weights", "other_gradients", "other_flat")):
                    start[tensor] = sum(held[place] for held in others)
                timelines = [Timeline(f"{ACTIONS[kind]} of chunk {number + 1}", start, steps)]
    return timelines


def _input_feeds(e: Experiment, held: StageParams) -> bool:
    """Whether the input of a chunk is also that of a product, and so waits for the weight-gradient pass."""
    return len(held.order) > 0 and layers_of(e.model).kinds[held.order[0]].outputs_normed


def _twice(held: Held, *, waits: bool) -> int:
    """Micro-batches whose output of the first chunk is the input that the second still has. ``waits``:
    `_input_feeds`."""
    first, second = held.activations
    return second + (min(first - second, held.for_weights[1]) if waits else 0)


def _gathered(chunks: list[Chunk], number: int, ahead: tuple[bool, ...], held: Held) -> int:
    """Bytes of what ZeRO 3 has gathered in chunks other than ``number``: heads, from a forward to its backward, and
    blocks ahead, other than a chunk's only unit. ``ahead``: as of `Backwards`."""
    total = 0
    for other, (x, part) in enumerate((one.x, one.part) for one in chunks):
        if other != number and part.head:
            total += x.c * part.head if ahead[other] or held.activations[other] > 0 else 0
        elif other != number and ahead[other] and not part.only_unit:
            total += x.b * part.last_block
    return total


def _backward(
    chunk: Chunk, kind: Kind, last: bool, forward_follows: bool, earlier: bool, prior: int, flat: int
) -> tuple[Live, list[Step], int]:
    """An entry of `Chunk.backwards`."""
    e, x = chunk.e, chunk.x
    part = chunk.later if kind == "W" else chunk.part
    turn = Turn(
        in_flight=1,
        prior=prior,
        last=last,
        forward_follows=forward_follows,
        reduces=last or not x.unsharded,
        earlier=earlier,
        own_deferred=chunk.part.deferred if x.splits and kind in ("F", "I") else 0,
        first_half=kind == "I",
        second_half=kind == "W",
        flat=flat,
    )
    shared, x = x, turn.adapted(e, x)
    start = turn.start(x, part, {})
    if kind == "W":
        steps = _weight_gradients(chunk.second if x is shared else _in_second_half(e, x), part, turn, start)
    elif kind == "F":
        steps = head_forward(x, part, turn) if part.has_head else _last_forward(x, part)
    else:
        steps = [*head_reduction(x, part, turn), *layer_steps(x, part, turn), *last_unit(x, part, turn)]
    return start, steps, highest([Timeline("", start, steps)])[2]


def _last_forward(x: Shared, part: Part) -> list[Step]:
    """The end of the last layer's forward with ZeRO 3: its gathered weights are there twice, in FSDP's buffer too."""
    if not x.zero3 or not part.places:
        return []
    return [("last layer, forward", {"weights": 2 * x.b * part.last_block, "working": part.last_forward - part.output})]


def _others_hold(e: Experiment, x: Shared, chunk: Part, at: ChunkState) -> tuple[int, int, int]:
    """Bytes of gathered parameters, gradients and the flat copy of its last unit that a chunk in state ``at`` holds
    besides activations while another chunk runs."""
    flat = 0 if x.unsharded else x.left(_last_unit(x, chunk, at))
    gathered = chunk.whole if not x.zero3 and ChunkState.GATHERED <= at < ChunkState.DONE else 0
    gradients = 0
    if at == ChunkState.DONE:
        gradients = chunk.shard
    elif at in SUMMED:
        gradients = chunk.accumulated
    elif at == ChunkState.ENDS_REDUCED:
        gradients = x.summed(chunk.ends, 0)
    return gathered, gradients, flat


def _last_unit(x: Shared, chunk: Part, at: ChunkState) -> int:
    """Elements of the unit that a chunk in state ``at`` has reduced last; 0 before the first and after the last one."""
    ends = x.vocabulary if chunk.has_head or chunk.has_embedding else 0
    units = {
        ChunkState.ENDS_REDUCED: ends,
        ChunkState.AFTER_B: chunk.first,
        ChunkState.AFTER_W: chunk.first_block,
        ChunkState.AFTER_I: ends or chunk.first_block,
    }
    return units.get(at, 0)


def _read_last(chunks: list[Chunk], at: tuple[ChunkState, ...], chunk: int, again: bool) -> int:
    """Bytes of the sums that the last reduction of a rank has read, and of the shard that it has added if it was not
    the first of its unit (``again``)."""
    if chunk < 0:
        return 0
    one = chunks[chunk]
    x = one.x.of_second_sums() if again else one.x
    return x.left(_last_unit(x, one.part, at[chunk]))


def _in_second_half(e: Experiment, x: Shared) -> Shared:
    """`Shared` for the weight-gradient pass: layers hold what the input-gradient pass has left, and need their weights'
    gradients. When expert gradients are reduced, the experts' rows, output gradients, gate_up and product are free, and
    what the projection out of a latent has read.
    """
    sizes: list[LayerSizes] = []
    for size in x.sizes:
        working, reducing = highest_of(size.products, x.w_blocks), 0
        if size.experts:
            of_experts = routed_tensors(e, x.c)
            before = sum(x.w_blocks * product.elements - product.frees for product in size.products[:-1])
            after_down = x.w_experts * size.experts - of_experts.product - of_experts.rows
            working = max(working, before + max(x.w_experts * size.experts_down, after_down))
            reducing = before - (2 * of_experts.rows + of_experts.gate_up + of_experts.product)
        one = size._replace(saved=size.deferred, kept=size.deferred, working=working, working_kept=working)
        sizes.append(one._replace(reducing=reducing, reducing_kept=reducing))
    return x._replace(sizes=tuple(sizes))


def _weight_gradients(x: Shared, chunk: Part, turn: Turn, start: Live) -> list[Step]:
    """The weight-gradient pass of a split backward.

    Embedding and head have their gradients from the input-gradient pass. If they were not reduced there, they are
    reduced after all blocks, the head through two flat copies; else the first block is the last unit. Weights freed by
    ZeRO 3 are not gathered, but FSDP has gathered the head ahead, or else the last block, and holds its flat buffer.
    """
    layers, end = layer_steps(x, chunk, turn), last_unit(x, chunk, turn)
    if not x.zero01 and x.chunks == 1:
        end = []
        if x.zero3 and not turn.last and turn.forward_follows:
            beside: Live = {"flat": x.after(chunk.first_block), "reducing": 0, "new_shard": 0, "working": 0}
            end = [("next micro-batch, first unit", next_forward(x, chunk, x.b * chunk.last_block) | beside)]
    if x.zero3:
        ahead = x.b * chunk.last_block if turn.earlier and not chunk.only_unit else 0
        weights = x.c * chunk.head or ahead
        layers = [(unit, changes | {"weights": weights}) for unit, changes in layers]
    # The gradient that the input-gradient pass has sent to another stage is released when the next message is taken.
    sent = 0 if chunk.has_embedding else x.stream
    start["stream"] = sent
    layers, end = _beside(layers, sent), _beside(end, sent)
    if chunk.has_embedding and not turn.prior:
        start["of_last"] = x.r * chunk.first if x.unsharded else x.shard(chunk.first, 0)
    if chunk.head and turn.last and x.zero01:
        flat = x.flat * chunk.head
        after: Live = {"weights": 0, "gradients": chunk.shard, "flat": flat, "received": 0}
        after["reducing"] = 0 if x.adds else flat
        end.append(("head, reduction", after | dict.fromkeys(("end_gradient", "new_shard", "left"), 0)))
    return [*layers, *end]


def _beside(steps: list[Step], sent: int) -> list[Step]:
    """``steps`` while a sent gradient of so many bytes is held."""
    return [(unit, changes | {"stream": sent}) for unit, changes in steps]


def covers(more: Sequence[Sequence[Backwards]], less: Sequence[Sequence[Backwards]]) -> bool:
    """Whether a rank with the backwards ``more`` always needs at least as much as a rank with ``less``."""
    return all(
        any(_covers(number, a, b, one) for a in mine)
        for number, (mine, theirs) in enumerate(zip(more, less, strict=True))
        for b in theirs
        for one in b.held
    )


@lru_cache(maxsize=4096)
def _highest_backwards(
    of_schedule: tuple[str, int, int, int, int], units: bool, ahead: bool, latest: bool
) -> tuple[tuple[Backwards, ...], ...]:
    """`held_by_chunk` without backwards that never need more than another backward of the same chunk. ``of_schedule``:
    its arguments; ``units``:
    whether it matters which unit of a chunk was reduced last; ``ahead``: whether units are gathered ahead
    (`Backwards.ahead`); ``latest``: whether it matters which chunk had the last reduction."""
    result = []
    for number, of_chunk in enumerate(held_by_chunk(*of_schedule)):
        # Without a head or weights to gather the backward that follows a forward holds more.
        moments = [one for one in of_chunk if one.kind != "F" or ahead or number == len(one.chunks) - 1]
        merged = tuple(_merged(one, number, units=units, ahead=ahead, latest=latest) for one in moments)
        kept: list[Backwards] = []
        for place, one in enumerate(merged):
            others = (*kept, *merged[place + 1 :])
            held = tuple(state for state in one.held if not any(_covers(number, other, one, state) for other in others))
            if held:
                kept.append(one._replace(held=held))
        result.append(tuple(kept))
    return tuple(result)


def _merged(one: Backwards, number: int, *, units: bool, ahead: bool, latest: bool) -> Backwards:
    """A backward of chunk ``number`` without differences that do not matter."""
    chunks = one.chunks if units else tuple(ChunkState.AFTER_B if at in SUMMED else at for at in one.chunks)
    gathered = tuple(is_ahead and (ahead or at == number) for at, is_ahead in enumerate(one.ahead))
    return one._replace(chunks=chunks, ahead=gathered, latest=one.latest if latest else (number, False))


def _covers(number: int, a: Backwards, b: Backwards, one: Held) -> bool:
    """Whether the backwards ``a`` of chunk ``number`` need at least as much as ``b``, which start with ``one`` held.

    The chunk's own state must be equal: its first backward needs buffers that later backwards do not.
    """
    return (
        a.kind == b.kind
        and a.last == b.last
        and a.forward_follows >= b.forward_follows
        and a.chunks[number] == b.chunks[number]
        and all(x >= y for x, y in zip(a.ahead, b.ahead, strict=True))
        and a.latest == b.latest
        and all(_is_more(of_a, of_b) for of_a, of_b in zip(a.chunks, b.chunks, strict=True))
        and _holds(a, one)
    )


def _is_more(one: ChunkState, other: ChunkState) -> bool:
    """Whether a chunk in state ``one`` holds at least as much as a chunk in state ``other``."""
    if one in SUMMED:
        return one == other or other not in SUMMED
    return one == other or other < one < ChunkState.DONE


def _holds(a: Backwards, one: Held) -> bool:
    return any(
        all(x >= y for x, y in zip(other.activations, one.activations, strict=True))
        and all(x >= y for x, y in zip(other.for_weights, one.for_weights, strict=True))
        for other in a.held
    )
