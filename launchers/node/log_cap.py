"""Limits the length of a rank's log while the rank writes it: the beginning and the end stay, the middle is cut out.

A rank writes directly into its file, so nothing slows it, and its last lines are there when it crashes. When the file
has grown too long, the agent truncates it after the beginning and appends the end again, with a line in between that
gives the number of bytes left out. The rank continues at the new end, because its file is open for appending. For those
few milliseconds, once per 8 MiB of output, the rank is stopped, so that no output is lost during the cut.

Logs lie on a shared file system, which may hang. So cuts run in threads: the agent waits a moment for each, and
continues without it. Whatever happens to a log, ranks can be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path

from results.shared_filesystem.patience import in_background

LIMIT_BYTES = 16 * 2**20
"""Longer logs are cut."""
KEPT_BYTES = 4 * 2**20
"""Bytes that stay at the beginning, and at the end."""
EVERY_S = 1.0
"""Seconds between two checks of the lengths of running ranks' logs."""
_STOP_LIMIT_S = 0.1
"""Seconds to wait for a rank to stop. A rank that has not stopped by then waits in the kernel; its log is checked again
later."""
CUT_WAIT_S = 1.0
"""Seconds that the agent waits for a cut; a slower cut continues in the background."""


class CappedLog:
    """The log of one rank."""

    def __init__(self, path: Path, pid: int) -> None:
        """``pid``: process id of the rank, whose standard output is the log."""
        self._path = path
        self._pid = pid
        self._seen = 0
        self._head_bytes: int | None = None
        """Length in bytes of the beginning that stays; None before the first cut."""
        self._note = b""
        self._left_out = 0
        self._cutting: Future[None] | None = None
        """The cut for which the rank is stopped; None while the rank is not stopped."""

    def trim(self) -> None:
        """Cut the log of a running rank if it is too long; call this often. The kernel reports the length without
        access to the file itself, which may lie on a file system that hangs or that many ranks share."""
        if self._cutting is None:
            length = _position(self._pid)
            if length <= LIMIT_BYTES or length == self._seen:
                return
            if not _stop(self._pid):
                _signal(self._pid, signal.SIGCONT)
                return
            self._seen = length
            self._cutting = in_background(self.cut)
            wait([self._cutting], CUT_WAIT_S)
        if self._cutting.done():
            self._cutting = None
            _signal(self._pid, signal.SIGCONT)

    @property
    def being_cut(self) -> bool:
        """Whether a cut runs in the background."""
        return self._cutting is not None and not self._cutting.done()

    def cut(self) -> None:
        """Cut the log if it is too long. A file that cannot be read or written stays as it is."""
        with contextlib.suppress(OSError):
            if self._path.lstat().st_size <= LIMIT_BYTES:
                return
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
            try:
                self._cut(file)
            finally:
                os.close(file)

    def _cut(self, file: int) -> None:
        if self._head_bytes is None:
            beginning = os.pread(file, KEPT_BYTES, 0)
            self._head_bytes = beginning.rfind(b"\n") + 1 or len(beginning)
        size = os.fstat(file).st_size
        end = os.pread(file, KEPT_BYTES, size - KEPT_BYTES)
        end = end[end.find(b"\n") + 1 :]
        self._left_out += size - self._head_bytes - len(self._note) - len(end)
        os.ftruncate(file, self._head_bytes)
        self._note = f"\n[ultrasweep: {self._left_out:,} bytes of this log were left out here]\n".encode()
        _write(file, self._note + end)


def cut_all(logs: Iterable[CappedLog]) -> None:
    """Cut the logs of ranks that have ended. On a file system that hangs the cuts continue in the background."""
    chosen = [log for log in logs if not log.being_cut]

    def cut() -> None:
        for log in chosen:
            log.cut()

    wait([in_background(cut)], CUT_WAIT_S)


def _stop(pid: int) -> bool:
    """Stop a child of this process with all its threads. Returns whether it stopped."""
    _signal(pid, signal.SIGSTOP)
    until = time.monotonic() + _STOP_LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
                return True
        time.sleep(0.0005)
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _position(pid: int) -> int:
    """Position in bytes up to which the process has written its standard output; 0 where the kernel does not report
    it."""
    try:
        fields = (Path(f"/proc/{pid}/fdinfo/1").read_text().splitlines() or [""])[0]
        return int(fields.removeprefix("pos:"))
    except (OSError, ValueError):
        return 0
