"""Writes a sweep's report again and again while its rows come, so that its page follows the sweep."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from launchers.status.status import SweepStatus

_AT_MOST_ONE_IN = 5
"""A report is being written for at most this part of the time, because the machine has other work: it is mostly a
login node."""
_REPORT = (sys.executable, "-m", "analysis.report")
"""The command; ``sweep`` does not import ``analysis``."""
_LEAST_S = 10.0
"""Least seconds from one report to the next."""


class LivePage:
    """The report of one sweep in one folder, written by ``python -m analysis.report`` in a process of its own.

    Its methods return lines for the user: one when the first report is there, and one each time that writing fails for
    another reason. The earlier report then stays, and the next rows are tried again.
    """

    def __init__(self, sweep: Path, out: Path) -> None:
        self._command = [*_REPORT, str(sweep), "--out", str(out)]
        self._out = out
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._next = 0.0
        self._attempts: int | None = None
        """Attempts in the newest report, or in the one that is being written."""
        self._written, self._failure = False, ""

    def update(self, status: SweepStatus) -> list[str]:
        """Start a report if there are new attempts and the last report is old enough; returns at once."""
        said = self._ended() if self._process is not None and self._process.poll() is not None else []
        if self._process is None and len(status.attempts) != self._attempts and time.monotonic() >= self._next:
            self._start(len(status.attempts))
        return said

    def finish(self, status: SweepStatus) -> list[str]:
        """Write the report of a sweep's last rows, if no report has them, and wait for it."""
        said: list[str] = []
        if self._process is not None:
            said += self._ended()
        if len(status.attempts) != self._attempts:
            self._start(len(status.attempts))
            said += self.finish(status)
        return said

    def stop(self) -> None:
        """End a report that is being written; the earlier one stays."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _start(self, attempts: int) -> None:
        self._attempts, self._started = attempts, time.monotonic()
        # In a session of its own, because Ctrl-C in the terminal is for the command that watches.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _ended(self) -> list[str]:
        """Wait for the report that is being written."""
        assert self._process is not None
        words = self._process.communicate()[1].decode(errors="replace").split("\n")
        now = time.monotonic()
        self._next = max(self._started + _LEAST_S, now + (_AT_MOST_ONE_IN - 1) * (now - self._started))
        failed, self._process = self._process.returncode != 0, None
        if failed:
            last = next((line for line in reversed(words) if line.strip()), "no message")
            before, self._failure = self._failure, last
            if last == before:
                return []
            return [f"the report could not be written ({last.removeprefix('error: ')}); tried again as rows come"]
        if self._written:
            return []
        self._written = True
        return [f"the report is there, and written again as rows come: {self._out / 'index.html'}"]
