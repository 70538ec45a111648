"""Forks single ranks, and kills and reaps them by pid together with all processes that they started. Linux only.

The parent (the agent of a node) has imported torch, has never touched CUDA and has one thread, so that a child is ready
in milliseconds. Every rank leads a session of its own, so that its children (compiler workers) can be killed with it. A
rank dies when its parent dies. When a rank ends, the kernel makes the parent (a subreaper) the parent of processes that
have left the rank's session, so that they cannot live on as orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launchers.state.process_identity import ProcessStat, alive, process_stat
from workloads.contract import protocol
from workloads.contract.beats import Beat

RunRank = Callable[[Path, int, int, Beat], NoReturn]
"""``workloads.worker.run_rank``: ``(folder, rank, local_rank, beat)``; ends the process."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
"""Flags of a rank's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank ended: either ``status`` or ``signal`` is set."""

    rank: int
    status: int | None
    signal: int | None
    time: float
    """When the exit was noticed, in seconds since the epoch."""
    killed_by_us: bool
    """The agent killed it, at the pilot's request."""

    def __str__(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} killed by {signal_name(self.signal)}"
        return f"rank {self.rank} ended with exit status {self.status}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants. Raises `OSError`."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def fork_rank(
    folder: Path, rank: int, local_rank: int, environment: Mapping[str, str], run_rank: RunRank, beat: Beat
) -> int:
    """Start one rank and return its pid. Its output goes to ``protocol.log_path(folder, rank)``. Raises `OSError`."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _become_rank(parent, folder, rank, environment)
        run_rank(folder, rank, local_rank, beat)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)  # run_rank exits by itself on success; the parent's own clean-up must not run here


def _become_rank(parent: int, folder: Path, rank: int, environment: Mapping[str, str]) -> None:
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, protocol.FLIGHT_SIGNAL):
        # Slurm sends its warnings to every process of a step, but only the pilot decides how to react, and it uses
        # SIGKILL. A handler that does nothing, unlike SIG_IGN, is not inherited by programs that a rank starts.
        signal.signal(number, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        log = os.open(protocol.log_path(folder, rank), _APPEND, 0o644)
    except OSError as error:  # a quota or a hanging file system: not the fault of the point
        print(f"rank {rank} cannot write its log: {error}", file=sys.stderr, flush=True)
        os._exit(protocol.CANNOT_WRITE)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(devnull)
    # If the parent's streams have been replaced (by a test), the rank's output would otherwise go there.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(protocol.STACKS_SIGNAL, file=2, all_threads=True)
    os.environ.update(environment)


def poll_exit(rank: int, pid: int, killed_by_us: bool) -> RankExit | None:
    """How the rank ended, or None while it runs.

    Processes left in its session are killed before its pid is reaped: until then no other process group can get the
    same number.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    kill_process_group(pid)
    os.waitpid(pid, 0)
    by_signal = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return RankExit(
        rank=rank,
        status=None if by_signal else info.si_status,
        signal=info.si_status if by_signal else None,
        time=time.time(),
        killed_by_us=killed_by_us,
    )


def kill_process_group(pgid: int) -> None:
    """Kill every process of the group, if the group exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def kill_rank(pid: int) -> None:
    """Kill a rank that has not been reaped, and its group. Right after the fork the rank does not lead a group yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    kill_process_group(pid)


def living_processes(groups: Iterable[int]) -> list[int]:
    """Pids of living processes in the process ``groups``. Zombies do not count: pid 1 may be slow to reap them."""
    existing = {group for group in groups if _group_exists(group)}
    if not existing:
        return []
    return [pid for pid, stat in _all_processes() if stat.group in existing and stat.state not in "ZX"]


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_orphans(limit_s: float) -> list[int]:
    """Kill and reap every child that this process still has. Returns the pids of children alive after ``limit_s``
    seconds.

    Call it when all ranks have been reaped: the remaining children are descendants that had left a rank's session.
    """
    until = time.monotonic() + limit_s
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            return [pid for pid in children if alive(pid)]
        time.sleep(0.002)
    return []


def _children() -> list[int]:
    me = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid, stat in _all_processes() if stat.parent == me]


def _all_processes() -> Iterator[tuple[int, ProcessStat]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := process_stat(int(folder.name))) is not None:
            yield int(folder.name), stat
