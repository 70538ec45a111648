"""The clock of durations does not follow when somebody sets the system's clock."""

from __future__ import annotations

import time

import pytest

from workloads.contract.clock import SteadyClock


def test_a_clock_that_is_set_back_does_not_turn_time_around(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    began = clock()
    assert began == pytest.approx(time.time(), abs=1.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    assert 0 <= clock() - began < 10
