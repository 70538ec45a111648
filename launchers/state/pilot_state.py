"""The state file of a pilot: its current activity, and a count from which others tell whether the pilot is alive.

Only the pilot itself writes the file, with a count that goes up each time. Clocks of two machines may differ by an
hour, so other processes do not compare times but watch whether the count still goes up. On the pilot's own machine the
kernel knows at once whether its process exists.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launchers.state.process_identity import ProcessIdentity, provably_dead
from launchers.state.sweep_dir import SweepDir
from workloads.contract.protocol import read_json, write_json
from workloads.contract.typed import typed

REQUEUE_REQUEST = ".requeue"
"""Suffix of the files of `requeue_request`."""
Activity = Literal["starting", "running", "waiting", "stopping", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One attempt that a pilot runs now. Times in seconds, ``started_at`` since the epoch."""

    stem: str
    attempt_id: str
    experiment_id: str
    world_size: int
    started_at: float
    deadline_s: float
    nodes: tuple[str, ...] = ()
    """Names of the nodes on which its ranks run."""
    phase: str = "spawn"
    """Phase of the rank that is furthest behind."""
    step: int | None = None
    part: str = ""
    """For a rehearsal: the stage that runs now, such as ``stage 1 of 2``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotState:
    """The last state that a pilot wrote. Times are seconds since the epoch."""

    pilot_id: str
    identity: ProcessIdentity
    count: int
    """Goes up with every write: the pilot's heartbeat."""
    time: float
    started_at: float
    activity: Activity
    message: str = ""
    """Readable reason why the pilot waits or has stopped."""
    running: tuple[Running, ...] = ()
    """Running attempts. Several when points that need fewer nodes run side by side."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Number of this pilot's ended attempts by outcome."""
    job: str | None = None
    """Slurm's id of the allocation in the form of ``squeue`` (``1234_5`` in an array); None without Slurm."""
    nodes: tuple[str, ...] = ()
    """Nodes of the allocation; the pilot itself runs on the first."""

    def elapsed_s(self, running: Running) -> float:
        """Seconds for which an attempt had run when the state was written, which happens every second. Both times are
        from the pilot's clock."""
        return max(0.0, self.time - running.started_at)


def config_path(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.pilots / f"{pilot_id}.json"


def state_path(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.pilots / f"{pilot_id}.state.json"


def log_path(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.pilots / f"{pilot_id}.log"


def requeue_request(sweep: SweepDir, pilot_id: str) -> Path:
    """An empty file by which a pilot that cannot call its batch system asks the job's script to requeue the job."""
    return sweep.pilots / f"{pilot_id}{REQUEUE_REQUEST}"


def has_states(sweep: SweepDir, prefix: str) -> bool:
    """Whether a pilot with an id of ``prefix``, a dot and a suffix has ever written its state."""
    return any(sweep.pilots.glob(f"{prefix}.*.state.json"))


def write_state(sweep: SweepDir, state: PilotState) -> None:
    write_json(state_path(sweep, state.pilot_id), state)


def read_state(sweep: SweepDir, pilot_id: str) -> PilotState | None:
    """The state of one pilot; None when it has not written one yet or the file cannot be read."""
    try:
        return typed(PilotState, read_json(state_path(sweep, pilot_id)))
    except (OSError, ValueError):
        return None


def all_states(sweep: SweepDir) -> list[PilotState]:
    """The states of all pilots that a sweep has had, sorted by id."""
    suffix = ".state.json"
    names = sorted(path.name for path in sweep.pilots.glob(f"*{suffix}") if not path.name.startswith("."))
    states = (read_state(sweep, name.removesuffix(suffix)) for name in names)
    return [state for state in states if state is not None]


class Liveness:
    """Distinguishes dead pilots from living ones: watches their counts and measures time by this process's own
    clock."""

    def __init__(self, sweep: SweepDir, lease_s: float) -> None:
        """``lease_s``: seconds without a new count after which a pilot counts as dead."""
        self._sweep = sweep
        self._lease_s = lease_s
        self._seen: dict[str, tuple[int | None, float]] = {}
        """Last count of each pilot, and when that count was first seen."""
        self._looked: dict[str, float] = {}

    def judge(self, pilot_id: str) -> Literal["alive", "dead", "unknown"]:
        """Whether the pilot is alive. ``unknown`` until its count has gone up, or has stalled for a whole lease."""
        state = read_state(self._sweep, pilot_id)
        if state is not None and (state.activity == "ended" or provably_dead(state.identity)):
            return "dead"
        count = state.count if state is not None else None
        now = time.monotonic()
        if pilot_id not in self._seen:
            self._seen[pilot_id] = (count, now)
            self._looked[pilot_id] = now
            return "unknown"
        (last_count, since), looked = self._seen[pilot_id], self._looked[pilot_id]
        self._looked[pilot_id] = now
        if count != last_count:
            self._seen[pilot_id] = (count, now)
            # The count went up at some time since the last check. Only if that check was recent is the pilot alive now.
            return "alive" if now - looked <= self._lease_s else "unknown"
        return "dead" if now - since > self._lease_s else "unknown"

    def stalled(self, pilot_id: str) -> bool:
        """Whether the pilot counts as dead only because its count has stalled: its process may still run."""
        state = read_state(self._sweep, pilot_id)
        gone = state is None or state.activity == "ended" or provably_dead(state.identity)
        return not gone and self.judge(pilot_id) == "dead"
