"""The number of a pilot's calls on a shared filesystem stays small, and does not grow with the number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.launchers.file_calls import RANKS, Rate, calls_a_point, calls_a_second

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]


@pytest.fixture(scope="module")
def rate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Rate]:
    """Calls per second at a number of ranks, each measured once, in about ten seconds."""
    return cache(lambda ranks: calls_a_second(tmp_path_factory.mktemp("ranks") / "sweep", ranks))


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(ranks, marks=() if ranks in (min(RANKS), max(RANKS)) else pytest.mark.exhaustive(seconds=10))
        for ranks in RANKS
    ],
)
def test_a_pilot_makes_few_calls_whatever_the_number_of_its_ranks(rate: Callable[[int], Rate], ranks: int) -> None:
    found = rate(ranks)
    assert 0 < found.pilot <= 20
    assert found.ranks < 1  # they beat in memory


def test_the_calls_do_not_grow_with_the_ranks(rate: Callable[[int], Rate]) -> None:
    low, high = sorted(rate(ranks).pilot for ranks in (min(RANKS), max(RANKS)))
    assert high < 1.5 * low


@pytest.mark.slow(seconds=3)
def test_a_point_costs_few_calls(tmp_path: Path) -> None:
    few, many = (sum(calls_a_point(tmp_path / str(count), count).values()) for count in (4, 12))
    assert few <= 56 and many <= 56  # 15 of them pack the attempt, beside the next point
