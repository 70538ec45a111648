"""Seeded samples: every case in some run, the same part for the same seed, and no more than its seconds."""

from __future__ import annotations

import pytest

from tests.sampling import USUAL_SECONDS, drawn_part, sampled, seconds_of

pytest_plugins = ["pytester"]


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
