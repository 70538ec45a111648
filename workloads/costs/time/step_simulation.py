"""Event-by-event simulation of one optimizer step: unequal stages, messages, sharding traffic, optimizer.

It executes the action lists that the engine executes (`workloads.costs.shape.schedule`). A rank has two queues:
compute, in which its actions follow each other, and data-parallel communication, which overlaps with compute. The
simulation models what the engine does:

messages   A receive is posted when an action needs it. The message starts when both sides are ready and takes
           ``latency_s + message_s``, so a channel never carries two at once. Sending takes no time of the sender.
           Messages between stages on one rank are free.
gathers    A chunk of n units gathers the weights of one unit at a time, one unit ahead. ZeRO 3: in every forward, B and
           I; lower stages: in the first forward of a chunk. The first unit's gather begins with the action, after the
           message that it waits for: ``g/n + (n-1) (f | g)/n + f/n``, where ``f | g`` is the time of both overlapping,
           which slow each other down (`together_s`). Below ZeRO 3 gathered weights are cast and copied in the first
           forward of a chunk, so each stage that the first micro-batch passes adds its own.
reduction  Gradients are reduced unit by unit during a backward, with one reduction under way:
           ``b/n + (n-1) (b | c)/n``; the last unit's c/n overlaps with the following action. c includes the gathers of
           ZeRO 3 and, in ZeRO 2 and 3, the reduce-scatter of every backward; in a chunk's last backward also the
           all-reduce over replicas (below ZeRO 2: the whole reduction). In a split backward W reduces and gathers
           nothing; it waits for the previous reduction.
ends       A chunk's last backward copies gradients that are not scattered, then the rank waits for its reduction;
           only then does its message to the previous stage leave. Gradients of a tied embedding are summed between the
           ranks of its copies; the norm waits for all ranks; then each runs its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from workloads.costs.shape.schedule import Action, schedule_actions, stage_at
from workloads.costs.time.execution import execution_order
from workloads.costs.time.pipeline import Span
from workloads.costs.traffic.collectives import INSIDE_NODE, Contention, together_s

Seconds: TypeAlias = Any
"""A number or an array of numbers, in seconds."""
Most = Callable[[Seconds, Seconds], Seconds]


class ChunkWork(NamedTuple):
    """Seconds of one micro-batch in one stage, including exposed communication inside it (tensor parallelism ...);
    arrays if there is one entry for each of many."""

    forward_s: Seconds
    backward_s: Seconds
    """Whole backward, not split."""
    input_s: Seconds
    weight_s: Seconds
    """I and W (``input_s``, ``weight_s``): the two passes of a split backward."""
    units: Seconds = 1
    """Number of units whose weights are gathered, and gradients reduced, one after another."""
    gather_s: Seconds = 0.0
    """Gathering the weights of all units once."""
    scatter_s: Seconds = 0.0
    """Reduce-scattering the gradients of all units once."""
    replicas_s: Seconds = 0.0
    """All-reducing the shards of gradients over replicas, once a step."""
    compute_beside: Seconds = 1.0
    traffic_beside: Seconds = 1.0
    """``compute_beside``, ``traffic_beside``: `Contention` of compute and data-parallel traffic."""
    copied_s: Seconds = 0.0
    """Work of the first forward that prepares weights for the whole step, after their gathers."""
    unscattered_s: Seconds = 0.0
    """Work of the last backward that copies gradients which are not scattered."""

    @property
    def contention(self) -> Contention:
        return Contention(self.compute_beside, self.traffic_beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Input of the simulation of one step. Times in seconds."""

    schedule: str
    num_microbatches: int
    chunks: tuple[tuple[ChunkWork, ...], ...]
    """Chunks by rank."""
    zero_stage: int = 0
    latency_s: float = 0.0
    message_s: float = 0.0
    """Bytes of a message between two ranks divided by their bandwidth."""
    tied_s: float = 0.0
    """Summing the two copies of a tied embedding if they are on different ranks."""
    optimizer_s: tuple[float, ...] = ()
    """Optimizer seconds by rank; empty: none."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step, in seconds. For each rank, compute, exposed, idle and optimizer add up to ``step_s``."""

    step_s: float
    spans: tuple[Span, ...]
    """Every action, rank by rank, from the arrival of its message to when the next one can begin."""
    traffic: tuple[tuple[int, float, float], ...]
    """(rank, start, end) of reductions that continue after their backward has ended."""
    compute_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    """Wait by rank for weights or for its gradients' reduction, and slowdown of compute by communication."""
    idle_s: tuple[float, ...]
    """Wait by rank for other stages, including their messages, and for the slowest rank at the end."""
    optimizer_s: tuple[float, ...]

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks divided by their total time."""
        return sum(self.idle_s) / (len(self.idle_s) * self.step_s)


class _Event(NamedTuple):
    """One action, in an order in which it can be executed."""

    rank: int
    action: Action
    awaited: int
    """Place, from 1, of the other rank's action that it waits for; 0: none."""
    first: bool
    """Whether it is the first forward of its chunk."""
    last: bool
    """Whether it completes its chunk's gradients."""


def simulate_step(work: StepWork) -> Timeline:
    """Execute every rank's actions, reductions and optimizer. Raises ValueError for lists that deadlock."""
    ranks = len(work.chunks)
    clock, free = [0.0] * ranks, [0.0] * ranks
    compute, exposed = [0.0] * ranks, [0.0] * ranks
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    traffic: list[tuple[int, float, float]] = []
    ends, hop = [-math.inf], work.latency_s + work.message_s
    for event in _events(work.schedule, ranks, work.num_microbatches, len(work.chunks[0])):
        rank, action = event.rank, event.action
        start = clock[rank]
        if event.awaited:
            start = max(start, ends[event.awaited]) + hop
        compute_s, end, left = _executed(work, event, start, free[rank])
        if left > end:
            traffic.append((rank, end, left))
        if left > free[rank]:
            free[rank] = left
        if event.last:
            end = max(end, free[rank])
        clock[rank] = end
        compute[rank] += compute_s
        exposed[rank] += end - start - compute_s
        ends.append(end)
        spans[rank].append(Span(rank, action, start, end))
    if work.tied_s:
        _sum_tied_copies(work, clock, exposed)
    together = max(clock)
    optimizer = work.optimizer_s or (0.0,) * ranks
    step = together + max(optimizer)
    return Timeline(
        step_s=step,
        spans=tuple(span for own_spans in spans for span in own_spans),
        traffic=tuple(traffic),
        compute_s=tuple(compute),
        exposed_s=tuple(exposed),
        idle_s=tuple(step - c - x - o for c, x, o in zip(compute, exposed, optimizer, strict=True)),
        optimizer_s=optimizer,
    )


def gathered_s(
    compute_s: Seconds, gather_s: Seconds, units: Seconds, most: Most = max, beside: Contention = INSIDE_NODE
) -> Seconds:
    """Seconds from the first gather's start to the end of the last unit's compute. ``most``: maximum of two numbers, or
    of two arrays (`numpy.maximum`)."""
    return (gather_s + (units - 1) * together_s(compute_s, gather_s, most, beside) + compute_s) / units


def reduced_s(
    compute_s: Seconds,
    gather_s: Seconds,
    reduce_s: Seconds,
    units: Seconds,
    most: Most = max,
    beside: Contention = INSIDE_NODE,
) -> Seconds:
    """Seconds from a backward's start to the end of its compute, overlapping gathers and reductions by unit."""
    return (gather_s + compute_s + (units - 1) * together_s(compute_s, gather_s + reduce_s, most, beside)) / units


def _executed(work: StepWork, event: _Event, start: float, free: float) -> tuple[float, float, float]:
    """(compute seconds, end of the action, end of its communication) of an action whose message has arrived at
    ``start``.

    ``free``: when this rank's earlier communication ends.
    """
    kind = event.action.kind
    chunk = work.chunks[event.rank][event.action.chunk]
    zero3 = work.zero_stage == 3
    compute_s = _compute_s(chunk, kind)
    gather = chunk.gather_s if kind != "W" and (zero3 or (kind == "F" and event.first)) else 0.0
    begins = max(start, free) if gather else start
    if kind in ("F", "I"):
        end = begins + gathered_s(compute_s, gather, chunk.units, beside=chunk.contention)
        copied_s = chunk.copied_s if event.first else 0.0
        return compute_s + copied_s, end + copied_s, free
    reduce = chunk.scatter_s if work.zero_stage >= 2 or event.last else 0.0
    if event.last:
        reduce += chunk.replicas_s
    if kind == "B":
        end = begins + reduced_s(compute_s, gather, reduce, chunk.units, beside=chunk.contention)
    else:
        end = start + reduced_s(compute_s, 0.0, reduce, chunk.units, beside=chunk.contention)
        end = max(end, free + reduce * (chunk.units - 1) / chunk.units if reduce else 0.0)
    if event.last:
        compute_s, end = compute_s + chunk.unscattered_s, end + chunk.unscattered_s
    return compute_s, end, max(end, free) + reduce / chunk.units if reduce else free


def _compute_s(chunk: ChunkWork, kind: str) -> float:
    place = "FBIW".index(kind)
    seconds: float = chunk[place]
    return seconds


def _sum_tied_copies(work: StepWork, clock: list[float], exposed: list[float]) -> None:
    """Sum a tied embedding's gradients: the ranks with the two ends of the model wait for each other. If one rank has
    both, nothing is sent."""
    stages = len(work.chunks) * len(work.chunks[0])
    ends = [
        rank
        for rank, chunks in enumerate(work.chunks)
        if {0, stages - 1} & {stage_at(work.schedule, rank, chunk, len(work.chunks)) for chunk in range(len(chunks))}
    ]
    if len(ends) < 2:
        return
    summed = max(clock[rank] for rank in ends) + work.tied_s
    for rank in ends:
        clock[rank] = summed
        exposed[rank] += work.tied_s


@lru_cache(maxsize=16)
def _events(schedule: str, num_ranks: int, num_microbatches: int, chunks: int) -> tuple[_Event, ...]:
    lists = [schedule_actions(schedule, rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks)]
    last = {
        (rank, action.chunk): action
        for rank, actions in enumerate(lists)
        for action in actions
        if action.kind in ("B", "W")
    }
    begun: set[tuple[int, int]] = set()
    events = []
    for rank, action, awaited in execution_order(lists, schedule, chunks):
        place = rank, action.chunk
        first = action.kind == "F" and place not in begun
        if first:
            begun.add(place)
        events.append(_Event(rank, action, awaited, first, action == last[place]))
    return tuple(events)
