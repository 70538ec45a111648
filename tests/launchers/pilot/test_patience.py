"""What a pilot waits out, and what it does not."""

from __future__ import annotations

import errno
import itertools
import os
import time
from functools import partial

import pytest

from launchers.pilot import patience
from launchers.pilot.patience import Patience
from launchers.state.sweep_dir import SweepDir


class FailingStep:
    """Fails ``times`` times with one error, then returns ``done``."""

    def __init__(self, number: int, times: int) -> None:
        self.calls, self._number, self._times = 0, number, times

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._times:
            raise OSError(self._number, os.strerror(self._number), "name")
        return "done"


@pytest.fixture
def pilot(sweep: SweepDir) -> Patience:
    return Patience(sweep, lambda line: None, lambda seconds, message: True)


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL])
def test_an_error_that_cannot_pass_is_not_waited_out(number: int, pilot: Patience) -> None:
    step = FailingStep(number, times=1000)
    assert pilot.until_done(step, "write the row") is None
    assert step.calls == 1
    assert pilot.failure.startswith("cannot write the row: ") and os.strerror(number) in pilot.failure


def test_an_error_that_a_person_must_mend_is_waited_out_for_a_while(
    pilot: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pilot.until_done(FailingStep(errno.ENOTDIR, times=3), "write the row") == "done"
    monkeypatch.setattr(patience, "PERSON_LIMIT_S", 0.0)
    assert pilot.until_done(FailingStep(errno.EROFS, times=1000), "write the row") is None
    assert pilot.until_done(FailingStep(errno.ENOSPC, times=30), "write the row") == "done"


def test_both_limits_count_time_without_progress(pilot: Patience, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second at every reading, far beyond both limits."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(patience, "PERSON_LIMIT_S", 9.0)
    for number in (errno.EIO, errno.EACCES):
        moves, stays = FailingStep(number, times=100), FailingStep(number, times=100)
        assert pilot.until_done(moves, "read", limit_s=9.0, progress=partial(getattr, moves, "calls")) == "done"
        assert pilot.until_done(stays, "read", limit_s=9.0) is None
