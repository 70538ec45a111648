"""A lock file on a shared filesystem that outlives neither its holder nor its holder's machine for long.

The holder creates the file exclusively and touches it while it works. A file that nobody has touched for
``stale_after_s`` belongs to a dead holder and is taken over. Ages are read off the filesystem's own clock, because the
clocks of two machines differ. No kernel locks: not every shared filesystem has them.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Lease:
    path: Path
    token: str

    def held(self) -> bool:
        """True while the file is still ours; also tells the others that we live."""
        try:
            if self.path.read_text() != self.token:
                return False
            os.utime(self.path)
        except OSError:
            return False
        return True


@contextmanager
def acquire(path: Path, *, stale_after_s: float, wait_s: float) -> Iterator[Lease | None]:
    """Hold ``path`` inside the block; None when somebody alive has held it for all of ``wait_s``."""
    lease = Lease(path, f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}\n")
    give_up_at = time.monotonic() + wait_s
    while not _create(lease):
        if _remove_stale(path, stale_after_s):
            continue
        if time.monotonic() >= give_up_at:
            yield None
            return
        time.sleep(_POLL_S)
    try:
        yield lease
    finally:
        if lease.held():
            path.unlink(missing_ok=True)


def _create(lease: Lease) -> bool:
    """The file appears with its whole content or not at all: a hard link is atomic also on NFS."""
    draft = lease.path.with_name(f"{lease.path.name}.{uuid.uuid4().hex}")
    draft.write_text(lease.token)
    try:
        os.link(draft, lease.path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _remove_stale(path: Path, stale_after_s: float) -> bool:
    """Take a stale file away. Of several that try, the rename lets one succeed; a fresh file caught so is put back."""
    try:
        seen = path.stat()
        if _filesystem_time(path.parent) - seen.st_mtime <= stale_after_s:
            return False
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        path.rename(aside)
    except FileNotFoundError:
        return True
    if aside.stat().st_ino != seen.st_ino:
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)
    return True


def _filesystem_time(folder: Path) -> float:
    probe = folder / f".clock.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
