"""`RankGroup`: the interface to one attempt's rank processes; `LocalRanks`: its implementation on one node.

A pilot never forks ranks itself. An agent on each node does so, with `LocalRanks` (see `launchers.node.agent`). The
pilot sees the ranks of all its nodes as one `RankGroup` (see `launchers.node.remote`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launchers.node import fork, log_cap
from launchers.node.fork import RankExit, RunRank
from launchers.node.host_memory import oom_kills
from launchers.node.log_cap import CappedLog
from results.errors import UltrasweepError
from workloads.contract import protocol
from workloads.contract.beats import Heartbeat, HeartbeatSlot

KILL_LIMIT_S = 15.0
"""Seconds that killed processes may take to end before they count as survivors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """Processes left after all ranks have been killed, and kills by the kernel."""

    survivors: tuple[str, ...] = ()
    """Pids that did not end, as text for people. Their machine must not be used further."""
    host_oom_kills: int = 0
    """Processes in the ranks' control groups that the kernel killed during the attempt because host memory ran out."""


class StartFailed(UltrasweepError):
    """A rank could not be started; the other ranks have been killed again, except ``survivors``."""

    def __init__(self, message: str, rank: int, survivors: tuple[str, ...] = (), node_lost: bool = False) -> None:
        """``node_lost``: whether the reason is that its node was lost."""
        super().__init__(message)
        self.rank = rank
        self.survivors = survivors
        self.node_lost = node_lost


class RankGroup(Protocol):
    """The running ranks of one attempt."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def exits(self) -> Mapping[int, RankExit]:
        """Exits of the ranks that have ended so far, by rank."""

    def lost(self) -> Mapping[int, str]:
        """Ranks whose node no longer answers, with the evidence for that."""

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        """The latest known heartbeat of every rank that has sent one; for a rank in `exits`, its last."""

    def request_stacks(self, ranks: Iterable[int]) -> None:
        """Have these ranks write their Python stacks into their logs, and their pending collectives into files in the
        same folder."""

    def end(self) -> Termination:
        """Kill and reap all ranks that still run, with all processes that they started."""


class LocalRanks:
    """Ranks that are children of this process."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._exits: dict[int, RankExit] = {}
        self._slots: dict[int, HeartbeatSlot] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._killed: set[int] = set()
        self._oom_kills = oom_kills()
        self._logs: dict[int, CappedLog] = {}
        self._next_look = 0.0

    def fork(self, folder: Path, rank: int, local_rank: int, environment: Mapping[str, str], run_rank: RunRank) -> None:
        """Start one rank. Raises `OSError` when the system has no memory or number for another process."""
        slot = HeartbeatSlot()
        pid = self._pids[rank] = fork.fork_rank(folder, rank, local_rank, environment, run_rank, slot.writer(rank))
        self._slots[rank] = slot
        self._logs[rank] = CappedLog(protocol.log_path(folder, rank), pid)

    @property
    def running(self) -> bool:
        """Whether any rank has not been reaped yet."""
        return len(self._exits) < len(self._pids)

    def poll(self) -> list[RankExit]:
        """Reap ranks that have ended since the last call and return their exits."""
        fresh = []
        for rank, pid in self._pids.items():
            if rank not in self._exits and (exit_ := fork.poll_exit(rank, pid, rank in self._killed)) is not None:
                self._exits[rank] = exit_
                fresh.append(exit_)
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + log_cap.EVERY_S
            for rank in self._pids.keys() - self._exits.keys():
                self._logs[rank].trim()
        return fresh

    def new_beats(self) -> list[Heartbeat]:
        """The heartbeats that have changed since the last call."""
        fresh = []
        for rank, slot in self._slots.items():
            beat = slot.read()
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank] = beat
                fresh.append(beat)
        return fresh

    def request_stacks(self, ranks: Iterable[int]) -> None:
        """See `RankGroup.request_stacks`."""
        for rank in ranks:
            if rank in self._pids and rank not in self._exits:
                for number in (protocol.FLIGHT_SIGNAL, protocol.STACKS_SIGNAL):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._pids[rank], number)

    def end(self) -> tuple[list[RankExit], list[int]]:
        """Kill and reap all ranks. Returns the exits noticed meanwhile, and the pids that did not end."""
        fresh = self.poll()
        for rank, pid in self._pids.items():
            if rank not in self._exits:
                self._killed.add(rank)
                fork.kill_rank(pid)
        groups = list(self._pids.values())
        until = time.monotonic() + KILL_LIMIT_S
        while time.monotonic() < until:
            fresh += self.poll()
            if not self.running and not fork.living_processes(groups):
                break
            time.sleep(0.002)
        strays = fork.kill_orphans(max(0.1, until - time.monotonic())) if not self.running else []
        log_cap.cut_all(self._logs.values())
        unreaped = [pid for rank, pid in self._pids.items() if rank not in self._exits]
        return fresh, list(dict.fromkeys([*unreaped, *fork.living_processes(groups), *strays]))

    def host_oom_kills(self) -> int:
        """Kills by the kernel's out-of-memory killer in this control group since this object was made."""
        return max(0, oom_kills() - self._oom_kills)
