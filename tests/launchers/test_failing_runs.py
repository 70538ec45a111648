"""Pilots keep their pace on files that fail now and then; all times are virtual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.failing_runs import Case, run
from tests.launchers.virtual_time import VirtualTime
from tests.sampling import sampled


def test_sleepers_wake_in_the_order_of_virtual_time() -> None:
    clock, woken = VirtualTime(), []

    def sleeper(seconds: float) -> None:
        for _ in range(2):
            clock.sleep(seconds)
            woken.append((clock.now, seconds))

    clock.run(lambda: sleeper(3.0), lambda: sleeper(2.0))
    assert woken == [(2.0, 2.0), (3.0, 3.0), (4.0, 2.0), (6.0, 3.0)]


@pytest.mark.slow
def test_pilots_on_failing_files_keep_nine_tenths_of_their_pace(tmp_path: Path) -> None:
    """One of fifty calls fails."""
    clean, failing = (run(case, 12, tmp_path / case.name) for case in (Case(), Case(rate=0.02)))
    assert failing.failed > 5
    assert failing.per_hour >= 0.9 * clean.per_hour
    assert (failing.done, failing.final_rows, failing.repeated, failing.gave_up) == (12, 12, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(8), 1, seconds=20))
def test_killed_pilots_on_failing_files_keep_four_fifths_of_their_pace(seed: int, tmp_path: Path) -> None:
    clean = run(Case(), 200, tmp_path / "clean")
    failing = run(Case(rate=0.02, kills=True), 200, tmp_path / "failing", seed)
    assert failing.per_hour >= 0.8 * clean.per_hour
    assert (failing.done, failing.final_rows, failing.unmarked, failing.gave_up) == (200, 200, 0, 0)
