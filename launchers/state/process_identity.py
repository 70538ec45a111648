"""Identifies a process permanently, so that another process can prove that it has ended.

A pid alone is reused, and means nothing on another machine or in another pid namespace. Together with the host, the
boot, the namespace and the start time it identifies exactly one process.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    host: str
    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int
    """Start of the process in clock ticks after boot (field 22 of ``/proc/pid/stat``)."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of ``/proc/pid/stat`` that this module uses."""

    state: str
    """One letter; ``Z`` (exited, not yet reaped) and ``X`` count as dead."""
    parent: int
    """Pid of the parent."""
    group: int
    """Process group."""
    start_ticks: int


def own_identity() -> ProcessIdentity:
    """The identity of the calling process."""
    stat = process_stat(os.getpid())
    assert stat is not None
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        start_ticks=stat.start_ticks,
    )


def process_stat(pid: int) -> ProcessStat | None:
    """The kernel's status of ``pid``; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may contain spaces and brackets
    return ProcessStat(state=fields[0], parent=int(fields[1]), group=int(fields[2]), start_ticks=int(fields[19]))


def alive(pid: int) -> bool:
    """Whether there is such a process on this machine; zombies do not count."""
    stat = process_stat(pid)
    return stat is not None and stat.state not in "ZX"


def provably_dead(identity: ProcessIdentity) -> bool:
    """True only when this machine can see that the process has ended; False also if unknown."""
    if identity.host != socket.gethostname():
        return False
    if identity.boot_id != _boot_id():
        return True
    if identity.pid_namespace != _pid_namespace():
        return False
    stat = process_stat(identity.pid)
    return stat is None or stat.state in "ZX" or stat.start_ticks != identity.start_ticks


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
