"""Retries calls to a shared filesystem that fails for a while, until they succeed or a limit is reached.

NFS answers with ESTALE or EIO, Lustre with ENOTCONN, while a server restarts or a network is cut; the same call
succeeds some seconds or minutes later. A call may also be done although it is answered with an error. So a step that is
retried must have the same result however often it, or a part of it, has been done before.

Two functions retry. `repeated` repeats one small step, such as reading one file, within half a second, so that a single
failed call undoes nothing of its caller's work. `patiently` waits for minutes, as long as an outage lasts.

A file system may also hang: then a call returns only when the server does, in minutes or days (`in_background`).
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from results.shared_filesystem.passing_errors import FAILING

BRIEF_WAITS_S = (0.01, 0.03, 0.1, 0.3)
"""Seconds before each new try of `repeated`."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the first new try of `patiently`, and most seconds before a later one."""
_IMPOSSIBLE = {
    errno.EFAULT,
    errno.EILSEQ,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EOVERFLOW,
    errno.EXDEV,
}
"""Errors of the call itself: the same call fails in the same way whatever happens to the file system."""
_NEEDING_A_PERSON = {errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.EPERM, errno.EROFS}

_T = TypeVar("_T")


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later although nobody changes anything."""
    return error.errno in FAILING


def cannot_pass(error: OSError) -> bool:
    """Whether the same call can never succeed, such as one with a name that is too long."""
    return error.errno in _IMPOSSIBLE


def needs_a_person(error: OSError) -> bool:
    """Whether the same call succeeds only after somebody has changed a permission, a mount, or what lies at a name."""
    return error.errno in _NEEDING_A_PERSON


@dataclass(slots=True)
class FailedSteps:
    """Errors after which this process has repeated a small step."""

    count: int = 0
    last: str = ""
    outage: bool = False
    """Whether the last step has failed at every try."""


failed_steps = FailedSteps()


def repeated(step: Callable[[], _T]) -> _T:
    """Returns the result of ``step``, a few calls on one file or folder, which is called up to five times within half a
    second while it raises an error that may pass. Raises the last error.

    After a step that has failed at every try, each step gets one try until one succeeds, so that an outage costs a
    reader of many files the half second once.
    """
    waits = [] if failed_steps.outage else list(BRIEF_WAITS_S)
    while True:
        try:
            done = step()
        except OSError as error:
            if not may_pass(error):
                raise
            failed_steps.count, failed_steps.last = failed_steps.count + 1, str(error)
            if not waits:
                failed_steps.outage = True
                raise
        else:
            failed_steps.outage = False
            return done
        time.sleep(waits.pop(0))


def patiently(
    step: Callable[[], _T],
    *,
    limit_s: float | None,
    wait: Callable[[float, OSError], bool] | None = None,
    waits_for: Callable[[OSError], bool] = may_pass,
    progress: Callable[[], object] = lambda: None,
) -> _T:
    """Returns the result of ``step``, which is called again while it raises an `OSError` for which waiting makes sense.

    ``limit_s``: seconds from the first error until the last call; None: no limit. ``wait``: sleeps, given the seconds
    and the error; returns False if the next call must be the last one. ``waits_for``: whether waiting makes sense for
    an error. ``progress``: a value that changes when a call that failed has done a lasting part of its work; then waits
    are short again, and the limit begins anew. Raises the last error.
    """
    until, wait_s, last, reached = None, FIRST_WAIT_S, False, progress()
    while True:
        try:
            return step()
        except OSError as error:
            now = time.monotonic()
            if (done := progress()) != reached:
                until, wait_s, reached = None, FIRST_WAIT_S, done
            until = until if until is not None or limit_s is None else now + limit_s
            if last or not waits_for(error) or (until is not None and now >= until):
                raise
            if until is not None:
                wait_s = min(wait_s, until - now)
            last = not (wait or _sleep)(wait_s, error)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _sleep(seconds: float, _error: OSError) -> bool:
    time.sleep(seconds)
    return True


def in_background(call: Callable[[], _T]) -> Future[_T]:
    """Runs ``call`` in a new thread, so that the caller can go on if a hanging file system blocks ``call`` for ever.
    The thread does not keep the process from ending."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
