"""Numbers, sizes, times and lists as people read them."""

from __future__ import annotations

import math

import pytest

from results.text import numbers as text


@pytest.mark.parametrize(
    ("count", "noun", "nouns", "told"),
    [
        (1, "point", None, "1 point"),
        (0, "point", None, "0 points"),
        (1234, "point", None, "1,234 points"),
        (2, "CPU process", None, "2 CPU processes"),
        (2, "model and size", "models and sizes", "2 models and sizes"),
    ],
)
def test_plural(count: int, noun: str, nouns: str | None, told: str) -> None:
    assert text.plural(count, noun, nouns) == told


@pytest.mark.parametrize(
    ("items", "told"),
    [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")],
)
def test_listed(items: list[str], told: str) -> None:
    assert text.listed(items) == told


def test_a_long_list_is_cut_and_the_rest_counted() -> None:
    assert text.listed("abcdefgh") == "a, b, c, d, e, f and 2 more"
    assert text.listed("abc", most=1) == "a and 2 more"


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0"), (1.0, "1"), (0.25, "0.25"), (1 / 3, "0.333333"), (8, "8"), (2e6, "2000000"), ("1f1b", "1f1b")],
)
def test_settings_are_written_without_needless_zeros(value: object, told: str) -> None:
    assert text.format_setting(value) == told


@pytest.mark.parametrize(
    ("ranks", "told"), [([3], "rank 3"), ([2, 0, 1, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3"), ([0, 1], "ranks 0-1")]
)
def test_ranks(ranks: list[int], told: str) -> None:
    assert text.name_ranks(ranks) == told


@pytest.mark.parametrize(
    ("size", "digits", "told"),
    [
        (1.5 * text.GIB, 1, "1.5 GiB"),
        (1.5 * text.GIB, 2, "1.50 GiB"),
        (0.1 * text.GIB, 1, "0.1 GiB"),
        (64 * text.MIB, 1, "64.0 MiB"),
        (0, 2, "0.00 MiB"),
        (None, 1, "–"),
        (math.nan, 1, "–"),
    ],
)
def test_bytes(size: float | None, digits: int, told: str) -> None:
    assert text.format_bytes(size, digits) == told


def test_unit_of_an_axis() -> None:
    assert text.byte_unit(text.GIB) == (2**30, "GiB")
    assert text.byte_unit(text.GIB - 1) == (2**20, "MiB")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(4.2, "4 s"), (99.9, "100 s"), (100, "2 min"), (150, "2 min"), (5999, "1 h 40 min"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, told: str) -> None:
    assert text.format_duration(seconds) == told


def test_hours() -> None:
    assert [text.format_hours(value) for value in (0.254, 99.5, 1234.5, None)] == ["0.25", "99.50", "1,234", "?"]
    assert text.format_hours(None, unknown="unknown") == "unknown"


def test_numbers_and_percent() -> None:
    assert [text.format_number(value) for value in (1.2345, 99.96, -123.4, 12345, None, math.nan)] == [
        "1.23",
        "100",
        "-123",
        "12,345",
        "–",
        "–",
    ]
    assert [text.format_percent(value) for value in (0.1234, None, math.inf)] == ["12.3 %", "–", "–"]
    assert text.format_percent(0.1234, 0) == "12 %"


def test_a_short_id_keeps_its_hash() -> None:
    long = "llama8b-dp4z3-tp2-mbs2-gbs64-s4096-1f3c9a0e"
    assert text.short_id(long, 60) == long
    assert text.short_id(long, 24) == "llama8b-dp4z3-t…1f3c9a0e"
    assert len(text.short_id(long, 24)) == 24
    assert text.short_id(long, 3).endswith("…1f3c9a0e")


def test_a_rank_of_a_cpu_is_no_gpu() -> None:
    assert [text.device_noun(backend) for backend in ("cuda", "cpu", None)] == ["GPU", "process", "GPU"]
