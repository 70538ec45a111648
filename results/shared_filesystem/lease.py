"""A lock on a shared filesystem that ends soon after its holder, or its holder's machine, has died.

The lock is a folder that holds one file, named by the holder's token. The holder touches that file while it works. If a
file has not been touched for ``stale_after_s``, its holder is considered dead, and any waiting process may remove the
file. Ages are read from the filesystem's own clock, because the clocks of two machines differ. Kernel locks are not
used: not every shared filesystem has them.

Two steps make the lock safe however slowly a process goes from one to the next, because neither can affect the wrong
holder:

- A process takes the lease by renaming a folder that contains its file to the lock's name. That succeeds only while the
  lock does not exist or is an empty folder.
- A lease, even of a dead holder, ends when its file is removed. A token is used only once, so the file of a later
  holder has another name.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from results.shared_filesystem.patience import repeated

_POLL_S = 0.05
_BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    path: Path
    """The lock: a folder."""
    token: str
    """Name of the holder's file in the lock."""

    def held(self) -> bool:
        """Whether this process still holds the lease. The call also shows other processes that the holder is alive."""
        return _touch(self.path / self.token)


@contextmanager
def acquire(path: Path, *, stale_after_s: float, wait_s: float) -> Iterator[Lease | None]:
    """Hold the lock ``path`` inside the block. Yields None if a living process has held it for all of ``wait_s``.

    Both times are in seconds. A holder that works for longer than ``stale_after_s`` must call `Lease.held` at shorter
    intervals, and stop when it returns False. Raises `OSError` if nothing can be written.
    """
    lease = Lease(path, f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}")
    give_up_at = time.monotonic() + wait_s
    while not repeated(lambda: _take(lease)):
        if repeated(lambda: _remove_stale(path, stale_after_s)):
            continue
        if time.monotonic() >= give_up_at:
            yield None
            return
        time.sleep(_POLL_S)
    try:
        yield lease
    finally:
        repeated(lambda: (path / lease.token).unlink(missing_ok=True))
        _remove_empty(path)


@contextmanager
def kept_alive(lease: Lease) -> Iterator[None]:
    """Show every few seconds inside the block that the holder of ``lease`` is alive, whatever the block waits for."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(_BEAT_S):
            lease.held()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _take(lease: Lease) -> bool:
    """Put this process's file into the lock, unless it holds the file of another process."""
    draft = lease.path.with_name(f"{lease.path.name}.{lease.token}")
    draft.mkdir(exist_ok=True)
    (draft / lease.token).touch()
    with suppress(OSError):  # another process holds the lock
        draft.rename(lease.path)
    # The file is checked whatever the rename returned: over NFS a rename that was done can be answered with an error.
    if _touch(lease.path / lease.token):
        return True
    (draft / lease.token).unlink(missing_ok=True)
    _remove_empty(draft)
    return False


def _remove_stale(path: Path, stale_after_s: float) -> bool:
    """Ends the lease of a dead holder. Returns True if there was one and this process has ended it."""
    if path.is_symlink():  # no lock; it may lead to a folder of somebody's files
        path.unlink(missing_ok=True)
        return True
    try:
        # Up to version 0.1 the lock itself was the holder's file. Such a file can remain after a kill.
        holders = [path] if path.is_file() else list(path.iterdir())
        if not holders:
            return False
        now = filesystem_time(path.parent)
        if any(now - holder.stat().st_mtime <= stale_after_s for holder in holders):
            return False
        for holder in holders:
            holder.unlink()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False  # another process has just ended it
    return True


def _touch(file: Path) -> bool:
    """Sets the modification time of the file to now. False if the file does not exist."""
    try:
        repeated(lambda: os.utime(file))
    except OSError:
        return False
    return True


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it already holds the file of another process, or another process has removed it
        folder.rmdir()


def filesystem_time(folder: Path) -> float:
    """The time now by the clock that stamps files in ``folder``, in seconds since the epoch. Raises `OSError`."""
    probe = folder / f".clock.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
