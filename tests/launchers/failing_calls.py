"""Makes file operations fail at random moments, as on a failing shared filesystem. Standard library only: the stand-in
of the Slurm tests loads this file by its path."""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGING = ("rename", "replace", "mkdir", "unlink", "link")
_READING = ("open", "scandir", "listdir", "stat", "utime")
ERRORS = (errno.EIO, errno.ESTALE)


class Death(BaseException):
    """Ends a pilot as SIGKILL does: no handler catches it."""


class FailingFiles:
    """While ``active``, some calls of `os` and `io` on files below ``root`` fail.

    A call that changes a file fails before or after the change, with equal chances. Forked processes are spared.
    """

    def __init__(self, patch: Callable[[Any, str, Any], None], root: Path, seed: int, rate: float) -> None:
        """``patch``: `setattr`, or one that undoes itself. ``rate``: share of the calls that fail."""
        self.active = False
        self.calls = 0
        self.failed: list[str] = []
        self.dies_at: int | None = None
        """Number of the call at which the pilot dies instead of failing."""
        self.at_call: Callable[[], bool] = lambda: False
        """Called before every call; returns whether the pilot dies at it."""
        self._root = str(root)
        self._pid = os.getpid()
        self._rate = rate
        self._random = random.Random(seed)
        for name in (*_CHANGING, *_READING):
            patch(os, name, self._failing(name, getattr(os, name)))
        patch(io, "open", self._failing("open", io.open))

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[0] if arguments else options.get("path")
            if (
                not self.active
                or os.getpid() != self._pid
                or not isinstance(path, str | Path)
                or not str(path).startswith(self._root)
            ):
                return real(*arguments, **options)
            self.calls += 1
            dies = self.at_call() or self.calls == self.dies_at
            if not dies and self._random.random() >= self._rate:
                return real(*arguments, **options)
            if name in _CHANGING and self._random.random() < 0.5:
                real(*arguments, **options)
            self.failed.append(f"{name} {Path(path).name}")
            if dies:
                raise Death
            number = self._random.choice(ERRORS)
            raise OSError(number, os.strerror(number), str(path))

        return call
