"""Calls on a sweep's files as moments at which a simulated process can be interrupted, killed or told of an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.launchers.virtual_time import Process, World

_CHANGING = ("rename", "replace", "mkdir", "unlink", "rmdir")
_READING = ("open", "scandir", "listdir")
_ERRORS = (errno.EIO, errno.ESTALE)
_PAUSES = 0.1
"""Share of the calls that change something at which other processes get a turn."""


class StormyFiles:
    """The calls of `os` on files below ``root``, made by actors of a `World`.

    A process that is to be killed or frozen in the middle of its work gets a number of calls first (`Process.dies_in`).
    Files that are written get the virtual time.
    """

    def __init__(self, world: World, root: Path) -> None:
        self.failing: float = 0.0
        """Share of the calls that fail now."""
        self.failed = 0
        self.written: dict[str, float] = {}
        """Virtual time at which each whole file was first written, by name."""
        self._world, self._root = world, str(root)

    @contextmanager
    def installed(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in (*_CHANGING, *_READING)}
        for name, call in real.items():
            setattr(os, name, self._stormy(name, call))
        try:
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def _stormy(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        world, root, changing, replacing = self._world, self._root, name in _CHANGING, name == "replace"

        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            actor = world.actor
            if actor is None or actor.process.spared or not isinstance(path, str | Path) or root not in str(path):
                return real(path, *arguments, **options)
            before = world.random.random() < 0.5

            def do() -> Any:
                result = real(path, *arguments, **options)
                if replacing:
                    now = world.epoch + world.now
                    os.utime(arguments[0], (now, now))
                    self.written.setdefault(Path(arguments[0]).name, world.now)
                return result

            if (moment := self._interrupted(actor.process)) is not None:
                result = None if before else do()
                moment()
                return do() if before else result
            if self.failing and world.random.random() < self.failing:
                self.failed += 1
                if changing and not before:
                    do()
                number = world.random.choice(_ERRORS)
                raise OSError(number, os.strerror(number), os.fspath(path))
            result = do()
            if changing and world.random.random() < _PAUSES:
                world.sleep(world.random.uniform(0.0, 0.01))
            return result

        return call

    def _interrupted(self, process: Process) -> Callable[[], None] | None:
        """What happens to the process at this call; None: nothing."""
        world = self._world
        if process.dies_in is not None:
            process.dies_in -= 1
            if process.dies_in < 0:
                process.dies_in = None

                def die() -> None:
                    process.kill()
                    world.never_again()

                return die
        if process.freezes_in is not None:
            process.freezes_in -= 1
            if process.freezes_in < 0:
                process.freezes_in = None
                process.frozen_until = world.now + process.freeze_s
                return lambda: world.sleep(0.0)
        if process.hangs_in is not None:
            process.hangs_in -= 1
            if process.hangs_in < 0:
                process.hangs_in = None
                return lambda: world.sleep(process.hang_s)
        return None
