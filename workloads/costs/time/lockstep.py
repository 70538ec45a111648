"""Execution of the same action lists at the times of many layouts at once: a vectorized `execution.executed_s`.

Actions that do not wait for each other form one *level*. For a level and all layouts, starts are one array comparison
and ends are one array sum. The operations are those of `executed_s`, so that results are equal to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from workloads.costs.time.execution import ALIKE, Step, fewest_written, steps_of

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_MOST_NUMBERS = 1_000_000
"""Maximum number of action ends held at one time."""


class _Level(NamedTuple):
    """Rows of one level in a part's table (`_Part`)."""

    start: int
    stop: int
    """Ends of the level's actions are the rows from ``start`` to before ``stop``."""
    previous: Ints
    """Row of the end of the previous action on the same rank, by action."""
    awaited: Ints
    """Row of the end of the awaited action, by action."""


class _Part(NamedTuple):
    """Steps as levels. Table rows: the clock of every rank at the start, one row of minus infinity, ends of earlier
    actions in their order, and ends of the part's actions by level."""

    levels: tuple[_Level, ...]
    places: Ints
    """Indices of the actions' durations, by level."""
    rows: Ints
    """Table rows of the actions, in their order."""
    clocks: Ints
    """Table rows with the clocks of all ranks at the end."""


class _Program(NamedTuple):
    before: _Part
    round: _Part | None
    after: _Part | None
    size: int
    """Number of actions of a round."""
    actions: int
    """Number of actions of the largest part."""


def executed_together_s(name: str, num_ranks: int, num_microbatches: int, chunks: int, times: Floats) -> Floats:
    """Totals of `executed_s` of one schedule, without messages, in seconds by layout. ``times``: seconds, of shape
    (kind, rank and chunk; layouts)."""
    program = _program(name, num_ranks, fewest_written(name, num_ranks, num_microbatches, chunks), chunks)
    rounds = steps_of(name, num_ranks, num_microbatches, chunks).rounds
    width = max(1, _MOST_NUMBERS // program.actions)
    parts = [times[:, at : at + width] for at in range(0, times.shape[1], width)]
    return np.concatenate([_totals(program, rounds, num_ranks, part) for part in parts])


def _totals(program: _Program, rounds: int, num_ranks: int, times: Floats) -> Floats:
    nothing = np.empty((0, times.shape[1]))
    clocks, ends = _executed(program.before, np.zeros((num_ranks, times.shape[1])), nothing, times)
    if program.round is not None and program.after is not None:
        missing = max(0, program.size - len(ends))
        ends = np.concatenate(
            [np.full((missing, times.shape[1]), -math.inf), ends[len(ends) + missing - program.size :]]
        )
        clocks, ends = _rounds(program.round, rounds, clocks, ends, times)
        clocks, _ = _executed(program.after, clocks, ends, times)
    totals: Floats = clocks.max(axis=0)
    return totals


def _rounds(part: _Part, rounds: int, clocks: Floats, ends: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Clocks and ends after ``rounds`` rounds. Layouts whose last round is a shift of the previous one are
    extrapolated."""
    here, all_clocks, all_ends = np.arange(times.shape[1]), clocks.copy(), ends.copy()
    for left in reversed(range(rounds)):
        before = ends
        clocks, ends = _executed(part, clocks, before, times)
        if not left or left == rounds - 1:
            continue
        later, passed = ends[-1] - before[-1], ends - before
        shifted = ((passed >= (1 - ALIKE) * later) & (passed <= (1 + ALIKE) * later)).all(axis=0)
        if shifted.any():
            gone = here[shifted]
            all_clocks[:, gone] = clocks[:, shifted] + left * later[shifted]
            all_ends[:, gone] = ends[:, shifted] + left * later[shifted]
            here, clocks, ends, times = (one[..., ~shifted] for one in (here, clocks, ends, times))
            if not len(here):
                break
    all_clocks[:, here], all_ends[:, here] = clocks, ends
    return all_clocks, all_ends


def _executed(part: _Part, clocks: Floats, carried: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Clocks of the ranks afterwards, and ends of the part's actions in their order."""
    first = len(clocks) + 1 + len(carried)
    table = np.empty((first + len(part.places), times.shape[1]))
    table[: len(clocks)], table[len(clocks)] = clocks, -math.inf
    table[len(clocks) + 1 : first] = carried
    table[first:] = times[part.places]
    for start, stop, previous, awaited in part.levels:
        begin = table.take(previous, axis=0)
        np.maximum(begin, table.take(awaited, axis=0), out=begin)
        table[start:stop] += begin
    return table[part.clocks], table[part.rows]


@lru_cache(maxsize=512)
def _program(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> _Program:
    steps = steps_of(name, num_ranks, num_microbatches, chunks)
    before, size = _part(steps.before, num_ranks, 0), len(steps.round)
    if not steps.rounds:
        return _Program(before, None, None, 0, len(steps.before))
    repeated, after = _part(steps.round, num_ranks, size), _part(steps.after, num_ranks, size)
    return _Program(before, repeated, after, size, max(len(steps.before), size, len(steps.after)))


def _part(steps: Sequence[Step], num_ranks: int, carried: int) -> _Part:
    """``steps`` as levels. ``carried``: number of earlier ends in its table."""
    first = num_ranks + 1 + carried
    last: list[int | None] = [None] * num_ranks
    level: list[int] = []
    before: list[int] = []
    for at, (rank, back, _) in enumerate(steps):
        previous = last[rank]
        depth = 0 if previous is None else level[previous] + 1
        awaited = at + back
        if back and awaited >= 0 and level[awaited] >= depth:
            depth = level[awaited] + 1
        level.append(depth)
        before.append(-1 if previous is None else previous)
        last[rank] = at
    levels = np.array(level, dtype=np.int64)
    order = np.argsort(levels, kind="stable")
    rows = np.empty(len(steps), dtype=np.int64)
    rows[order] = first + np.arange(len(steps))
    ranks, backs, places = np.array(steps, dtype=np.int64).reshape(-1, 3).T
    befores, awaiteds = np.array(before, dtype=np.int64), np.arange(len(steps)) + backs
    previous_rows = np.where(befores >= 0, rows[befores], ranks) if len(steps) else befores
    awaited_rows = np.where(awaiteds >= 0, rows[np.maximum(awaiteds, 0)], first + awaiteds) if len(steps) else awaiteds
    awaited_rows = np.where(backs == 0, num_ranks, awaited_rows)[order]
    previous_rows = previous_rows[order]
    bounds = [0, *(np.flatnonzero(np.diff(levels[order])) + 1).tolist(), len(steps)]
    return _Part(
        tuple(
            _Level(first + start, first + stop, previous_rows[start:stop], awaited_rows[start:stop])
            for start, stop in pairwise(bounds)
            if stop > start
        ),
        places[order],
        rows,
        np.array([rank if at is None else rows[at] for rank, at in enumerate(last)], dtype=np.int64),
    )
