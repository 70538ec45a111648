"""Memory moments (`workloads.costs.memory.layer_moments`) of a pipeline rank with several chunks.

Each chunk is gathered and reduced by itself. A chunk's backward is therefore the moment of a rank that has only this
chunk, plus the activations, gathered parameters and gradients that the other chunks hold at that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from workloads.costs.memory.end_moments import end_moment, head_moments
from workloads.costs.memory.kind_tensors import routed_tensors
from workloads.costs.memory.layer_classes import LayerSizes
from workloads.costs.memory.layer_moments import block_moments, expert_moments, first_block_moments
from workloads.costs.memory.moments import MicroBatchBackward, Moment, Shared, Units
from workloads.costs.shape.params import local_params
from workloads.costs.shape.partition import StageParams, experiment_chunks
from workloads.costs.shape.schedule import SPLIT_BACKWARD, Backwards, ChunkState, Held, held_by_chunk
from workloads.spec.experiment import Experiment


class _Bytes(NamedTuple):
    """Bytes that one chunk may hold (``params`` and ``units`` are elements)."""

    held: StageParams
    units: Units
    params: int
    """Parameters on one rank, in elements."""
    whole: int
    """Bytes of gathered parameters."""
    shard: int
    """Bytes of reduced gradients."""
    accumulated: int
    """Bytes of gradients between micro-batches."""
    of_ends: int
    """Part of ``accumulated`` that belongs to the embedding and the head."""
    flat: int
    """Bytes of FSDP's flat reduce-scatter buffer of the chunk's last unit, kept until the next reduction."""
    saved: int
    """Bytes saved by the chunk's layers for one micro-batch, with the chunk's output."""
    of_head: int
    """Bytes saved by the head for one micro-batch."""
    deferred: int
    """Bytes held between the two passes of one split backward."""

    def others_hold(self, at: ChunkState, zero_stage: int) -> Moment:
        """Bytes that this chunk, in state ``at``, holds besides activations while another chunk runs."""
        gathered = self.whole if zero_stage < 3 and ChunkState.GATHERED <= at < ChunkState.DONE else 0
        gradients = (
            self.accumulated if at >= ChunkState.ALL_REDUCED else self.of_ends if at >= ChunkState.ENDS_REDUCED else 0
        )
        if at == ChunkState.DONE:
            gradients = self.shard
        return gathered, gradients, self.flat if ChunkState.ENDS_REDUCED <= at < ChunkState.DONE else 0


def moments_of_chunks(e: Experiment, x: Shared, stage: int) -> list[Moment]:
    """Moments of every chunk's backwards, including what all chunks hold when they start."""
    chunks = [_bytes_of(e, x, held) for held in experiment_chunks(e)[stage]]
    saved, deferred = [one.saved + one.of_head for one in chunks], [one.deferred for one in chunks]
    holds = [[one.others_hold(at, e.zero_stage) for at in ChunkState] for one in chunks]
    splits, second = e.pp_schedule in SPLIT_BACKWARD, _in_second_half(e, x)
    moments: list[Moment] = []
    backwards = _highest_backwards(e.pp_schedule, stage, e.pp, e.num_microbatches, e.virtual_stages)
    for number, (own_bytes, of_chunk) in enumerate(zip(chunks, backwards, strict=True)):
        for kind, last, forward_follows, at, held_at_start in of_chunk:
            activations = max(
                sum(map(mul, held.activations, saved)) + sum(map(mul, held.for_weights, deferred))
                for held in held_at_start
            )
            # In a weight-gradient pass the gradients of embedding and head are counted with those it creates.
            own_prior = 0 if kind == "W" and at[number] < ChunkState.ALL_REDUCED else holds[number][at[number]][1]
            chunk, layers = own_bytes, x
            if kind == "W":
                units = own_bytes.units._replace(classes=second.classes(own_bytes.held))
                chunk, layers = own_bytes._replace(units=units, saved=own_bytes.deferred), second
            turn = MicroBatchBackward(
                in_flight=1,
                deferred=activations - (own_bytes.deferred if kind == "W" else saved[number]),
                prior=own_prior,
                last=last,
                forward_follows=forward_follows,
                own_deferred=own_bytes.deferred if splits and kind in ("F", "I") else 0,
                first_half=kind == "I",
                second_half=kind == "W",
            )
            copies = gradients = buffers = 0
            for other, state in enumerate(at):
                if other != number:
                    more = holds[other][state]
                    copies, gradients, buffers = copies + more[0], gradients + more[1], buffers + more[2]
            of_turn = {"F": _forward, "W": _second_half}.get(kind, _backward)
            for one in of_turn(e, layers, chunk, turn):
                moments.append((one[0] + copies, one[1] + gradients, one[2] + buffers))  # noqa: PERF401
    return moments


def _in_second_half(e: Experiment, x: Shared) -> Shared:
    """`Shared` for the weight-gradient pass: layers hold what the input-gradient pass has left, and need their weights'
    gradients. When expert gradients are reduced, the experts' rows, output gradients, gate_up and product are free.
    """
    sizes: list[LayerSizes] = []
    working = 0
    for size in x.sizes:
        working, reducing = x.c * max(x.block, size.experts), 0
        if size.experts:
            of_experts = routed_tensors(e, x.c)
            reducing = x.stream - (2 * of_experts.rows + of_experts.gate_up + of_experts.product)
        left = {"saved": size.deferred, "kept": size.deferred, "working": working, "working_kept": working}
        sizes.append(size._replace(**left, reducing=reducing, reducing_kept=reducing))
    return x._replace(sizes=tuple(sizes), working=working, working_kept=working)


def _forward(e: Experiment, x: Shared, chunk: _Bytes, turn: MicroBatchBackward) -> Sequence[Moment]:
    """Moment of a forward. Only the head's counts: in other chunks the backward that follows holds more."""
    return head_moments(e, x, chunk.units, turn, chunk.whole, chunk.saved)[:1] if chunk.held.has_head else ()


def _backward(e: Experiment, x: Shared, chunk: _Bytes, turn: MicroBatchBackward) -> Sequence[Moment]:
    of_head = head_moments(e, x, chunk.units, turn, chunk.whole, chunk.saved)[1:] if chunk.held.has_head else ()
    return [*of_head, *_blocks(e, x, chunk, turn)]


def _second_half(e: Experiment, x: Shared, chunk: _Bytes, turn: MicroBatchBackward) -> Sequence[Moment]:
    """Moments of the weight-gradient pass of a split backward.

    Embedding and head have their gradients from the input-gradient pass. If they were not reduced there, they are
    reduced after all blocks, the head through two flat copies. Weights freed by ZeRO 3 are not gathered, but FSDP has
    started to gather the head ahead and holds its flat buffer.
    """
    of_embedding = 0
    if chunk.held.embedding and not turn.prior:
        of_embedding = x.g * chunk.units.first if x.unsharded else x.shard(chunk.units.first, 0)
    *layers, end = _blocks(e, x, chunk, turn)
    result = []
    for copies, gradients, rest in layers:
        gathered = copies if e.zero_stage < 3 else x.c * chunk.units.head
        result.append((gathered, gradients + of_embedding, rest))
    result.append(end)
    if chunk.units.head and turn.last and e.zero_stage <= 1:
        result.append((0, chunk.shard, turn.deferred + 2 * x.g * chunk.units.head))
    return result


def _blocks(e: Experiment, x: Shared, chunk: _Bytes, turn: MicroBatchBackward) -> Sequence[Moment]:
    units, held, whole = chunk.units, chunk.held, chunk.whole
    return [
        *block_moments(e, x, units, turn, whole, chunk.saved, held),
        *(() if turn.first_half else expert_moments(e, x, units, turn, held, whole, chunk.saved)),
        *first_block_moments(e, x, units, turn, held, chunk.params, whole, chunk.saved),
        end_moment(e, x, units, turn, held, chunk.params, whole, chunk.shard, chunk.saved),
    ]


def _bytes_of(e: Experiment, x: Shared, held: StageParams) -> _Bytes:
    layers, experts = local_params(e, held.layers)
    ends = (held.embedding + held.head) // e.tp + held.final_norm
    params, shard = layers + experts + ends, x.shard(layers + ends, experts)
    classes = x.classes(held)
    # The last unit of a split backward is a block. Interleaved ranks with the head run others between the passes.
    of_end = {"interleaved_zero_bubble": held.has_head, "zero_bubble_v": False}.get(e.pp_schedule, held.embedding > 0)
    return _Bytes(
        held=held,
        units=Units(
            head=x.vocabulary if held.head else 0,
            first=x.vocabulary if held.embedding else x.block,
            first_copy=x.c * x.vocabulary if held.embedding else x.b * x.block,
            tied=0,  # both ends are in one chunk only without a pipeline
            experts=x.experts if held.moe_layers else 0,
            all_experts=experts,
            classes=classes,
        ),
        params=params,
        whole=x.b * layers + x.b_experts * experts + x.c * ends,
        shard=shard,
        accumulated=x.g * params if x.unsharded else shard,
        of_ends=x.g * ends if x.unsharded else x.shard(ends, 0),
        flat=0 if x.unsharded else x.g * (x.vocabulary if of_end else x.block),
        saved=sum(one.saved for one in classes) + (0 if held.has_head else x.stream),
        of_head=x.head.saved if held.has_head else 0,
        deferred=sum(one.layers * one.size.deferred for one in classes),
    )


def covers(more: Sequence[Sequence[Backwards]], less: Sequence[Sequence[Backwards]]) -> bool:
    """Whether a rank with the backwards ``more`` always needs at least as much as a rank with ``less``."""
    return all(
        any(_covers(number, a, b, one) for a in mine)
        for number, (mine, theirs) in enumerate(zip(more, less, strict=True))
        for b in theirs
        for one in b.held
    )


@lru_cache(maxsize=4096)
def _highest_backwards(schedule: str, rank: int, pp: int, m: int, v: int) -> tuple[tuple[Backwards, ...], ...]:
    """`held_by_chunk` without backwards that never need more than another backward of the same chunk."""
    result = []
    for number, of_chunk in enumerate(held_by_chunk(schedule, rank, pp, m, v)):
        kept: list[Backwards] = []
        for place, one in enumerate(of_chunk):
            others = (*kept, *of_chunk[place + 1 :])
            held = tuple(state for state in one.held if not any(_covers(number, other, one, state) for other in others))
            if held:
                kept.append(one._replace(held=held))
        result.append(tuple(kept))
    return tuple(result)


def _covers(number: int, a: Backwards, b: Backwards, one: Held) -> bool:
    """Whether the backwards ``a`` of chunk ``number`` need at least as much as ``b``, which start with ``one`` held.

    The chunk's own state must be equal: its first backward needs buffers that later backwards do not.
    """
    return (
        a.kind == b.kind
        and a.last == b.last
        and a.forward_follows >= b.forward_follows
        and a.chunks[number] == b.chunks[number]
        and all(_is_more(of_a, of_b) for of_a, of_b in zip(a.chunks, b.chunks, strict=True))
        and _holds(a, one)
    )


def _is_more(one: ChunkState, other: ChunkState) -> bool:
    """Whether a chunk in state ``one`` holds at least as much as a chunk in state ``other``."""
    return one == other or other < one < ChunkState.DONE or (one == ChunkState.ALL_REDUCED and other == ChunkState.DONE)


def _holds(a: Backwards, one: Held) -> bool:
    return any(
        all(x >= y for x, y in zip(other.activations, one.activations, strict=True))
        and all(x >= y for x, y in zip(other.for_weights, one.for_weights, strict=True))
        for other in a.held
    )
