"""torchtitan 0.2.2 beside a newer one: `packages` gives it a folder of its own in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workloads.rules import installed_engines

TORCHTITAN_02 = Path(sys.prefix) / "torchtitan-0.2.2"


@pytest.fixture
def torchtitan_02(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchtitan 0.2.2 comes before the installed one, in this process and in those that it starts."""
    path = os.pathsep.join(filter(None, [str(TORCHTITAN_02), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(TORCHTITAN_02)
    installed_engines._version.cache_clear()
    yield
    installed_engines._version.cache_clear()
