"""Action lists in an order in which they can be executed, and executed at given times for nothing but the total.

The middle of a schedule is the same round again and again: it is written out once, and executed until every end in it
is later by one and the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, get_args

from workloads.costs.schedule import Action, Kind, schedule_actions, stage_at

KINDS: tuple[Kind, ...] = get_args(Kind)

ALIKE = 1e-12
"""Times that differ by this part are taken as equal: far more than rounding makes of them."""


class Steps(NamedTuple):
    """All actions of a schedule in an order in which they can be executed: ``before``, ``rounds`` times ``round``,
    ``after``. Of each its rank, its `place_in`, and between them where it finds the one that it waits for, counted back
    from the latest one as a negative index; 0: it waits for none."""

    before: tuple[tuple[int, int, int], ...]
    round: tuple[tuple[int, int, int], ...]
    rounds: int
    after: tuple[tuple[int, int, int], ...]


def executed_s(steps: Steps, times: Sequence[float], num_ranks: int, p2p_s: float) -> float:
    """The total of `pipeline.simulate`, and nothing else of it; written for speed.

    Where every end in a round is later by one and the same time than in the round before it, so it is in all that
    follow, which are not executed: sums and maxima commute with a shift of all times.
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
    steps: Sequence[tuple[int, int, int]], times: Sequence[float], p2p_s: float, clock: list[float], ends: list[float]
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
    """By how much every one of the last ``size`` ends is later than the one ``size`` before it; None: not alike."""
    later = ends[-1] - ends[-1 - size]
    least, most = (1 - ALIKE) * later, (1 + ALIKE) * later
    pairs = zip(ends[-size:], ends[-2 * size : -size], strict=True)
    return later if all(least <= now - before <= most for now, before in pairs) else None


_FEW_ROUNDS = 8
"""Of p micro-batches: a schedule of more has no other steps, so that no more of them are written out."""


@lru_cache(maxsize=1024)
def steps_of(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Steps:
    """Every action; of p more micro-batches the middle has one round more."""
    more = max(0, num_microbatches // num_ranks - _FEW_ROUNDS)
    found = written_steps(name, num_ranks, num_microbatches - more * num_ranks, chunks)
    if more and not found.rounds:
        return written_steps(name, num_ranks, num_microbatches, chunks)
    return found._replace(rounds=found.rounds + more) if more else found


@lru_cache(maxsize=1024)
def written_steps(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Steps:
    """Every action in an order in which it can be executed: that of their starts where F, I and W take equally long.

    In this order the middle of a schedule repeats itself, after p micro-batches at the latest.
    """
    schedule = [schedule_actions(name, rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks)]
    clock, starts, ends = [0] * num_ranks, [], [0]
    found = []
    for rank, action, awaited in execution_order(schedule, name, chunks):
        starts.append(max(clock[rank], ends[awaited]))
        clock[rank] = starts[-1] + (2 if action.kind == "B" else 1)
        ends.append(clock[rank])
        found.append((rank, awaited, place_in(action, rank, num_ranks, chunks)))
    order = sorted(range(len(found)), key=lambda at: (starts[at], found[at][0]))
    position = [0] * (len(order) + 1)
    for place, at in enumerate(order):
        position[at + 1] = place
    steps = []
    once: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # equal steps are one object: less memory, and faster
    for here, at in enumerate(order):
        rank, awaited, place = found[at]
        step = rank, position[awaited] - here if awaited else 0, place
        steps.append(once.setdefault(step, step))
    first, size, rounds = _repeated(steps, len(steps) // num_microbatches * num_ranks)
    last = first + size * rounds
    return Steps(tuple(steps[:first]), tuple(steps[first : first + size]), rounds, tuple(steps[last:]))


def _repeated(steps: Sequence[tuple[int, int, int]], size: int) -> tuple[int, int, int]:
    """(first, size, rounds) of the longest part of steps that is one round of ``size`` steps again and again.

    No rounds where fewer than four follow each other, where a step waits for one before the round before it, or where a
    rank has no part in a round: then a round does not follow from the one before it alone.
    """
    first = best = run = 0
    for at in range(size, len(steps)):
        run = run + 1 if steps[at] == steps[at - size] else 0
        if run > best:
            first, best = at - run + 1 - size, run
    rounds = best // size + 1
    reaches = all(-step[1] <= size for step in steps)
    everyone = {step[0] for step in steps[first : first + size]} == {step[0] for step in steps}
    return (first, size, rounds) if rounds >= 4 and reaches and everyone else (len(steps), 0, 0)


def place_in(action: Action, rank: int, num_ranks: int, chunks: int) -> int:
    """Where `pipeline._durations` has the action's."""
    return (KINDS.index(action.kind) * num_ranks + rank) * chunks + action.chunk


def execution_order(schedule: Sequence[Sequence[Action]], name: str, chunks: int) -> list[tuple[int, Action, int]]:
    """Every action with its rank, and with the place in this order, from 1, of the other rank's action it waits for.

    That place is 0 where there is none. Each action comes after the one it waits for and after those before it in its
    list. Raises ValueError where no such order exists.
    """
    num_ranks = len(schedule)
    last_stage = num_ranks * chunks - 1
    forward: dict[tuple[int, int], tuple[int, int]] = {}
    """Stage and micro-batch of every forward so far: its rank and its place."""
    backward: dict[tuple[int, int], tuple[int, int]] = {}
    """The same of every B and I."""
    position = [0] * num_ranks
    found: list[tuple[int, Action, int]] = []
    remaining = sum(len(actions) for actions in schedule)
    while remaining > len(found):
        before = len(found)
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
                found.append((rank, action, awaited[1] if awaited[0] != rank else 0))
                ended[stage, i] = rank, len(found)
                position[rank] += 1
        if len(found) == before:
            waiting = [f"rank {r}: {a[position[r]]}" for r, a in enumerate(schedule) if position[r] < len(a)]
            raise ValueError(f"the schedule waits for itself; next actions are {'; '.join(waiting)}")
    return found
