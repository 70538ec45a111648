"""What users wrote is taken as it is or refused in one line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import pytest

from workloads.spec import checks
from workloads.spec.checks import did_you_mean
from workloads.spec.errors import InvalidExperiment, InvalidSweep


@dataclasses.dataclass(frozen=True)
class Link:
    bandwidth: float
    latency_s: float
    source: str = ""


def test_what_is_right_comes_back() -> None:
    assert checks.whole_number("a", 3, 3) == 3
    assert checks.whole_number("a", -3) == -3
    assert checks.number("a", 0, least=0) == 0
    assert checks.number("a", math.inf, above=0) == math.inf
    assert checks.flag("a", False) is False
    assert checks.text("a", "") == ""
    assert checks.matching("a", "12", re.compile("[0-9]+"), "digits") == "12"
    assert checks.choice("a", "y", ("x", "y")) == "y"
    assert checks.mapping("a", {1: 2}) == {"1": 2}
    assert checks.sequence("a", (1, 2)) == [1, 2]
    assert checks.build(Link, "a", {"bandwidth": 1.0, "latency_s": 2.0}) == Link(1.0, 2.0)


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (lambda: checks.whole_number("x: a", 0, 1), "x: a=0 must be a whole number of at least 1"),
        (lambda: checks.whole_number("a", True, 1), "a=True must be a whole number of at least 1"),
        (lambda: checks.whole_number("a", 1.0), "a=1.0 must be a whole number"),
        (
            lambda: checks.whole_number("a", 2**63, 1),
            "a=9223372036854775808 must be a whole number of at least 1, at most 9,223,372,036,854,775,807",
        ),
        (lambda: checks.number("a", 10**40, above=0), f"a={10**40} must be a number above 0, at most 1e+30"),
        (
            lambda: checks.whole_numbers(1).check("a", 10**400),
            f"a=1{'0' * 98}… must be a whole number of at least 1, at most 9,223,372,036,854,775,807",
        ),
        (lambda: checks.number("a", "1", above=0, unit="seconds"), "a='1' must be a number of seconds above 0"),
        (lambda: checks.number("a", -0.5, least=0), "a=-0.5 must be a number of at least 0"),
        (lambda: checks.number("a", math.nan), "a=nan must be a number"),
        (lambda: checks.number("a", False), "a=False must be a number"),
        (lambda: checks.flag("a", 1), "a=1 must be true or false"),
        (lambda: checks.text("a", None), "a=None must be text"),
        (lambda: checks.matching("a", "1x", re.compile("[0-9]+"), "digits"), "a='1x' must be digits"),
        (lambda: checks.choice("a", "z", ("x", "y", "w")), "a='z'; it may be x, y or w"),
        (lambda: checks.mapping("a", [1]), "a=[1] must be a mapping, NAME: VALUE"),
        (lambda: checks.sequence("a", "word"), "a='word' must be a list, such as ['...','...']"),
        (
            lambda: checks.build(Link, "link", {"bandwith": 1.0}),
            "link: no option 'bandwith'; did you mean 'bandwidth'? known: bandwidth, latency_s, source; "
            "write bandwidth: 1.0; link: latency_s must be given; write for example latency_s: 5 us",
        ),
        (
            lambda: checks.build(Link, "link", {"source": "?"}),
            "link: bandwidth, latency_s must be given; write for example bandwidth: 50 GB/s and latency_s: 5 us",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(check: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidSweep) as error:
        check()
    assert str(error.value) == told


def test_another_error_may_be_raised() -> None:
    with pytest.raises(InvalidExperiment, match="a=0 must be a whole number"):
        checks.whole_number("a", 0, 1, error=InvalidExperiment)


def test_nothing_close_is_not_suggested() -> None:
    assert checks.suggest("zzz", ["b", "a"]) == "; known: a, b"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("h100", "; did you mean 'h100_efa' or 'h100_ib400'?"),
        ("ib400", "; did you mean 'h100_ib400'?"),
        ("H100-EFA", "; did you mean 'h100_efa'?"),
        ("lama8b", "; did you mean 'llama8b'?"),
        ("h800", ""),  # another device, not a misspelt one
        ("gh200", ""),
        ("llama7b", ""),  # another model
        ("mail_user", ""),
    ],
)
def test_suggestions_do_not_mislead(word: str, said: str) -> None:
    known = ("h100_efa", "h100_ib400", "h200", "gb200", "llama8b", "llama70b", "max_pilots")
    assert did_you_mean(word, known) == said
