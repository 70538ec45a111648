"""Orders in which the actions of a schedule can be executed, and a fast execution that returns only the total time.

The middle of a schedule repeats one round. It is stored once, and executed until every end time in it is later than in
the previous round by the same amount.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np

from workloads.costs.shape.schedule import Action, Kind, schedule_actions, stage_at

Ints = np.ndarray[Any, np.dtype[np.int64]]

KINDS: tuple[Kind, ...] = get_args(Kind)

ALIKE = 1e-12
"""Relative difference below which times count as equal: far more than rounding causes."""


Step = tuple[int, int, int]
"""(rank, relative index of the awaited action, `place_in`): see `ActionOrder`."""


class ActionOrder(NamedTuple):
    """All actions of a schedule in an order in which they can be executed: ``before``, ``rounds`` times ``round``,
    ``after``. Each step has its rank, a negative index of the action that it waits for (counted back from the latest
    action; 0: none), and its `place_in`."""

    before: tuple[Step, ...]
    round: tuple[Step, ...]
    rounds: int
    after: tuple[Step, ...]


def executed_s(steps: ActionOrder, times: Sequence[float], num_ranks: int, p2p_s: float) -> float:
    """Total seconds of `pipeline.simulate`, without its other results; written for speed.

    Once all ends in a round are later than in the previous round by the same amount, so are those of all following
    rounds, which are not executed: sums and maxima commute with a shift of all times.
    """
    clock, ends, size = [0.0] * num_ranks, [-math.inf], len(steps.round)
    _execute(steps.before, times, p2p_s, clock, ends)
    for left in reversed(range(steps.rounds)):
        _execute(steps.round, times, p2p_s, clock, ends)
        if left and left < steps.rounds - 1 and (later := _shift(ends, size)) is not None:
            ends = [end + left * later for end in ends[-2 * size :]]
            clock = [end + left * later for end in clock]
            break
    _execute(steps.after, times, p2p_s, clock, ends)
    return max(clock)


def _execute(
    steps: Sequence[Step], times: Sequence[float], p2p_s: float, clock: list[float], ends: list[float]
) -> None:
    note = ends.append
    for rank, back, place in steps:
        end = clock[rank]
        if back:
            ready = ends[back] + p2p_s
            if ready > end:
                end = ready
        clock[rank] = end = end + times[place]
        note(end)


def _shift(ends: Sequence[float], size: int) -> float | None:
    """Seconds by which each of the last ``size`` ends is later than the one ``size`` before it; None if they differ."""
    later = ends[-1] - ends[-1 - size]
    least, most = (1 - ALIKE) * later, (1 + ALIKE) * later
    pairs = zip(ends[-size:], ends[-2 * size : -size], strict=True)
    return later if all(least <= now - before <= most for now, before in pairs) else None


_FEW_ROUNDS = 8
"""Rounds of p micro-batches to write out. Schedules with more consist of the same steps."""


@lru_cache(maxsize=1024)
def steps_of(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> ActionOrder:
    """Steps of all actions; p more micro-batches add one round to the middle."""
    written = fewest_written(name, num_ranks, num_microbatches, chunks)
    steps = written_steps(name, num_ranks, written, chunks)
    return steps._replace(rounds=steps.rounds + (num_microbatches - written) // num_ranks)


def fewest_written(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> int:
    """Number of micro-batches of the shortest schedule that has the same steps except for the number of rounds."""
    more = max(0, num_microbatches // num_ranks - _FEW_ROUNDS)
    written = num_microbatches - more * num_ranks
    return written if written_steps(name, num_ranks, written, chunks).rounds else num_microbatches


@lru_cache(maxsize=1024)
def written_steps(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> ActionOrder:
    """Steps of all actions, ordered by their starts if F, I and W take equally long.

    In this order the middle of a schedule repeats after at most p micro-batches.
    """
    order = _unit_order(name, num_ranks, num_microbatches, chunks)
    ranks, awaited, places, starts = (np.array(column, dtype=np.int64) for column in order)
    sorted_by = np.lexsort((ranks, starts))
    position = np.empty_like(sorted_by)
    position[sorted_by] = np.arange(len(sorted_by))
    back = np.where(awaited >= 0, position[awaited] - position, 0)
    columns = np.stack([ranks, back, places], axis=1)[sorted_by]
    once: dict[Step, Step] = {}  # equal steps are one object, which saves memory and time
    steps = [once.setdefault(step, step) for step in map(tuple, columns.tolist())]
    first, size, rounds = _repeated(columns, len(steps) // num_microbatches * num_ranks)
    last = first + size * rounds
    return ActionOrder(tuple(steps[:first]), tuple(steps[first : first + size]), rounds, tuple(steps[last:]))


def _unit_order(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Sequence[Sequence[int]]:
    """Columns (rank, number of the awaited action on another rank or -1, `place_in`, start if F, I and W take one unit
    of time) of all actions, numbered in this order. `execution_order` is the readable version."""
    p, m, stages = num_ranks, num_microbatches, num_ranks * chunks
    done = [-1] * (2 * stages * m + 1)
    """Action numbers of the F, and then of the B or I, of every stage and micro-batch; the last entry is that of any
    W."""
    lists = []
    for rank in range(p):
        actions = []
        for kind, i, chunk in schedule_actions(name, rank, p, m, chunks):
            stage, place = stage_at(name, rank, chunk, p), (KINDS.index(kind) * p + rank) * chunks + chunk
            if kind == "F":
                actions.append(((stage - 1) * m + i if stage else -1, stage * m + i, place, 1))
            elif kind == "W":
                actions.append((-1, -1, place, 1))
            else:
                wait, give = (stages + stage + 1) * m + i, (stages + stage) * m + i
                actions.append((wait if stage < stages - 1 else -1, give, place, 2 if kind == "B" else 1))
        lists.append(actions)
    position, clock = [0] * p, [0] * p
    ranks: list[int] = []
    awaited: list[int] = []
    places: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    left = sum(map(len, lists))
    while left > len(ranks):
        before = len(ranks)
        for rank, actions in enumerate(lists):
            now, at = clock[rank], position[rank]
            for wait, give, place, units in actions[at:]:
                source = -1
                if wait >= 0:
                    source = done[wait]
                    if source < 0:
                        break
                    if ends[source] > now:
                        now = ends[source]
                    if ranks[source] == rank:
                        source = -1
                done[give] = len(ranks)
                ranks.append(rank)
                awaited.append(source)
                places.append(place)
                starts.append(now)
                now += units
                at += 1
                ends.append(now)
            clock[rank], position[rank] = now, at
        assert len(ranks) > before, f"{name} of {p} ranks and {m} micro-batches waits for itself"
    return ranks, awaited, places, starts


def _repeated(steps: Ints, size: int) -> tuple[int, int, int]:
    """(first, size, rounds) of the longest part of ``steps`` that repeats one round of ``size`` steps.

    Returns no rounds if fewer than four follow each other, if a step waits for one before the previous round, or if a
    rank has no action in a round: then a round does not follow from the previous one alone.
    """
    nothing = len(steps), 0, 0
    if len(steps) <= size or (-steps[:, 1]).max(initial=0) > size:
        return nothing
    ends = np.flatnonzero(np.diff((steps[size:] == steps[:-size]).all(axis=1), prepend=False, append=False))
    if not len(ends):
        return nothing
    begins, lengths = ends[::2], ends[1::2] - ends[::2]
    longest = int(lengths.argmax())
    first, rounds = int(begins[longest]), int(lengths[longest]) // size + 1
    everyone = len(np.unique(steps[first : first + size, 0])) == len(np.unique(steps[:, 0]))
    return (first, size, rounds) if rounds >= 4 and everyone else nothing


def place_in(action: Action, rank: int, num_ranks: int, chunks: int) -> int:
    """Index of an action's duration in `pipeline._durations`."""
    return (KINDS.index(action.kind) * num_ranks + rank) * chunks + action.chunk


def execution_order(schedule: Sequence[Sequence[Action]], name: str, chunks: int) -> list[tuple[int, Action, int]]:
    """Every action as (rank, action, place of the awaited action). Places count from 1 in this order; 0: it waits for
    no other rank.

    Each action comes after the one it waits for and after the earlier actions of its rank. Raises ValueError if no such
    order exists.
    """
    num_ranks = len(schedule)
    last_stage = num_ranks * chunks - 1
    forward: dict[tuple[int, int], tuple[int, int]] = {}
    """(rank, place) of every forward so far, by (stage, micro-batch)."""
    backward: dict[tuple[int, int], tuple[int, int]] = {}
    """(rank, place) of every B and I so far, by (stage, micro-batch)."""
    position = [0] * num_ranks
    order: list[tuple[int, Action, int]] = []
    remaining = sum(len(actions) for actions in schedule)
    while remaining > len(order):
        before = len(order)
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                stage, i = stage_at(name, rank, action.chunk, num_ranks), action.microbatch
                awaited: tuple[int, int] | None = (rank, 0)
                if action.kind == "F":
                    if stage > 0:
                        awaited = forward.get((stage - 1, i))
                    ended = forward
                elif action.kind == "W":
                    if (stage, i) not in backward:
                        break
                    ended = {}
                else:
                    if (stage, i) not in forward:
                        break
                    if stage < last_stage:
                        awaited = backward.get((stage + 1, i))
                    ended = backward
                if awaited is None:
                    break
                order.append((rank, action, awaited[1] if awaited[0] != rank else 0))
                ended[stage, i] = rank, len(order)
                position[rank] += 1
        if len(order) == before:
            waiting = [f"rank {r}: {a[position[r]]}" for r, a in enumerate(schedule) if position[r] < len(a)]
            raise ValueError(f"the schedule waits for itself; next actions are {'; '.join(waiting)}")
    return order
