"""The lease of the command that runs a plan: while it is held, a command with another plan does not change the queue.

Otherwise two people who give the same name to two grids would remove each other's points. A second command with the
same plan may run at the same time as the first one; it needs no lease.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.lease import acquire, kept_alive

_STALE_S = 30.0


@contextmanager
def hold(sweep: SweepDir) -> Iterator[str | None]:
    """Hold the lease inside the block. Yields None, or the command that holds it instead: ``process 12 on login1``."""
    path = sweep.todo.parent / "running.lock"
    with acquire(path, stale_after_s=_STALE_S, wait_s=0.0) as lease:
        if lease is not None:
            with kept_alive(lease):
                yield None
            return
        try:
            holders = [entry.name for entry in path.iterdir()]
        except OSError:  # the holder has just ended
            holders = []
        yield next((where for name in holders if (where := _alive(name)) is not None), None)


def _alive(token: str) -> str | None:
    """The place of the process that holds a token; None for a process of this machine that has ended."""
    parts = token.rsplit(".", 2)
    host, pid = (parts[0], parts[1]) if len(parts) == 3 else (token, "?")
    if host == socket.gethostname() and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
    return f"process {pid} on {host}"
