"""A lock on a shared filesystem that ends soon after its holder, or its holder's machine, has died.

The lock is a folder that holds one file, named by the holder's token. The holder touches that file while it works. A
file that nobody has touched for ``stale_after_s`` belongs to a dead holder, and whoever waits may remove it. Ages are
read off the filesystem's own clock, because the clocks of two machines differ. No kernel locks: not every shared
filesystem has them.

Two steps make it sound however slowly a process goes from one to the next, because neither can hit the wrong holder:

- A lease is taken by renaming a folder that holds one's own file to the lock's name. That succeeds only while the lock
  does not exist or is an empty folder.
- A lease ends, also a dead holder's, by removing its file. A token is used once, so that the file of a later holder
  has another name.
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
    """The lock: a folder."""
    token: str
    """Name of the holder's file in it."""

    def held(self) -> bool:
        """True while the lease is still ours. Asking also shows the others that we are alive."""
        return _touch(self.path / self.token)


@contextmanager
def acquire(path: Path, *, stale_after_s: float, wait_s: float) -> Iterator[Lease | None]:
    """Hold the lock ``path`` inside the block; None when somebody alive has held it for all of ``wait_s``.

    Both times are in seconds. A holder that works for longer than ``stale_after_s`` must call `Lease.held` more often
    than that, and stop when it says False. Raises `OSError` where nothing can be written.
    """
    lease = Lease(path, f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}")
    give_up_at = time.monotonic() + wait_s
    while not _take(lease):
        if _remove_stale(path, stale_after_s):
            continue
        if time.monotonic() >= give_up_at:
            yield None
            return
        time.sleep(_POLL_S)
    try:
        yield lease
    finally:
        (path / lease.token).unlink(missing_ok=True)
        _remove_empty(path)


def _take(lease: Lease) -> bool:
    """Give the lock our file, unless another's is in it."""
    draft = lease.path.with_name(f"{lease.path.name}.{lease.token}")
    draft.mkdir(exist_ok=True)
    (draft / lease.token).touch()
    with suppress(OSError):  # the lock is another's
        draft.rename(lease.path)
    # The file is asked for whatever the rename said: over NFS one that was done can be answered with an error.
    if _touch(lease.path / lease.token):
        return True
    (draft / lease.token).unlink(missing_ok=True)
    _remove_empty(draft)
    return False


def _remove_stale(path: Path, stale_after_s: float) -> bool:
    """End the lease of a dead holder. True when it was there and this process has ended it."""
    try:
        # Up to version 0.1 the lock itself was the holder's file. One can still lie there after a kill.
        holders = [path] if path.is_file() else list(path.iterdir())
        if not holders:
            return False
        now = _filesystem_time(path.parent)
        if any(now - holder.stat().st_mtime <= stale_after_s for holder in holders):
            return False
        for holder in holders:
            holder.unlink()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False  # somebody else has just ended it
    return True


def _touch(file: Path) -> bool:
    """Set the file's time of change to now. False when it is not there."""
    try:
        os.utime(file)
    except OSError:
        return False
    return True


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # another's file is in it by now, or another has removed it
        folder.rmdir()


def _filesystem_time(folder: Path) -> float:
    probe = folder / f".clock.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
