"""What a pilot tells the world: one file that only it writes, and from which others judge whether it lives.

A pilot counts up in its state file. Others do not compare clocks (a node's may be an hour off): they watch whether the
count moves. On the pilot's own machine the kernel answers at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launchers.state.process_identity import ProcessIdentity, provably_dead
from launchers.state.sweep_dir import SweepDir
from workloads.protocol import write_json

Activity = Literal["starting", "running", "waiting", "stopping", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The attempt that a pilot is busy with."""

    stem: str
    attempt_id: str
    experiment_id: str
    world_size: int
    started_at: float
    deadline_s: float
    nodes: tuple[str, ...] = ()
    """Where its ranks run."""
    phase: str = "spawn"
    """Phase of the rank that is furthest behind."""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotState:
    pilot_id: str
    identity: ProcessIdentity
    count: int
    time: float
    started_at: float
    activity: Activity
    message: str = ""
    """What keeps it from going on, for people."""
    running: tuple[Running, ...] = ()
    """Several when smaller points run side by side on the nodes of one allocation."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """Attempts of this pilot by outcome."""
    job: str | None = None
    """Slurm's id of the allocation as ``squeue`` prints it (``1234_5`` in an array); None without Slurm."""
    nodes: tuple[str, ...] = ()
    """Nodes of the allocation; the first is where the pilot itself runs."""


def config_path(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.pilots / f"{pilot_id}.json"


def state_path(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.pilots / f"{pilot_id}.state.json"


def log_path(sweep: SweepDir, pilot_id: str) -> Path:
    return sweep.pilots / f"{pilot_id}.log"


def write_state(sweep: SweepDir, state: PilotState) -> None:
    write_json(state_path(sweep, state.pilot_id), state)


def read_state(sweep: SweepDir, pilot_id: str) -> PilotState | None:
    """None when the pilot never wrote one, or wrote something unreadable."""
    try:
        data: dict[str, Any] = json.loads(state_path(sweep, pilot_id).read_text())
        data["identity"] = ProcessIdentity(**data["identity"])
        data["running"] = tuple(Running(**{**one, "nodes": tuple(one["nodes"])}) for one in data["running"])
        data["nodes"] = tuple(data["nodes"])
        return PilotState(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def all_states(sweep: SweepDir) -> list[PilotState]:
    suffix = ".state.json"
    names = sorted(path.name for path in sweep.pilots.glob(f"*{suffix}") if not path.name.startswith("."))
    states = (read_state(sweep, name.removesuffix(suffix)) for name in names)
    return [state for state in states if state is not None]


class Liveness:
    """Tells dead pilots from living ones by watching their counts over this process's own clock."""

    def __init__(self, sweep: SweepDir, lease_s: float) -> None:
        self._sweep = sweep
        self._lease_s = lease_s
        self._seen: dict[str, tuple[int | None, float]] = {}
        """Each pilot's last count, and when it was first seen."""
        self._looked: dict[str, float] = {}

    def judge(self, pilot_id: str) -> Literal["alive", "dead", "unknown"]:
        """``unknown`` until a count has moved or has stood still for a whole lease."""
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
            # It moved some time since the last look; only a recent look says that it moves still.
            return "alive" if now - looked <= self._lease_s else "unknown"
        return "dead" if now - since > self._lease_s else "unknown"

    def stalled(self, pilot_id: str) -> bool:
        """Whether it is dead only by its count, which has stood still for a lease: its process may be there."""
        state = read_state(self._sweep, pilot_id)
        gone = state is None or state.activity == "ended" or provably_dead(state.identity)
        return not gone and self.judge(pilot_id) == "dead"
