"""Reads the status of a sweep from its files alone: on any machine, on any later day, with or without pilots."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launchers.state import pilot_state
from launchers.state.damaged import damaged_names
from launchers.state.history import AttemptRecord, HistoryReader, damage
from launchers.state.pilot_state import PilotState
from launchers.state.process_identity import provably_dead
from launchers.state.sweep_dir import SweepDir, entry_names, key_of, split_name
from launchers.status.work_left import Need, Pace, PointNeeds, ShapeStatus, by_shape, devices_of
from results.shared_filesystem.patience import patiently
from results.text.numbers import plural

_READ_LIMIT_S = 20.0
"""Seconds to wait for a filesystem on which the sweep's files cannot be read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """Status of one sweep. Counts are of points unless stated otherwise."""

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
    """Devices times hours of all recorded attempts."""
    expected_left_s: float | None
    """Expected seconds until the last point is done, on the nodes that the pilots hold now; None if unknown. Computed
    from the predictions, corrected by the measured points, or else from the duration of the last attempts."""
    shapes: tuple[ShapeStatus, ...] = ()
    damaged: tuple[str, ...] = ()
    """Files that no longer hold a point and were set aside (`launchers.state.damaged`). They count in ``total``: each
    was a point."""
    damaged_records: str = ""
    """One line about records of attempts that cannot be read; empty when there are none."""

    @property
    def finished(self) -> int:
        return sum(self.done.values())

    @property
    def left(self) -> int:
        return self.todo + self.claimed

    @property
    def damage(self) -> str:
        """One line about the points whose files are lost; empty when there are none."""
        if not self.damaged:
            return ""
        more = f" and {len(self.damaged) - 1} more" if len(self.damaged) > 1 else ""
        return (
            f"{plural(len(self.damaged), 'point')} cannot be read, neither from the queue nor from the ledger "
            f"(queue/broken/{self.damaged[0]}{more}); "
            "repeat the command that planned the sweep to queue missing points again"
        )

    def failures(self) -> list[AttemptRecord]:
        """For each kind of failure the newest point whose last attempt ended that way, newest first."""
        last = {(record.experiment_id, record.method): record for record in self.attempts}
        ended = sorted(last.values(), key=lambda record: record.ended_at)
        newest = {record.outcome: record for record in ended if record.outcome != "ok"}
        return sorted(newest.values(), key=lambda record: -record.ended_at)

    def slowest(self, count: int) -> list[AttemptRecord]:
        """The longest attempts, each point once; attempts that were cancelled or preempted are left out."""
        longest: dict[str, AttemptRecord] = {}
        completed = [record for record in self.attempts if record.outcome not in ("cancelled", "preempted")]
        for record in sorted(completed, key=lambda record: -record.duration_s):
            longest.setdefault(record.experiment_id, record)
        return list(longest.values())[:count]


@dataclass(slots=True)
class StatusReader:
    """Reads a sweep's status repeatedly. Records of attempts never change, so each is read only once."""

    sweep: SweepDir
    most_points: int = 0
    """Points that a run which adds points as it goes queues at most: `SweepStatus.total` is not below it."""
    _records: HistoryReader | None = None
    _needs: PointNeeds | None = None

    def read(self, jobs: Collection[str] | None = None, *, limit_s: float = _READ_LIMIT_S) -> SweepStatus:
        """Read the current status.

        ``jobs``: names of the jobs that the scheduler shows now (``1234_5``). A pilot of another job counts as gone.
        None: there is no scheduler, or it does not answer. Raises `OSError` when a filesystem keeps failing for
        ``limit_s`` seconds.
        """
        return patiently(lambda: self._read(jobs), limit_s=limit_s)

    def merge_records(self) -> None:
        """Copy the records into one file, if they have been read from many. An error of the file system costs only the
        time of later readers."""
        if self._records is not None:
            with contextlib.suppress(OSError):
                self._records.merge()

    def _read(self, jobs: Collection[str] | None) -> SweepStatus:
        sweep = self.sweep
        point_needs = self._needs = self._needs or PointNeeds(sweep)
        point_needs.refresh()
        # The folders are read in the order in which points move, so that no point is missed between two folders.
        todo, claimed, done = (
            {key_of(name): name for name in entry_names(folder)} for folder in (sweep.todo, sweep.claimed, sweep.done)
        )
        claimed = {key: name for key, name in claimed.items() if key not in todo and key not in done}
        todo = {key: name for key, name in todo.items() if key not in done}
        point_keys = {*todo, *claimed, *done}
        damaged = tuple(name for name in damaged_names(sweep) if key_of(name) not in point_keys)
        records = self._records = self._records or HistoryReader(sweep)
        records.refresh()
        attempts = tuple(sorted(records.all(), key=lambda record: record.ended_at))
        pilots = _living(pilot_state.all_states(sweep), jobs)
        needs = {
            folder: {name: point_needs.need(key, folder, name) for key, name in entries.items()}
            for folder, entries in ((sweep.todo, todo), (sweep.claimed, claimed), (sweep.done, done))
        }
        by_experiment = {
            key.partition("+")[0]: need
            for folder, entries in ((sweep.todo, todo), (sweep.claimed, claimed), (sweep.done, done))
            for key, name in entries.items()
            if (need := needs[folder][name]) is not None
        }
        pace = Pace.of(attempts, by_experiment)
        return SweepStatus(
            name=sweep.name,
            total=max(self.most_points, len(point_keys) + len(damaged)),
            todo=len(todo),
            claimed=len(claimed),
            done=dict(Counter(split_name(name)[1] for name in done.values())),
            pilots=pilots,
            attempts=attempts,
            device_hours=sum(record.duration_s * devices_of(record) for record in attempts) / 3600,
            expected_left_s=_left_s(point_needs, pace, needs[sweep.todo].values(), by_experiment, pilots),
            shapes=by_shape(point_needs, pace, needs, attempts),
            damaged=damaged,
            damaged_records=damage(records.damaged),
        )


def sweep_status(sweep: SweepDir, jobs: Collection[str] | None = None) -> SweepStatus:
    """The current status; ``jobs`` as in `StatusReader.read`."""
    return StatusReader(sweep).read(jobs)


def _living(states: Sequence[PilotState], jobs: Collection[str] | None) -> tuple[PilotState, ...]:
    """``states`` without pilots that have ended or are known to have gone: killed on this machine, without a job in the
    scheduler, or replaced by a new pilot of the same job."""
    newest: dict[str, PilotState] = {}
    for state in sorted(states, key=lambda state: state.started_at):
        newest[state.job or state.pilot_id] = state
    return tuple(
        state
        for state in newest.values()
        if state.activity != "ended"
        and not provably_dead(state.identity)
        and (jobs is None or state.job is None or state.job in jobs)
    )


def _left_s(
    point_needs: PointNeeds,
    pace: Pace,
    waiting: Iterable[Need | None],
    needs: Mapping[str, Need],
    pilots: Sequence[PilotState],
) -> float | None:
    """Node-seconds that the waiting and the running points still need, divided by the nodes that pilots hold. Without
    pilots: divided by the nodes of the widest waiting point."""
    work_s, widest = 0.0, 1
    for need in waiting:
        each_s = pace.time_s(need)
        if each_s is None:
            return None
        nodes = (point_needs.nodes(need.devices) if need is not None else None) or 1
        work_s, widest = work_s + each_s * nodes, max(widest, nodes)
    for pilot, running in ((one, running) for one in pilots for running in one.running):
        each_s = pace.time_s(needs.get(running.experiment_id))
        if each_s is None:
            return None
        work_s += max(0.0, each_s - pilot.elapsed_s(running)) * max(1, len(running.nodes))
    return work_s / (sum(max(1, len(pilot.nodes)) for pilot in pilots) or widest)
