"""The time that a pilot's points may still use counts from its job's end."""

from __future__ import annotations

import math
import time

import pytest

from launchers.pilot import allocation_end
from launchers.pilot.allocation import STARTED_AT, allocation_of
from launchers.pilot.allocation_end import AllocationEnd
from launchers.state.pilot_config import PilotConfig
from tests.launchers.scripted import settings


def test_minutes_before_the_pilots_start_are_subtracted() -> None:
    end = AllocationEnd(600.0, 200.0, 150.0, lambda: None, lambda line: None)
    assert end.left_s() == pytest.approx(400.0, abs=1.0)


def test_a_limit_that_a_site_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    answers = iter([750.0, None, 300.0, math.inf])
    end = AllocationEnd(600.0, 0.0, 150.0, lambda: next(answers), lines.append)
    assert end.left_s() == pytest.approx(600.0, abs=1.0) and not lines
    assert end.left_s() == pytest.approx(600.0, abs=1.0)  # Slurm is not asked again at once
    monkeypatch.setattr(allocation_end, "ASK_EVERY_S", 0.0)
    end._ask_at = 0.0
    assert end.left_s() == pytest.approx(600.0, abs=1.0)  # Slurm did not answer
    assert end.left_s() == pytest.approx(150.0, abs=1.0)
    assert lines == ["points may run for 2 min by the job's limit, not 10 min"]
    assert end.left_s() == math.inf


def test_without_a_limit_there_is_no_end() -> None:
    assert AllocationEnd(None, 0.0, 0.0, None, lambda line: None).left_s() is None


def test_the_jobs_age_comes_from_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PilotConfig(
        settings=settings(), command=None, wall_time_s=60.0, stop_with_parent=False, batch_system="slurm"
    )
    for text, age_s in ((f"{time.clock_gettime(time.CLOCK_BOOTTIME) - 90.0}", 90.0), ("", 0.0), ("soon", 0.0)):
        monkeypatch.setenv(STARTED_AT, text)
        assert allocation_of(config, "p").age_s == pytest.approx(age_s, abs=1.0)
