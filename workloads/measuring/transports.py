"""Reads from NCCL's own log which transports its connections use: NVLink or PCIe inside a node, the network between
nodes.

NCCL prints one line for each connection (``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``) at level INFO of its subsystem
INIT (NCCL's documentation, "Environment Variables", NCCL_DEBUG and NCCL_DEBUG_SUBSYS), and has no call that returns it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

_VIA = re.compile(r" via ([A-Za-z0-9]+)/(.+)$", re.MULTILINE)


def record_log(log: Path, environment: Mapping[str, str]) -> Path | None:
    """Make NCCL write its log where `transports_in` can read it, and return that file. Call it before NCCL is used.

    ``environment``: variables in effect for NCCL (`workloads.measuring.device.nccl_environment`). Without NCCL_DEBUG
    among them, NCCL writes into memory of this process. With it, the lines stay where the user wants them: in
    NCCL_DEBUG_FILE, else in the rank's ``log``; None if the chosen level does not show connections.
    """
    if (level := environment.get("NCCL_DEBUG")) is not None:
        if level.upper() not in ("INFO", "TRACE"):
            return None
        name = environment.get("NCCL_DEBUG_FILE")
        return Path(name.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))) if name else log
    memory = Path(f"/proc/self/fd/{os.memfd_create('nccl-log')}")  # a file without a name: nothing is left behind
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(memory)}
    return memory


def transports_in(log: Path | None) -> list[str] | None:
    """The transports in a file of `record_log`, sorted; None if there is no file or it cannot be read."""
    if log is None:
        return None
    try:
        return transports(log.read_text(errors="replace"))
    except OSError:
        return None


def transports(text: str) -> list[str]:
    """The transports that NCCL's log names, sorted, each once: ``P2P/CUMEM``, ``SHM/direct``, ``NET/Socket``,
    ``NET/IB/GDRDMA`` (network cards read and write the devices' memory)."""
    return sorted({_name(kind, rest) for kind, rest in _VIA.findall(text)})


def _name(kind: str, rest: str) -> str:
    """``kind`` and the first word of ``rest``, without numbers of network cards and directions of copies."""
    first, *more = rest.strip().split("/")
    return "/".join([kind, first, *(["GDRDMA"] if any(word.startswith("GDRDMA") for word in more) else [])])
