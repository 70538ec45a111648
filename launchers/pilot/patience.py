"""How a pilot waits out a filesystem that fails: it says so once, goes on showing that it lives, and tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.patience import patiently

_T = TypeVar("_T")

Pause = Callable[[float, str], bool]
"""Takes seconds and a message: sleeps and shows the message meanwhile. False when the pilot shall stop."""


class Patience:
    """Repeats the steps of one pilot until they work."""

    def __init__(self, sweep: SweepDir, report: Callable[[str], None], pause: Pause) -> None:
        """``report`` takes a line for the pilot's log."""
        self.failure = ""
        """What the last call of `until_done` has failed with."""
        self._sweep = sweep
        self._report = report
        self._pause = pause

    def until_done(self, step: Callable[[], _T], task: str, *, limit_s: float | None = None) -> _T | None:
        """Call ``step`` until it raises no `OSError`; its result, which is not None. None when the pilot has to stop
        before, when ``limit_s`` seconds are over, or when the sweep's folder has been removed.

        ``step`` must come to the same result wherever an earlier call of it has failed. ``task``: what it does, as in
        ``write the row``. After a request to stop there is one last call.
        """
        said = False

        def wait(seconds: float, error: OSError) -> bool:
            nonlocal said
            message = f"cannot {task}: {error}; trying again, nothing is lost"
            if not said:
                self._report(message)
            said = True
            return self._pause(seconds, message)

        try:
            done = patiently(step, limit_s=limit_s, wait=wait, waits_for=lambda error: not self._removed(error))
        except OSError as error:
            self.failure = f"{self._sweep.path} was removed" if self._removed(error) else f"cannot {task}: {error}"
            return None
        if said:
            self._report(f"could {task} at last")
            self._pause(0.0, "")
        return done

    def _removed(self, error: OSError) -> bool:
        """Whether the error is that the whole folder of the sweep is gone."""
        try:
            return isinstance(error, FileNotFoundError) and not self._sweep.marker.exists()
        except OSError:
            return False
