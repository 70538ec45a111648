"""The language of ``derive`` and ``where``: what it computes, and what it refuses."""

from __future__ import annotations

import pytest

from workloads.spec.errors import InvalidSweep
from workloads.spec.expressions import as_data, compile_tests, parse, parse_template


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("world_size / (tp * pp)", 3),  # 24 / (4 * 2), whole and an int
        ("tp / world_size", 4 / 24),
        ("world_size // 5 + world_size % 5", 8),
        ("min(tp, pp) + max(1, pp) - abs(-pp)", 2),
        ("tp in [1, 4] and not pp > 2", True),
        ("1 < pp < tp <= 4", True),
        ("1 < pp < tp < 4", False),
        ("recompute != 'none' or tp not in (1, 2)", True),
        ("tp if recompute == 'none' else pp", 4),
        ("(tp > 1) + (pp > 1) <= 2", True),
        ("-pp", -2),
    ],
)
def test_values(text: str, expected: object) -> None:
    value = parse(text, "here").evaluate({"world_size": 24, "tp": 4, "pp": 2, "recompute": "none"})
    assert value == expected
    assert type(value) is type(expected)


def test_names_are_those_read() -> None:
    assert parse("world_size / (tp * pp) if nodes > 1 else 8", "here").names == {"world_size", "tp", "pp", "nodes"}


def test_and_or_stop_at_the_first_answer() -> None:
    assert parse("tp == 1 or world_size / zero > 1", "here").evaluate({"tp": 1, "world_size": 8, "zero": 0}) is True


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "tp.__class__",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "tp[0]",
        "2 ** 100",
        "f'{tp}'",
        "min(key=1)",
        "min(*tp)",
        "tp := 3",
        "{1: 2}",
        "1 << 40",
        "tp is 1",
        "None",
        "...",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidSweep, match=r"^grid g: where\.x") as error:
        parse(text, "grid g: where.x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["tp *", "", "tp = 3", "import os", "(" * 500])
def test_unreadable_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidSweep, match=r"here: (cannot read|the expression|.*not allowed)"):
        parse(text, "here")


@pytest.mark.parametrize("text", ["'a' * 1000000", "'%1000000d' % 3", "[1] * 1000000"])
def test_texts_cannot_grow(text: str) -> None:
    with pytest.raises(TypeError, match="not both numbers"):
        parse(text, "here").evaluate({})


def test_values_cannot_grow() -> None:
    """Each derived value may use the one before it: squares and doubled texts would soon fill the memory."""
    with pytest.raises(OverflowError, match=r"1000000000000000000 \* 1000000000000000000 is above 1e\+30"):
        parse("a * a", "here").evaluate({"a": 10**18})
    with pytest.raises(OverflowError, match="a text of 1,800 characters is longer than 1,000"):
        parse("a + a", "here").evaluate({"a": "x" * 900})
    with pytest.raises(InvalidSweep, match=r"here: a number above 1e\+30 in '9+…? is not allowed"):
        parse("9" * 400, "here")
    assert parse("a * a + 1", "here").evaluate({"a": 10**9}) == 10**18 + 1


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("num_heads % (2 * tp)", ["%", "num_heads", ["*", 2, "tp"]]),
        ("not sp or -pp < 3", ["or", ["not", "sp"], ["<", ["-", "pp"], 3]]),
        ("1 < pp <= tp", ["and", ["<", 1, "pp"], ["<=", "pp", "tp"]]),
        ("kind not in ('a', 'b')", ["not in", "kind", ["list", ["text", "a"], ["text", "b"]]]),
        ("1 if tp == 2 else max(pp, 3)", ["if", ["==", "tp", 2], 1, ["max", "pp", 3]]),
    ],
)
def test_expressions_as_data(text: str, data: object) -> None:
    assert as_data(parse(text, "here")) == data


def test_templates_are_filled() -> None:
    template = parse_template("tp={tp}: {half(tp)} or {[1, 2]}", "here", {"half": lambda value: value // 2})
    assert template.fill({"tp": 8}) == "tp=8: 4 or 1, 2"
    with pytest.raises(InvalidSweep, match=r"here: .*open.* is not allowed"):
        parse_template("{open('x')}", "here")


def test_a_variable_may_have_any_name() -> None:
    """Names of the generated source, of builtins and of functions are a grid's own where it says so."""
    values = {"env": 2, "_multiply": 3, "min": 5, "f_min": 7, "v_tp": 11, "print": 13, "größe": 17}
    for name, value in values.items():
        assert parse(f"{name} * 1", "here").evaluate(values) == value
    assert parse("min(min, 4)", "here").evaluate(values) == 4


def test_no_builtin_can_be_reached() -> None:
    evaluate = parse("a + b", "here").evaluate
    assert evaluate.__globals__["__builtins__"] == {}  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        parse("open", "here").evaluate({})


def test_many_tests_in_one_function() -> None:
    functions = {"half": lambda value: value // 2}
    tests = [parse(text, "here", functions) for text in ("tp > 2", "size % 3", "half(size) == 6 and size in (12, 13)")]
    derived = {"size": parse("tp * pp", "here", functions)}
    compiled = compile_tests(("tp", "pp", "unused"), derived, tests, functions)
    assert compiled(1, 3, None) == []
    assert compiled(4, 3, None) == [0, 2]
    assert compiled(2, 4, None) == [1]


def test_a_sum_of_a_hundred_terms_is_taken_and_one_of_thousands_is_refused_in_one_line() -> None:
    assert parse(" + ".join(["tp"] * 100), "here").evaluate({"tp": 2}) == 200
    with pytest.raises(InvalidSweep, match="here: the expression is nested too deeply"):
        parse(" + ".join(["tp"] * 5000), "here")
