"""Duration of a pipeline whose chunks have given times, by executing its action lists without a device.

Idle share of the whole time of p equal ranks, if F, I and W take equally long (so that a backward takes twice as long
as a forward) and sending takes no time; schedules with several chunks have two per rank. For gpipe and 1f1b this is
(p-1) / (m+p-1), the bubble of Megatron-LM (arXiv:2104.04473, section 2.2) relative to the whole time:

    schedule                      p 2, m 8   p 2, m 32    p 4, m 8   p 4, m 32
    gpipe                           11.1 %       3.0 %      27.3 %       8.6 %
    1f1b                            11.1 %       3.0 %      27.3 %       8.6 %
    interleaved_1f1b                 5.9 %       1.5 %      15.8 %       4.5 %
    interleaved_zero_bubble          2.0 %       0.5 %       5.9 %       1.5 %
    zero_bubble_v                    2.0 %       0.5 %       5.9 %       1.5 %
    dualpipe_v                       2.0 %       0.5 %       5.9 %       1.5 %
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from workloads.costs.shape.schedule import Action
from workloads.costs.time.execution import ALIKE, executed_s, execution_order, place_in, steps_of
from workloads.costs.time.lockstep import executed_together_s

Floats = np.ndarray[Any, np.dtype[np.float64]]
Times = Sequence[float] | Sequence[Sequence[float]]
"""Seconds of one micro-batch by rank: either one number for all chunks of a rank, of which each takes an equal part, or
one number per chunk."""

MOST_EXECUTED = 64
"""Micro-batches that are executed one by one for a total, in a pipeline of 16 to 32 ranks."""

_FEW_TOGETHER = 48
"""Ranks, summed over layouts, below which executing one layout after another is fastest."""

_FEW_ACTIONS = 64
"""Pairs of a forward and a backward up to which executing them is fastest."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank on the timeline."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    total_s: float
    """Seconds from the start of the first action to the end of the last, on any rank."""
    idle_s: tuple[float, ...]
    """Idle seconds by rank: ``total_s`` minus the time in the rank's actions."""
    spans: tuple[Span, ...]
    """Every action, rank by rank in the order of its list."""

    @property
    def idle_share(self) -> float:
        """Idle time of all ranks divided by their total time."""
        return sum(self.idle_s) / (len(self.idle_s) * self.total_s)


def simulate(
    schedule: Sequence[Sequence[Action]],
    forward_s: Times,
    backward_s: Times,
    p2p_s: float = 0.0,
    *,
    name: str = "1f1b",
    input_s: Times | None = None,
    weight_s: Times | None = None,
) -> Simulation:
    """Execute the action list of every rank (`schedule_actions`) with constant times, all in seconds.

    A rank runs its list in order. A forward waits for the same micro-batch's forward of the previous stage, a B or I
    for the B or I of the next stage, each plus ``p2p_s`` if that stage is on another rank; sending takes no time of the
    sender. ``name``: the schedule, which determines where stages are (`stage_at`). ``input_s`` and ``weight_s``: times
    of I and W; by default each is half of ``backward_s``. Raises ValueError for lists that deadlock.
    """
    chunks = 1 + max((action.chunk for actions in schedule for action in actions), default=0)
    times = _durations(chunks, forward_s, backward_s, input_s, weight_s)
    clock = [0.0] * len(schedule)
    busy = [0.0] * len(schedule)
    spans: list[list[Span]] = [[] for _ in schedule]
    ends = [-math.inf]
    for rank, action, awaited in execution_order(schedule, name, chunks):
        start = max(clock[rank], ends[awaited] + p2p_s)
        length = times[place_in(action, rank, len(schedule), chunks)]
        clock[rank] = end = start + length
        busy[rank] += length
        ends.append(end)
        spans[rank].append(Span(rank, action, start, end))
    total = max(clock)
    return Simulation(
        total_s=total,
        idle_s=tuple(total - seconds for seconds in busy),
        spans=tuple(span for rank_spans in spans for span in rank_spans),
    )


def pipeline_time_s(
    name: str,
    forward_s: Times,
    backward_s: Times,
    num_microbatches: int,
    p2p_s: float = 0.0,
    virtual_stages: int = 1,
    *,
    input_s: Times | None = None,
    weight_s: Times | None = None,
) -> float:
    """Seconds of a whole schedule: ``total_s`` of `simulate`, with the same arguments.

    Symbols: F and B seconds of a rank's forward and backward, p ranks, m micro-batches.

    gpipe   ``sum F + (m-1) max F + sum B + (m-1) max B + 2 (p-1) p2p``: two flow shops, exact. With equal ranks this is
            ``(m + p - 1) (F + B)`` (arXiv:2104.04473, section 2.2).
    1f1b    Exact: `_longest_chain_s`, where that is faster than executing the actions.
    others  Exact up to 64 micro-batches, in shallow pipelines up to 1,024 / p: the order of actions is computed once
            for a schedule and its sizes; each action then costs one sum and one comparison. With more micro-batches,
            every further round of p takes as long as the last one executed: within 2 %, on average 0.1 %, in a test of
            unequal ranks that wait for messages, too; equal ranks are exact.
    """
    p, m = len(forward_s), num_microbatches
    times = _durations(virtual_stages, forward_s, backward_s, input_s, weight_s)
    if name in ("1f1b", "none"):
        return _one_f_one_b_s(tuple(times[:p]), tuple(times[p : 2 * p]), m, p2p_s)
    if name == "gpipe":
        forward, backward = times[:p], times[p : 2 * p]
        ramps = sum(forward) + sum(backward) + 2 * (p - 1) * p2p_s
        return ramps + (m - 1) * (max(forward) + max(backward))
    executed, left_out = _executed_of(p, m)
    total = executed_s(steps_of(name, p, executed, virtual_stages), times, p, p2p_s)
    if left_out:
        before = executed_s(steps_of(name, p, executed - p, virtual_stages), times, p, p2p_s)
        total += left_out * (total - before)
    return total


def pipeline_times_s(name: str, times: Floats, num_ranks: int, num_microbatches: int, virtual_stages: int) -> Floats:
    """`pipeline_time_s` of many layouts with the same actions, without messages. ``times``: seconds of shape (actions,
    layouts), the rows by kind of action (`KINDS`), rank and chunk as in `_durations`."""
    p, m, v = num_ranks, num_microbatches, virtual_stages
    if name in ("1f1b", "none"):
        columns = times[: 2 * p].T.tolist()
        return np.array([_one_f_one_b_s(tuple(column[:p]), tuple(column[p:]), m, 0.0) for column in columns])
    if name == "gpipe":
        forward, backward = times[:p], times[p : 2 * p]
        total: Floats = forward.sum(axis=0) + backward.sum(axis=0)
        total += (m - 1) * (forward.max(axis=0) + backward.max(axis=0))
        return total
    executed, left_out = _executed_of(p, m)
    if times.shape[1] * p < _FEW_TOGETHER:
        totals = [executed_s(steps_of(name, p, executed, v), column, p, 0.0) for column in times.T.tolist()]
        total = np.array(totals)
        if left_out:
            before = [executed_s(steps_of(name, p, executed - p, v), column, p, 0.0) for column in times.T.tolist()]
            total += left_out * (total - np.array(before))
        return total
    total = executed_together_s(name, p, executed, v, times)
    if left_out:
        total += left_out * (total - executed_together_s(name, p, executed - p, v, times))
    return total


def _executed_of(p: int, m: int) -> tuple[int, int]:
    """(number of micro-batches to execute, number of further rounds of p)."""
    left_out = max(0, -(-(m - max(MOST_EXECUTED, 2 * p, 16 * MOST_EXECUTED // p)) // p))
    return m - left_out * p, left_out


@lru_cache(maxsize=4096)
def _one_f_one_b_s(forward: tuple[float, ...], backward: tuple[float, ...], m: int, p2p_s: float) -> float:
    """Seconds of 1F1B. Cached, because many layouts of a plan agree in all arguments."""
    p = len(forward)
    if p * m > _FEW_ACTIONS:
        return _longest_chain_s(forward, backward, m, p2p_s)
    return executed_s(steps_of("1f1b", p, m, 1), (*forward, *backward), p, p2p_s)


def _longest_chain_s(forward: Sequence[float], backward: Sequence[float], m: int, p2p_s: float) -> float:
    """Seconds of 1F1B with these stage times: the longest chain of actions that wait for each other.

    q counts ranks from the last one on. After its first q forwards rank q runs, in its round k from 0 on, the forward
    of micro-batch k + q, which waits for that of rank q + 1 in round k - 1, and then the backward of k, which waits for
    that of rank q - 1 in the same round. So a chain has three parts:

    1. forwards alone up to a round 0, a flow shop: ``sum F + q max F + hops`` over the ranks before rank q and itself;
    2. rounds with both. A chain that passes on to the next rank comes back later: each of a rank's rounds in it counts
       ``F + B``, and each passing ``2 p2p``. Times exclude what the chain's last way back would add too much;
    3. backwards alone, from the round of the last forward on: as 1.

    Maxima of sums commute with a shift of all times: once a round equals an earlier one except for a shift, so does
    everything that follows, and the rounds between the two repeat.
    """
    p, n = len(forward), min(len(forward), m)
    down, up = _ramps(forward, p2p_s), _ramps(backward, p2p_s)
    both = [forward[p - 1 - q] + backward[p - 1 - q] for q in range(n)]
    back = [0.0, *accumulate(backward[p - 1 - q] + p2p_s for q in range(n))]
    """Seconds from the last rank's backward to that of rank q, by q."""
    now = [down[q] - back[q] for q in range(n)]
    rounds, hop, looks = [now], 2 * p2p_s, max(1, p // 4)
    for k in range(1, m - n + 1):
        passed = [*now[1:], -math.inf]
        best = list(accumulate(now, max))
        now = [w + (a if a > b + hop else b + hop) for w, a, b in zip(both, best, passed, strict=True)]
        rounds.append(now)
        if (k == 2 or k % looks == 0) and (repetition := _repetition(rounds)):
            lag, later = repetition
            repeated = [list(accumulate(one, max)) for one in rounds[-lag:]]
            ends_s = []
            for q in range(n):
                times, turn = divmod(m - 1 - q - (k + 1 - lag), lag)  # of the round of rank q's last forward
                ends_s.append(repeated[turn][q] + times * later + back[q] + up[q])
            return max(ends_s)
    total = 0.0
    for q in reversed(range(n)):  # one rank after another, from the first on, has no forward left
        best = list(accumulate(now, max))
        total = max(total, best[q] + back[q] + up[q])
        now = [w + (a if a > b + hop else b + hop) for w, a, b in zip(both, best, now[1:], strict=False)]
    return total


def _ramps(times: Sequence[float], p2p_s: float) -> list[float]:
    """Seconds from the first rank's first action to the end of rank q's action q, by q: a flow shop of equal jobs."""
    ends, together, most = [], 0.0, 0.0
    for rank, one in enumerate(times):
        together += one
        most = max(most, one)
        ends.append(together + rank * p2p_s + (len(times) - 1 - rank) * most)
    return ends[::-1]


def _repetition(rounds: list[list[float]]) -> tuple[int, float] | None:
    """(lag, shift): number of rounds, at most p, since all times were as now except for a shift in seconds, or None.

    Shifts count as equal within a relative difference of `ALIKE`. The total then differs by no more, because neither
    sums nor maxima enlarge a difference.
    """
    now = rounds[-1]
    for lag in range(1, min(len(now), len(rounds) - 1) + 1):
        before = rounds[-1 - lag]
        later = now[0] - before[0]
        least, most = (1 - ALIKE) * later, (1 + ALIKE) * later
        if least <= now[-1] - before[-1] <= most and all(
            least <= a - b <= most for a, b in zip(now, before, strict=True)
        ):
            return lag, later
    return None


def _durations(
    chunks: int, forward_s: Times, backward_s: Times, input_s: Times | None, weight_s: Times | None
) -> list[float]:
    """Seconds by kind, rank and chunk, in the order of `KINDS`."""
    forward, backward = _by_chunk(forward_s, chunks), _by_chunk(backward_s, chunks)
    half = [0.5 * seconds for seconds in backward]
    return [
        *(*forward, *backward),
        *(half if input_s is None else _by_chunk(input_s, chunks)),
        *(half if weight_s is None else _by_chunk(weight_s, chunks)),
    ]


def _by_chunk(times: Times, chunks: int) -> list[float]:
    durations: list[float] = []
    for of_rank in times:
        if isinstance(of_rank, (int, float)):
            durations += [of_rank / chunks] * chunks
        else:
            durations += of_rank
    return durations
