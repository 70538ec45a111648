"""Waiting for a filesystem that fails: how often, how long, and for which errors."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from results.shared_filesystem.patience import LONGEST_WAIT_S, may_pass, patiently


def failing(*numbers: int) -> Callable[[], str]:
    """A step that fails with these errors, one after the other, and then works."""
    left = list(numbers)

    def step() -> str:
        if left:
            raise OSError(left.pop(0), "no")
        return "done"

    return step


def test_a_step_is_repeated_with_longer_and_longer_waits() -> None:
    waits: list[float] = []

    def wait(seconds: float, error: OSError) -> bool:
        waits.append(seconds)
        return True

    assert patiently(failing(*[errno.ESTALE] * 9), limit_s=None, wait=wait) == "done"
    assert waits[:3] == [0.5, 1.0, 2.0] and waits[-1] == LONGEST_WAIT_S


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EISDIR])
def test_what_waiting_does_not_mend_is_raised_at_once(number: int) -> None:
    assert not may_pass(OSError(number, ""))
    with pytest.raises(OSError, match="no"):
        patiently(failing(number), limit_s=None, wait=lambda *_: pytest.fail("it waited"))


def test_the_limit_counts_from_the_first_error() -> None:
    with pytest.raises(OSError, match="no"):
        patiently(failing(*[errno.EIO] * 99), limit_s=0.0)


def test_whoever_may_not_wait_gets_one_last_try() -> None:
    assert patiently(failing(errno.EIO), limit_s=None, wait=lambda *_: False) == "done"
    with pytest.raises(OSError, match="no"):
        patiently(failing(errno.EIO, errno.EIO), limit_s=None, wait=lambda *_: False)
