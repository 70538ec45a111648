"""Seeded samples: every case in some run, the same part for the same seed, and no more than its seconds."""

from __future__ import annotations

import pytest

from tests.conftest import _leave_to_exhaustive_runs
from tests.sampling import LONG_SECONDS, USUAL_SECONDS, drawn_part, sampled, seconds_of, some_of, stays

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without ``TESTS_SHARE``, which CI sets."""
    monkeypatch.setattr("tests.sampling.SHARE", 1.0)


def test_a_share_of_samples_keeps_every_kind_and_one_case_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.sampling.SHARE", 0.5)
    drawn = [sum(not one.marks for one in sampled(range(40), count, seconds=1.0)) for count in (1, 3, 10)]
    assert drawn == [1, 2, 5]
    assert sum(not one.marks for one in sampled(range(40), 4, kinds=lambda n: [n % 3])) == 3
    assert [len(some_of("abcdef", one_in)) for one_in in (2, 9)] == [2, 1]


def test_of_long_cases_a_share_that_is_not_whole_is_rounded_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.sampling.SHARE", 0.5)
    found: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    for seed in range(40):
        monkeypatch.setattr("tests.sampling.SEED", str(seed))
        for count in found:
            found[count].add(sum(not one.marks for one in sampled(range(40), count, seconds=LONG_SECONDS)))
    assert found == {1: {0, 1}, 2: {1}, 3: {1, 2}}


def test_what_is_not_drawn_is_left_to_exhaustive_runs() -> None:
    parameters = sampled(range(40), 3, seconds=7.0)
    assert [parameter.values for parameter in parameters] == [(number,) for number in range(40)]
    left = [parameter for parameter in parameters if parameter.marks]
    assert len(left) == 37 and all(mark.kwargs == {"seconds": 7.0} for parameter in left for mark in parameter.marks)
    assert parameters == sampled(range(40), 3, seconds=7.0)
    assert not any(parameter.marks for parameter in sampled("ab", 3))


def test_every_draw_has_every_kind() -> None:
    values = [("rare", n) for n in range(2)] + [("usual", n) for n in range(40)]

    def in_every_run(count: int) -> list[tuple[str, int]]:
        parameters = sampled(values, count, kinds=lambda value: (value[0], value[1] % 3))
        return [parameter.values for parameter in parameters if not parameter.marks]

    assert {word for word, _ in in_every_run(0)} == {"rare", "usual"}
    assert {n % 3 for _, n in in_every_run(0)} == {0, 1, 2} and len(in_every_run(0)) == 3
    assert len(in_every_run(9)) == 9 and set(in_every_run(0)) < set(in_every_run(9))


def test_every_name_is_in_some_draw_and_some_name_in_every_draw() -> None:
    names = ["a", "b", "c", "d", "e"]
    draws = [some_of(names * 2, 2, f"file {n}") for n in range(40)]
    assert all(len(draw) == 3 for draw in draws) and set().union(*draws) == set(names)
    assert some_of(names, 2, "x") == some_of(names[::-1], 2, "x")
    assert some_of(["alone"], 9) == {"alone"}


DRAWN = """
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]
def test_a(): pass
@pytest.mark.parametrize("n", range(4))
def test_b(n): pass
def test_c(): pass
"""


@pytest.mark.slow
def test_a_file_keeps_a_part_of_its_slow_tests(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(DRAWN)
    _leave_to_exhaustive_runs(items)
    left = [item.name for item in items if not item.get_closest_marker("exhaustive")]
    (kept,) = some_of(["test_a", "test_b", "test_c"], 3, items[0].nodeid.partition("::")[0])
    assert left == [item.name for item in items if item.name.startswith(kept)], "whole functions"


LONG = """
import pytest
@pytest.mark.slow(seconds=9)
@pytest.mark.parametrize("n", range(20))
def test_long(n): pass
@pytest.mark.slow(seconds=9, always=True)
def test_always(): pass
@pytest.mark.slow(seconds=9)
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_sampled(n): pass
@pytest.mark.slow
def test_usual(): pass
"""


@pytest.mark.slow
def test_where_samples_are_shared_so_are_tests_that_take_long(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = pytester.getitems(LONG)
    _leave_to_exhaustive_runs(items)
    assert len([item for item in items if not item.get_closest_marker("exhaustive")]) == len(items) - 1
    monkeypatch.setattr("tests.sampling.SHARE", 0.5)
    _leave_to_exhaustive_runs(items)
    left = [item for item in items if item.get_closest_marker("exhaustive")]
    long = [item for item in items if item.name.startswith("test_long")]
    assert left == [*(item for item in long if not stays(item.nodeid)), items[-2]] and 4 < len(left) < 18
    assert {seconds_of(item) for item in left[:-1]} == {9.0}, "what a part of the exhaustive tests reckons with"


@pytest.mark.slow
def test_a_file_of_one_expensive_start_stays_whole_or_not_at_all(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DRAWN.replace("one_in=3", "one_in=2, whole=True")
    counts = set()
    for seed in range(20):
        monkeypatch.setattr("tests.sampling.SEED", str(seed))
        items = pytester.getitems(text)
        _leave_to_exhaustive_runs(items)
        counts.add(sum(item.get_closest_marker("exhaustive") is None for item in items))
    assert counts == {0, 6}


@pytest.fixture
def items(pytester: pytest.Pytester) -> list[pytest.Item]:
    return pytester.getitems(
        "import pytest\n"
        "@pytest.mark.exhaustive(seconds=50)\ndef test_long(): pass\n"
        "@pytest.mark.exhaustive\n@pytest.mark.parametrize('n', range(40))\ndef test_usual(n): pass\n"
    )


@pytest.mark.slow
def test_a_part_is_drawn_by_its_seed_and_within_its_seconds(items: list[pytest.Item]) -> None:
    assert [seconds_of(item) for item in items] == [50.0, *[USUAL_SECONDS] * 40]
    parts = {seed: [item.name for item in drawn_part(items, f"30/{seed}")] for seed in ("a", "b")}
    assert parts["a"] != parts["b"] and parts["a"] == [item.name for item in drawn_part(items, "30/a")]
    assert all(len(part) == 10 and "test_long" not in part for part in parts.values())
    assert {item.name for item in drawn_part(items, "170/a")} == {item.name for item in items}


@pytest.mark.parametrize("part", ["90", "90/", "many/a"])
def test_a_part_without_seconds_or_seed_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="expected SECONDS/SEED"):
        drawn_part([], part)
