"""`Patience`: how a pilot waits out a failing filesystem. It reports the error once, keeps showing that the pilot
lives, and retries."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem.patience import cannot_pass, needs_a_person, patiently

_T = TypeVar("_T")

PERSON_LIMIT_S = 900.0
"""Seconds that a pilot waits for a missing permission, a read-only file system or a file in a folder's place, while it
holds its devices."""

Pause = Callable[[float, str], bool]
"""Takes seconds and a message: sleeps and shows the message meanwhile. Returns False when the pilot must stop."""


class Patience:
    """Repeats steps of one pilot until they succeed."""

    def __init__(self, sweep: SweepDir, report: Callable[[str], None], pause: Pause) -> None:
        """``report`` takes a line for the pilot's log."""
        self.failure = ""
        """Error of the last failed call of `until_done`."""
        self._sweep = sweep
        self._report = report
        self._pause = pause

    def until_done(
        self,
        step: Callable[[], _T],
        task: str,
        *,
        limit_s: float | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> _T | None:
        """Call ``step`` until it raises no `OSError` and return its result, which is not None. Returns None when the
        pilot must stop first, when ``limit_s`` seconds are over, or when the sweep's folder has been removed. Both
        limits count from the last change of ``progress``, as in `patiently`.

        An error that cannot pass ends it at once, one that a person must mend after `PERSON_LIMIT_S`.

        ``step`` must be repeatable: it reaches the same result wherever an earlier call failed. ``task``: description
        of the step, such as ``write the row``. After a request to stop there is one last call.
        """
        reported = False
        refused_at: float | None = None
        reached = progress()

        def waits_for(error: OSError) -> bool:
            nonlocal refused_at, reached
            if (done := progress()) != reached:
                refused_at, reached = None, done
            if self._removed(error) or cannot_pass(error):
                return False
            if not needs_a_person(error):
                return True
            refused_at = refused_at if refused_at is not None else time.monotonic()
            return time.monotonic() - refused_at < PERSON_LIMIT_S

        def wait(seconds: float, error: OSError) -> bool:
            nonlocal reported
            message = f"cannot {task}: {error}; trying again, nothing is lost"
            if not reported:
                self._report(message)
            reported = True
            return self._pause(seconds, message)

        try:
            done = patiently(step, limit_s=limit_s, wait=wait, waits_for=waits_for, progress=progress)
        except OSError as error:
            self.failure = f"{self._sweep.path} was removed" if self._removed(error) else f"cannot {task}: {error}"
            return None
        if reported:
            self._report(f"succeeded after trying again: {task}")
            self._pause(0.0, "")
        return done

    def _removed(self, error: OSError) -> bool:
        """Whether the error means that the whole folder of the sweep is gone."""
        try:
            return isinstance(error, FileNotFoundError) and self._sweep.removed
        except OSError:
            return False
