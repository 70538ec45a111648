"""Python values become overrides that Hydra's grammar reads as the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sweep.composing.overrides import parse_override
from sweep.composing.words import word
from workloads.spec.errors import InvalidSweep

SAME = (
    *(None, True, False, 0, -3, 10**12, 1.5, 1e-9, 1e16, "bf16", "null", "True", "8", "0042", "1_000", "16-1024", ""),
    *("a b", "it's", "back\\slash", "end\\", 'say "x"', "a,b", "[1]", "{a:1}", "x=y", "${oc.env:HOME}", "inf", "e5"),
    *([1, 2], [], [[1, None], ["a", "it's"]], {"a": 1, "b": [1, "x y"]}, {}),
)


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_a_value_is_read_as_itself(value: object) -> None:
    read = parse_override(word("grid.axes.x", value)).value()
    assert type(read) is type(value) and read == value


def test_other_kinds_of_numbers_lists_and_paths_are_read_too() -> None:
    given = {"n": np.int64(3), "f": np.float64(0.5), "t": (1, 2), "r": range(1, 3)}
    given |= {"p": Path("a/b.json"), "q": Path("a")}
    read = {name: parse_override(word(name, value)).value() for name, value in given.items()}
    assert read == {"n": 3, "f": 0.5, "t": [1, 2], "r": [1, 2], "p": "a/b.json", "q": "./a"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, len, [len]], ids=repr)
def test_what_no_option_takes_is_refused(value: object) -> None:
    with pytest.raises(InvalidSweep, match=r"^grid\.axes\.x=.*: give a number, a text"):
        word("grid.axes.x", value)
