"""Waiting for a filesystem that fails: how often, how long, and for which errors."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import pytest

from results.shared_filesystem import patience
from results.shared_filesystem.patience import BRIEF_WAITS_S, LONGEST_WAIT_S, may_pass, patiently, repeated


@pytest.fixture(autouse=True)
def no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "failed_steps", patience.FailedSteps())


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


def test_waits_are_short_again_and_the_limit_begins_anew_after_progress() -> None:
    """A step that reads one more file between two failures goes on for ever, and one that stands still does not."""
    clock, waits = [0.0], list[float]()
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])

        def wait(seconds: float, error: OSError) -> bool:
            clock[0] += seconds
            waits.append(seconds)
            return True

        def step() -> str:
            if len(read) < 50:
                read.append(1)
            raise OSError(errno.EIO, "no")

        with pytest.raises(OSError, match="no"):
            patiently(step, limit_s=60.0, wait=wait, progress=lambda: len(read))
    assert waits[:51] == [0.5] * 50 + [1.0]
    assert sum(waits[49:]) == 60.0


def test_a_small_step_is_repeated_within_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert repeated(failing(*[errno.EIO] * 4)) == "done"
    assert tuple(waits) == BRIEF_WAITS_S and sum(waits) < 0.5
    with pytest.raises(OSError, match="no"):
        repeated(failing(*[errno.ESTALE] * 5))


def test_an_outage_costs_a_reader_of_many_files_the_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for _ in range(20):
        with pytest.raises(OSError, match="no"):
            repeated(failing(*[errno.EIO] * 9))
    assert repeated(failing()) == "done"
    assert tuple(waits) == BRIEF_WAITS_S
    assert repeated(failing(errno.EIO)) == "done"


def test_a_small_step_is_not_repeated_after_an_error_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(OSError, match="no"):
        repeated(failing(errno.ENOSPC))
