"""Pilots keep their pace on files that fail now and then; all times are virtual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.failing_runs import Case, exact_world, run
from tests.sampling import sampled


def test_sleepers_wake_in_the_order_of_virtual_time() -> None:
    clock, woken = exact_world(), []

    def sleeper(seconds: float) -> None:
        for _ in range(2):
            clock.sleep(seconds)
            woken.append((clock.now, seconds))

    clock.run(lambda: sleeper(3.0), lambda: sleeper(2.0))
    assert woken == [(2.0, 2.0), (3.0, 3.0), (4.0, 2.0), (6.0, 3.0)]
    assert clock.now == 6.0


def test_an_error_of_one_program_ends_the_run() -> None:
    clock = exact_world()

    def failing() -> None:
        clock.sleep(2.0)
        raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason"):
        clock.run(failing, lambda: clock.sleep(5.0))
    assert clock.now == 2.0


@pytest.mark.slow
def test_pilots_on_failing_files_keep_nine_tenths_of_their_pace(tmp_path: Path) -> None:
    """One of fifty calls fails."""
    clean, failing = (run(case, 12, tmp_path / case.name) for case in (Case(), Case(rate=0.02)))
    assert failing.failed > 5
    assert failing.per_hour >= 0.9 * clean.per_hour
    assert (failing.done, failing.final_rows, failing.repeated, failing.gave_up) == (12, 12, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(8), 1, seconds=8))
def test_every_point_has_one_final_row_whoever_is_killed(seed: int, tmp_path: Path) -> None:
    ran = run(Case(rate=0.02, kills=True), 100, tmp_path / "sweep", seed)
    assert (ran.done, ran.final_rows, ran.unmarked, ran.gave_up) == (100, 100, 0, 0)


@pytest.mark.exhaustive(seconds=120)
def test_killed_pilots_on_failing_files_keep_four_fifths_of_their_pace(tmp_path: Path) -> None:
    """A thousand points, so that the wait for the points of the pilots killed last counts for little."""
    clean, failing = (run(case, 1000, tmp_path / case.name) for case in (Case(), Case(rate=0.02, kills=True)))
    assert failing.killed > 5
    assert failing.per_hour >= 0.8 * clean.per_hour
    assert (failing.done, failing.final_rows, failing.unmarked, failing.gave_up) == (1000, 1000, 0, 0)
