"""The same action lists executed at the times of many layouts at once: what `execution.executed_s` does for one.

Actions that wait for none of each other are one *level*: of all of them, and of all layouts, starts are one comparison
of arrays and ends one sum. Sums and comparisons are those of `executed_s`, so that ends are the same to the last bit.
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
"""Ends of actions that are held at one time."""


class _Level(NamedTuple):
    """Rows of a part's table (`_Part`)."""

    start: int
    stop: int
    """Ends of these actions, from ``start`` to before ``stop``."""
    own: Ints
    """Of each the end of what its rank did before it."""
    awaited: Ints
    """Of each the end of what it waits for."""


class _Part(NamedTuple):
    """Steps as levels. The rows of its table are the clock of every rank before it, one that never is, ends of actions
    before it in their order, and ends of its own actions by level."""

    levels: tuple[_Level, ...]
    places: Ints
    """Of the actions, by level, where their times are."""
    rows: Ints
    """Of the actions, in their order."""
    clocks: Ints
    """Rows with the clocks of all ranks after it."""


class _Program(NamedTuple):
    before: _Part
    round: _Part | None
    after: _Part | None
    size: int
    """Actions of a round."""
    actions: int
    """Of the largest part."""


def executed_together_s(name: str, num_ranks: int, num_microbatches: int, chunks: int, times: Floats) -> Floats:
    """Totals of `executed_s` of a schedule, messages apart. ``times`` has the shape (kind, rank and chunk; layouts)."""
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
    found: Floats = clocks.max(axis=0)
    return found


def _rounds(part: _Part, rounds: int, clocks: Floats, ends: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Clocks and ends after so many rounds. Layouts whose last round was the one before it but for one shift leave."""
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
    for start, stop, own, awaited in part.levels:
        begin = table.take(own, axis=0)
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
    """``carried``: how many ends before it its table has."""
    first = num_ranks + 1 + carried
    last: list[int | None] = [None] * num_ranks
    level: list[int] = []
    before: list[int] = []
    for at, (rank, back, _) in enumerate(steps):
        own = last[rank]
        mine = 0 if own is None else level[own] + 1
        awaited = at + back
        if back and awaited >= 0 and level[awaited] >= mine:
            mine = level[awaited] + 1
        level.append(mine)
        before.append(-1 if own is None else own)
        last[rank] = at
    levels = np.array(level, dtype=np.int64)
    order = np.argsort(levels, kind="stable")
    rows = np.empty(len(steps), dtype=np.int64)
    rows[order] = first + np.arange(len(steps))
    ranks, backs, places = np.array(steps, dtype=np.int64).reshape(-1, 3).T
    befores, awaiteds = np.array(before, dtype=np.int64), np.arange(len(steps)) + backs
    own_rows = np.where(befores >= 0, rows[befores], ranks) if len(steps) else befores
    awaited_rows = np.where(awaiteds >= 0, rows[np.maximum(awaiteds, 0)], first + awaiteds) if len(steps) else awaiteds
    awaited_rows = np.where(backs == 0, num_ranks, awaited_rows)[order]
    own_rows = own_rows[order]
    bounds = [0, *(np.flatnonzero(np.diff(levels[order])) + 1).tolist(), len(steps)]
    return _Part(
        tuple(
            _Level(first + start, first + stop, own_rows[start:stop], awaited_rows[start:stop])
            for start, stop in pairwise(bounds)
            if stop > start
        ),
        places[order],
        rows,
        np.array([rank if own is None else rows[own] for rank, own in enumerate(last)], dtype=np.int64),
    )
