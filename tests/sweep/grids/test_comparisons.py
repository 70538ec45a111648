"""Comparisons that can never hold, in expressions over names of known kinds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sweep.grids.comparisons import Kind, impossible, kind_of
from workloads.spec.checks import one_of
from workloads.spec.expressions import parse

KINDS: Mapping[str, Kind] = {"tp": "number", "sp": "flag", "model": "text", "kind": "text"}
WORDS = {"kind": one_of("ring", "none")}


@pytest.mark.parametrize(
    "text",
    [
        *("tp == 2", "tp in [1, 2.5]", "sp == 1", "sp == (tp > 1)", "model == 'a'", "model in ['a', 'b']"),
        *("'a' in model", "kind != 'none'", "kind in ('ring', 'none')", "unknown == 'a'", "unknown == 1"),
        *("(tp if sp else model) == 1", "model + 'b' == 'ab'", "'r' in kind", "max(tp, 2) == 2", "kind < 'z'"),
    ],
)
def test_what_can_hold_is_left_alone(text: str) -> None:
    assert impossible(parse(text, "here"), KINDS, WORDS) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp == '2'", 'tp is a number and "2" is a text, which are never equal; write 2 without quotes'),
        ("tp == 'two'", 'tp is a number and "two" is a text, which are never equal'),
        ("not ('1.5' != tp)", '"1.5" is a text and tp is a number, which are never equal; write 1.5 without quotes'),
        ("1 < tp <= '8'", 'tp is a number and "8" is a text, which are never equal; write 8 without quotes'),
        (
            "sp and tp not in [1, '2']",
            'tp is a number and "2" is a text, which are never equal; write 2 without quotes',
        ),
        (
            "sp == 'False'",
            'sp is true or false and "False" is a text, which are never equal; write False without quotes',
        ),
        ("model == 8", 'model is a text and 8 is a number, which are never equal; write "8"'),
        ("kind == 8", "kind is a text and 8 is a number, which are never equal; it may be ring or none"),
        ("tp * 2 == model", "tp * 2 is a number and model is a text, which are never equal"),
        ("min(tp, sp) == 'a'", 'min(tp, sp) is a number and "a" is a text, which are never equal'),
        ("tp == 1 if kind == 'rng' else sp", "kind='rng'; did you mean 'ring'? it may be ring or none"),
        ("'rings' in [kind]", "kind='rings'; did you mean 'ring'? it may be ring or none"),
    ],
)
def test_what_can_never_hold_is_named_with_what_to_write(text: str, said: str) -> None:
    assert impossible(parse(text, "here"), KINDS, WORDS) == said


def test_long_sums_are_read_once() -> None:
    """Each part is looked at once: twice at every sum would be 2^90 times."""
    assert kind_of(parse(" + ".join(["tp"] * 90), "here"), KINDS) == "number"
