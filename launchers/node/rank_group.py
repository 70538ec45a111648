"""The processes of one attempt: what the watchdog needs of them wherever they run, and those of this machine.

A pilot never forks ranks itself. An agent on each node does, with `LocalRanks` (see `launchers.node.agent`); the
pilot sees the ranks of all its nodes as one `RankGroup`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launchers.node import fork
from launchers.node.fork import RankExit, RunRank
from results.errors import UltrasweepError
from workloads import protocol

KILL_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """What was found when the last rank had been ended."""

    survivors: tuple[str, ...] = ()
    """Processes that could not be ended, for people; their machine must not be used further."""
    host_oom_kills: int = 0
    """Processes of the ranks' control groups that the kernel killed for want of host memory meanwhile."""


class StartFailed(UltrasweepError):
    """A rank could not be started; the others have been ended again, but for ``survivors``."""

    def __init__(self, message: str, rank: int, survivors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.survivors = survivors


class RankGroup(Protocol):
    """The running ranks of one attempt."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def exits(self) -> Mapping[int, RankExit]:
        """Every exit noticed so far."""

    def lost(self) -> Mapping[int, str]:
        """Ranks whose node no longer answers, and why that is thought."""

    def request_stacks(self, ranks: Iterable[int]) -> None:
        """Have these ranks write down where they are: Python stacks in their logs, collectives beside them."""

    def end(self) -> Termination:
        """Kill what still runs, reap it, and prove that nothing is left."""


class LocalRanks:
    """Ranks that are children of this process."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._exits: dict[int, RankExit] = {}
        self._killed: set[int] = set()
        self._oom_kills = _host_oom_kills()

    def fork(self, folder: Path, rank: int, local_rank: int, environment: Mapping[str, str], run_rank: RunRank) -> None:
        """Raises `OSError` when the system has no room for another process."""
        self._pids[rank] = fork.fork_rank(folder, rank, local_rank, environment, run_rank)

    @property
    def running(self) -> bool:
        return len(self._exits) < len(self._pids)

    def poll(self) -> list[RankExit]:
        """Exits that had not been noticed before."""
        fresh = []
        for rank, pid in self._pids.items():
            if rank not in self._exits and (exit_ := fork.poll_exit(rank, pid, rank in self._killed)) is not None:
                self._exits[rank] = exit_
                fresh.append(exit_)
        return fresh

    def request_stacks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._pids and rank not in self._exits:
                for number in (protocol.FLIGHT_SIGNAL, protocol.STACKS_SIGNAL):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._pids[rank], number)

    def end(self) -> tuple[list[RankExit], list[int]]:
        """Kill, reap and prove; the exits noticed while doing so, and the pids that would not go."""
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
        unreaped = [pid for rank, pid in self._pids.items() if rank not in self._exits]
        return fresh, list(dict.fromkeys([*unreaped, *fork.living_processes(groups), *strays]))

    def host_oom_kills(self) -> int:
        """Since these ranks were made."""
        return max(0, _host_oom_kills() - self._oom_kills)


def _host_oom_kills() -> int:
    """Times that the kernel's out-of-memory killer struck in this process's control group (version 2); 0 where the
    kernel does not say."""
    try:
        group = next(
            line.split("::", 1)[1].strip()
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        events = Path("/sys/fs/cgroup" + group) / "memory.events"
        fields = dict(line.split() for line in events.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, StopIteration, KeyError, ValueError):
        return 0
