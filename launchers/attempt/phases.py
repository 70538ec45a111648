"""Seconds of the phases of an attempt, from the times at which its ranks began them. Unknown stays None."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from launchers.attempt.attempt import Attempt
from workloads.contract.protocol import RankResult

_PHASES = ("spawn", "rendezvous", "build", "warmup", "step", "teardown")
_PHASE_COLUMNS = {
    "spawn": "spawn_s",
    "rendezvous": "rendezvous_s",
    "build": "build_s",
    "warmup": "warmup_s",
    "step": "timed_s",
}


def phase_columns(attempt: Attempt, results: Mapping[int, RankResult], ended_at: float) -> dict[str, Any]:
    """Seconds of each phase on its slowest rank, from the beginning of the phase to the beginning of the rank's next
    phase. The start and the end of the attempt are compared only with ranks of the same machine."""
    columns: dict[str, Any] = {}
    measured = attempt.task.method == "measured"
    started_results = [
        result  # a stage that was reused from another point took no time here
        for result in results.values()
        if measured or min(result.phase_started_at.values(), default=0.0) >= attempt.started_at
    ]
    for result in started_results:
        begun = [(phase, result.phase_started_at[phase]) for phase in _PHASES if phase in result.phase_started_at]
        spent = {phase: seconds_between(start, after) for (phase, start), (_, after) in itertools.pairwise(begun)}
        if begun and measured:  # rehearsed ranks start one after the other
            same_clock = _on_pilots_clock(attempt, result)
            spent["spawn"] = seconds_between(attempt.started_at, begun[0][1]) if same_clock else None
        for phase, seconds in spent.items():
            if seconds is not None and (column := _PHASE_COLUMNS.get(phase)) is not None:
                columns[column] = max(columns.get(column) or 0.0, seconds)
    with_pilots_clock = {result.rank: result for result in started_results if _on_pilots_clock(attempt, result)}
    if (last := last_step_end(with_pilots_clock)) is not None:
        columns["teardown_s"] = seconds_between(last, ended_at)
    return columns


def first_step_at(results: Mapping[int, RankResult]) -> float | None:
    """When the last rank began its first step, in seconds since the epoch."""
    starts = [
        [at for phase in ("warmup", "step") if (at := result.phase_started_at.get(phase)) is not None]
        for result in results.values()
    ]
    return max((min(begun) for begun in starts if begun), default=None)


def seconds_between(earlier: float, later: float) -> float | None:
    """Seconds from one time to a later one. None if the result would be negative: clocks of two machines disagree, or a
    clock was set back."""
    return later - earlier if later >= earlier else None


def last_step_end(results: Mapping[int, RankResult]) -> float | None:
    """When the last rank ended its last step, in seconds since the epoch."""
    ends = [result.phase_started_at.get("teardown") for result in results.values()]
    return max((end for end in ends if end is not None), default=None)


def _on_pilots_clock(attempt: Attempt, result: RankResult) -> bool:
    """Whether times of the rank and of the attempt are from the clock of one machine, as far as known."""
    return attempt.host is None or result.host is None or result.host == attempt.host
