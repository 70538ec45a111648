"""The pauses between two polls of squeue or of the sweep's files."""

from __future__ import annotations

import time

import pytest

from launchers.slurm.polling import PollTimer, sleep_until_signal


def test_pauses_grow_without_a_change_up_to_the_longest() -> None:
    timer = PollTimer(1.0, 2.5)
    assert timer.due()
    periods = []
    for changed in (True, False, False, False, False, True):
        timer.polled(changed=changed)
        periods.append(timer.period_s)
    assert periods == pytest.approx([1.0, 1.4, 1.96, 2.5, 2.5, 1.0])
    assert not timer.due() and 0 < timer.left_s() <= 1.0


def test_a_signal_ends_a_sleep() -> None:
    class Signals(list[int]):
        def __len__(self) -> int:
            self.looks = getattr(self, "looks", 0) + 1
            return 0 if self.looks < 3 else 1

    started = time.monotonic()
    sleep_until_signal(30.0, Signals())
    assert time.monotonic() - started < 5
