"""One whole optimizer step, event by event: unequal stages, messages, sharded weights, gradient traffic, optimizer.

It executes the action lists that the engine executes (`workloads.costs.shape.schedule`). A rank has two queues:
compute, where its actions follow each other, and traffic over data-parallel ranks, which runs beside compute. What the
engine does is done here, too:

messages   A receive is posted when an action needs it. The message starts when both sides are ready and takes
           ``latency_s + message_s``: so a channel never has two at once. Sending takes no time of the sender. Stages
           on one rank hand over for free.
gathers    A chunk of n units gathers weights of a unit at a time, one unit ahead. ZeRO 3: in every forward, B and I;
           lower stages: in the first forward of a chunk. The first unit's gather begins with the action, behind the
           message that it waits for: ``g/n + (n-1) (f | g)/n + f/n``, where ``f | g`` is the time of both side by
           side, which slow each other (`together_s`).
reduction  Released unit by unit as a backward goes, with one unit under way: ``b/n + (n-1) (b | c)/n``, and the last
           unit's c/n beside what follows. c has the gathers of ZeRO 3 and, in ZeRO 2 and 3, the scatter of every
           backward; with a chunk's last one also the sum over replicas (below ZeRO 2 all of the reduction). Of a split
           backward W reduces, which gathers nothing: behind the reduction of the one before it, if that still goes on.
ends       After a chunk's last backward the rank waits for its reduction, and its message to the stage before leaves
           only then. Gradients of a tied embedding are summed between the ranks of its copies; the norm waits for all
           ranks; then each has its optimizer.
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
from workloads.costs.traffic.collectives import together_s

Seconds: TypeAlias = Any
"""A number, or an array of them."""
Most = Callable[[Seconds, Seconds], Seconds]


class ChunkWork(NamedTuple):
    """One micro-batch in one stage, in seconds, with what it always waits for inside (tensor parallelism ...); arrays
    where there is one entry for each of many."""

    forward_s: Seconds
    backward_s: Seconds
    """Whole."""
    input_s: Seconds
    weight_s: Seconds
    """Of a split backward: I and W."""
    units: Seconds = 1
    """Parts whose weights are gathered, and gradients reduced, one after another."""
    gather_s: Seconds = 0.0
    """Of the weights of all units, once."""
    scatter_s: Seconds = 0.0
    """Of the gradients of all units, once."""
    replicas_s: Seconds = 0.0
    """Summing the shards of gradients over replicas, once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step of a pipeline consists of. Times in seconds."""

    schedule: str
    num_microbatches: int
    chunks: tuple[tuple[ChunkWork, ...], ...]
    """By rank."""
    zero_stage: int = 0
    latency_s: float = 0.0
    message_s: float = 0.0
    """Bytes of a message between two ranks over their bandwidth."""
    tied_s: float = 0.0
    """Summing the two copies of a tied embedding, where they are on different ranks."""
    optimizer_s: tuple[float, ...] = ()
    """By rank; empty: none."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step, in seconds. Of each rank compute, exposed, idle and optimizer add up to ``step_s``."""

    step_s: float
    spans: tuple[Span, ...]
    """Every action, rank by rank, from when its message is there to when the next one can begin."""
    traffic: tuple[tuple[int, float, float], ...]
    """(rank, start, end) of the reduction that is still under way when a backward has ended."""
    compute_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    """Of each rank: waiting for weights or for its gradients' reduction, and what compute loses beside traffic."""
    idle_s: tuple[float, ...]
    """Of each rank: waiting for other stages, their messages included, and for the slowest rank at the end."""
    optimizer_s: tuple[float, ...]

    @property
    def bubble_share(self) -> float:
        """Waiting of all ranks over their whole time."""
        return sum(self.idle_s) / (len(self.idle_s) * self.step_s)


class _Event(NamedTuple):
    """One action, in an order in which it can be executed."""

    rank: int
    action: Action
    awaited: int
    """Place, from 1, of the other rank's action that it waits for; 0: none."""
    first: bool
    """The first forward of its chunk."""
    last: bool
    """It completes its chunk's gradients."""


def simulate_step(work: StepWork) -> Timeline:
    """Execute every rank's actions and what follows them. Raises ValueError for lists that wait without end."""
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
        own, end, left = _executed(work, event, start, free[rank])
        if left > end:
            traffic.append((rank, end, left))
        if left > free[rank]:
            free[rank] = left
        if event.last:
            end = max(end, free[rank])
        clock[rank] = end
        compute[rank] += own
        exposed[rank] += end - start - own
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


def gathered_s(compute_s: Seconds, gather_s: Seconds, units: Seconds, most: Most = max) -> Seconds:
    """From the first gather's start to the end of the last unit's compute. ``most``: of two numbers, or of two arrays
    (`numpy.maximum`)."""
    return (gather_s + (units - 1) * together_s(compute_s, gather_s, most) + compute_s) / units


def reduced_s(compute_s: Seconds, gather_s: Seconds, reduce_s: Seconds, units: Seconds, most: Most = max) -> Seconds:
    """From a backward's start to the end of its compute, beside gathers and reductions unit by unit."""
    return (gather_s + compute_s + (units - 1) * together_s(compute_s, gather_s + reduce_s, most)) / units


def _executed(work: StepWork, event: _Event, start: float, free: float) -> tuple[float, float, float]:
    """Of one action whose message is there at ``start``: compute, its end, and until when its traffic goes on.

    ``free``: when this rank's earlier traffic is through.
    """
    kind = event.action.kind
    chunk = work.chunks[event.rank][event.action.chunk]
    zero3 = work.zero_stage == 3
    own = _compute_s(chunk, kind)
    gather = chunk.gather_s if kind != "W" and (zero3 or (kind == "F" and event.first)) else 0.0
    begins = max(start, free) if gather else start
    if kind in ("F", "I"):
        return own, begins + gathered_s(own, gather, chunk.units), free
    reduce = chunk.scatter_s if work.zero_stage >= 2 or event.last else 0.0
    if event.last:
        reduce += chunk.replicas_s
    if kind == "B":
        end = begins + reduced_s(own, gather, reduce, chunk.units)
    else:
        end = start + reduced_s(own, 0.0, reduce, chunk.units)
        end = max(end, free + reduce * (chunk.units - 1) / chunk.units if reduce else 0.0)
    return own, end, max(end, free) + reduce / chunk.units if reduce else free


def _compute_s(chunk: ChunkWork, kind: str) -> float:
    place = "FBIW".index(kind)
    found: float = chunk[place]
    return found


def _sum_tied_copies(work: StepWork, clock: list[float], exposed: list[float]) -> None:
    """The ranks with the two ends of the model wait for each other. Where one rank has both nothing is sent."""
    stages = len(work.chunks) * len(work.chunks[0])
    ends = [
        rank
        for rank, own in enumerate(work.chunks)
        if {0, stages - 1} & {stage_at(work.schedule, rank, chunk, len(work.chunks)) for chunk in range(len(own))}
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
        (rank, action.chunk): action for rank, own in enumerate(lists) for action in own if action.kind in ("B", "W")
    }
    begun: set[tuple[int, int]] = set()
    found = []
    for rank, action, awaited in execution_order(lists, schedule, chunks):
        place = rank, action.chunk
        first = action.kind == "F" and place not in begun
        if first:
            begun.add(place)
        found.append(_Event(rank, action, awaited, first, action == last[place]))
    return tuple(found)
