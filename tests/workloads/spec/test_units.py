"""Quantities with units, as users write them in cluster files and options."""

from __future__ import annotations

import re

import pytest

from workloads.spec.errors import InvalidSweep
from workloads.spec.units import Unit, quantity, seconds


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("50 GB/s", "B/s", 50e9),
        ("50GB/s", "B/s", 50e9),
        ("400 Gb/s", "B/s", 50e9),  # bits
        ("200 Gbit/s", "B/s", 25e9),
        ("1 GiB/s", "B/s", 2.0**30),
        ("80 GiB", "B", 80 * 2**30),
        ("1.5 GB", "B", 1_500_000_000),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("2.25 PFLOPS", "FLOP/s", 2.25e15),
        ("5 us", "s", 5e-6),
        ("5 µs", "s", 5e-6),
        ("2 min", "s", 120.0),
        ("12.5e9", "B/s", 12.5e9),  # as other readers of YAML leave a number
        (12.5e9, "B/s", 12.5e9),
        (80e9, "B", 80_000_000_000),
        (None, "B", None),
    ],
)
def test_quantities(text: object, unit: Unit, value: object) -> None:
    found = quantity("here", text, unit)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "unit", "told"),
    [
        (
            "50 GX/s",
            "B/s",
            "here='50 GX/s': 'GX/s' is not a unit of bandwidth; write it like '50 GB/s', or as a number of B/s",
        ),
        ("50 gb/s", "B/s", "'gb/s' is not a unit of bandwidth; write"),
        ("80 GB/s", "B", "'GB/s' is not a unit of memory; write it like '80 GiB'"),
        ("fast", "B/s", "here='fast' must be a number of B/s, or a number with a unit, such as '50 GB/s'"),
        ("5 lightyears", "s", "'lightyears' is not a unit of time"),
    ],
)
def test_what_is_no_quantity_is_said_in_one_line(text: str, unit: Unit, told: str) -> None:
    with pytest.raises(InvalidSweep) as error:
        quantity("here", text, unit)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_seconds_leave_everything_else_alone() -> None:
    assert seconds("here", "2 h") == 7200
    assert seconds("here", 3) == 3
    assert seconds("here", "abc") == "abc"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("02:00:00", 7200),
        ("2:05:09", 7509),
        ("100:00:00", 360_000),
        ("1-0", 86_400),
        ("1-12:30", 131_400),
        ("2-00:00:01", 172_801),
        ("1 d", 86_400),
        ("90 min", 5400),
    ],
)
def test_times_as_slurm_writes_them(text: str, expected: float) -> None:
    assert seconds("here", text) == expected


@pytest.mark.parametrize("text", ["120:00", "2 hours", "02:75:00", "2h30", "1-12:30:00:00"])
def test_other_times_are_refused_with_examples_of_a_time_limit(text: str) -> None:
    with pytest.raises(InvalidSweep, match=re.escape("write it like '2 h' or '02:00:00'")) as error:
        seconds("launcher.time_min", text)
    assert f"launcher.time_min='{text}'" in str(error.value)
