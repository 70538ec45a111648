"""Where a sweep stands, from its files alone: on any machine, on any later day, with pilots running or not."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from launchers import pilotstate, queue
from launchers.identity import provably_dead
from launchers.pilotstate import PilotState
from launchers.queue import AttemptRecord
from launchers.sweepdir import SweepDir, entry_names, key_of, split_name
from results.errors import InvalidResults
from results.schema import OUTCOMES

RECENT = 20
"""Attempts that the expected end is computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """Counts are of points unless they say otherwise."""

    name: str
    total: int
    todo: int
    claimed: int
    done: Mapping[str, int]
    """Finished points by the outcome of their last attempt."""
    pilots: tuple[PilotState, ...]
    """Pilots that have not ended and are not known to be dead."""
    attempts: tuple[AttemptRecord, ...]
    """Every recorded attempt, oldest first."""
    device_hours: float
    """Devices times time of all recorded attempts."""
    expected_left_s: float | None
    """Until the last point is done, at the pace of the last attempts; None before the first."""

    @property
    def finished(self) -> int:
        return sum(self.done.values())

    @property
    def left(self) -> int:
        return self.todo + self.claimed

    def failures(self) -> list[AttemptRecord]:
        """The last attempt of every kind of failure, newest first."""
        newest = {record.outcome: record for record in self.attempts if record.outcome != "ok"}
        return sorted(newest.values(), key=lambda record: -record.ended_at)


@dataclass(slots=True)
class StatusReader:
    """Reads a sweep's status again and again; attempt records, which never change, only once."""

    sweep: SweepDir
    _records: dict[str, AttemptRecord] = field(default_factory=dict)

    def read(self) -> SweepStatus:
        sweep = self.sweep
        # In the direction in which points move, so that none is missed on its way from one folder to the next.
        todo = {key_of(name) for name in entry_names(sweep.todo)}
        claimed = {key_of(name) for name in entry_names(sweep.claimed)} - todo
        done = {key_of(name): split_name(name)[1] for name in entry_names(sweep.done)}
        claimed -= set(done)
        todo -= set(done)
        for name in entry_names(sweep.history):
            if name not in self._records and (records := queue.read_records(sweep, [name])):
                self._records[name] = records[0]
        attempts = tuple(sorted(self._records.values(), key=lambda record: record.ended_at))
        pilots = tuple(state for state in pilotstate.all_states(sweep) if _may_live(state))
        return SweepStatus(
            name=sweep.name,
            total=len(todo) + len(claimed) + len(done),
            todo=len(todo),
            claimed=len(claimed),
            done=dict(Counter(done.values())),
            pilots=pilots,
            attempts=attempts,
            device_hours=sum(record.duration_s * record.world_size for record in attempts) / 3600,
            expected_left_s=_expected_left_s(attempts, len(todo), pilots),
        )


def sweep_status(sweep: SweepDir) -> SweepStatus:
    """The status now."""
    return StatusReader(sweep).read()


def retry(sweep: SweepDir, which: Collection[str]) -> int:
    """Put finished points back into the queue; how many those were.

    ``which`` holds outcomes (``hang``, ``crash`` ...), experiment ids or both. Raises `InvalidResults` for a word that
    is neither an outcome nor the id of a point of this sweep.
    """
    done = entry_names(sweep.done)
    ids = {key_of(name) for folder in (sweep.todo, sweep.claimed, sweep.done) for name in entry_names(folder)}
    if unknown := set(which) - set(OUTCOMES) - ids:
        raise InvalidResults(
            f"{', '.join(sorted(unknown))}: neither a point of {sweep.path} nor an outcome ({', '.join(OUTCOMES)})"
        )
    wanted = [name for name in done if split_name(name)[1] in which or key_of(name) in which]
    return sum(queue.put_back(sweep, name) for name in wanted)


def _may_live(state: PilotState) -> bool:
    return state.activity != "ended" and not provably_dead(state.identity)


def _expected_left_s(attempts: tuple[AttemptRecord, ...], todo: int, pilots: tuple[PilotState, ...]) -> float | None:
    """Mean time of the last attempts, gaps included, for every waiting point, shared by the pilots."""
    recent = attempts[-RECENT:]
    if not recent:
        return None
    each_s = statistics.fmean(record.duration_s for record in recent)
    now = time.time()
    running = [max(0.0, each_s - (now - state.running.started_at)) for state in pilots if state.running is not None]
    return (todo * each_s + sum(running)) / max(1, len(pilots))
