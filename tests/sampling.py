"""Seeded samples: the part that an ordinary run has of what grows with every recorded sweep or takes long."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import date
from typing import Any

import pytest

SEED = os.environ.setdefault("TESTS_SEED", date.today().isoformat())
"""Today's date unless ``TESTS_SEED`` is given. Workers of pytest-xdist get that of the process that starts them."""
SHARE = float(os.environ.get("TESTS_SHARE", "1"))
"""Part of every sample that stays in the run: 0.5 halves all of them (CI); every kind of a sample stays. Of what takes
`LONG_SECONDS` or more each case or test stays with this probability, so a run may have none of a few."""
USUAL_SECONDS = 3.0
"""How long a test marked ``exhaustive`` takes unless the mark says so: ``exhaustive(seconds=20)``."""
LONG_SECONDS = 2.0
"""From here on a test is long: one in forty is, and these take half of all tests' time."""


def sampled(
    values: Sequence[Any],
    count: int,
    *,
    seconds: float = USUAL_SECONDS,
    kinds: Callable[[Any], Iterable[Hashable]] | None = None,
) -> list[Any]:
    """Parameters of a test (a tuple: of several arguments): ``count`` of them, drawn by the seed, in every run, the
    others only in exhaustive ones. ``kinds`` of a value: every draw has each of them, if need be with more values.
    ``seconds``: how long one takes; of long ones a share of ``count`` that is not whole is rounded by the seed."""
    draw = random.Random(SEED)
    order = draw.sample(range(len(values)), len(values))
    wanted = math.floor(count * SHARE + draw.random()) if seconds >= LONG_SECONDS else math.ceil(count * SHARE)
    drawn = _of_every_kind([(n, set(kinds(values[n]))) for n in order]) if kinds is not None else []
    drawn += [n for n in order if n not in drawn][: max(wanted - len(drawn), 0)]
    others = pytest.mark.exhaustive(seconds=seconds)
    words = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*of_one, marks=() if n in drawn else others) for n, of_one in enumerate(words)]


def _of_every_kind(values: Sequence[tuple[int, set[Hashable]]]) -> list[int]:
    """Those that together have every kind: each time the first of those with most kinds that are still missing."""
    missing = set[Hashable]().union(*(kinds for _, kinds in values))
    found = []
    while missing:
        n, kinds = max(values, key=lambda value: len(value[1] & missing))
        missing -= kinds
        found.append(n)
    return found


def some_of(names: Iterable[str], one_in: int, salt: str = "") -> set[str]:
    """About one in so many of the names, drawn by the seed and the ``salt``; at least one."""
    order = sorted(set(names))
    return set(random.Random(f"{SEED}/{salt}").sample(order, math.ceil(len(order) * SHARE / one_in)))


def stays(name: str, one_in: int = 1) -> bool:
    """Whether the seed leaves what is named in this run: one in so many runs has it, a `SHARE` of them in CI."""
    return random.Random(f"{SEED}/{name}").random() * one_in < SHARE


def seconds_of(item: pytest.Item) -> float:
    """About how long a test marked ``exhaustive`` takes."""
    mark = item.get_closest_marker("exhaustive")
    return float(mark.kwargs.get("seconds", USUAL_SECONDS)) if mark is not None else 0.0


def drawn_part(items: Sequence[pytest.Item], part: str) -> list[pytest.Item]:
    """Tests drawn by the seed of ``SECONDS/SEED`` until about so many seconds of one processor are used."""
    budget, _, seed = part.partition("/")
    if not seed or not budget.replace(".", "", 1).isdigit():
        raise pytest.UsageError(f"--exhaustive-part {part}: expected SECONDS/SEED, e.g. 90/{SEED}")
    left, drawn = float(budget), []
    for item in random.Random(seed).sample(list(items), len(items)):
        if seconds_of(item) <= left:
            left -= seconds_of(item)
            drawn.append(item)
    return drawn
