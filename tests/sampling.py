"""Seeded samples: the part that an ordinary run has of what grows with every recorded sweep or takes long."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest

SEED = os.environ.setdefault("TESTS_SEED", date.today().isoformat())
"""Today's date unless ``TESTS_SEED`` is given. Workers of pytest-xdist get that of the process that starts them."""
USUAL_SECONDS = 3.0
"""How long a test marked ``exhaustive`` takes unless the mark says so: ``exhaustive(seconds=20)``."""


def sampled(values: Sequence[Any], count: int, *, seconds: float = USUAL_SECONDS) -> list[Any]:
    """Parameters of a test (a tuple: of several arguments): ``count`` of them, drawn by the seed, in every run, the
    others only in exhaustive ones."""
    drawn = random.Random(SEED).sample(range(len(values)), min(count, len(values)))
    others = pytest.mark.exhaustive(seconds=seconds)
    words = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*of_one, marks=() if n in drawn else others) for n, of_one in enumerate(words)]


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
