"""What pilots ask of a shared filesystem stays small, and does not grow with the number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.launchers.file_calls import calls_a_point, calls_a_second

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_pilot_makes_few_calls_whatever_the_number_of_its_ranks(tmp_path: Path, ranks: int) -> None:
    rate = calls_a_second(tmp_path / "sweep", ranks)
    assert rate.pilot <= 20
    assert rate.ranks < 1  # they beat in memory


def test_a_point_costs_few_calls(tmp_path: Path) -> None:
    few, many = (sum(calls_a_point(tmp_path / str(count), count).values()) for count in (8, 24))
    assert few <= 40 and many <= 40
