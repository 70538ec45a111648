"""Small rows of every table, and a sweep folder to put them into."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from results.tables.schema import MEASUREMENT_VERSION, SCHEMA_VERSION


def make_sweep(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "sweep.json").write_text("{}")
    return path


def attempt(attempt_id: str, **columns: Any) -> dict[str, Any]:
    return {
        "attempt_id": attempt_id,
        "experiment_id": f"experiment-{attempt_id}",
        "schema_version": SCHEMA_VERSION,
        "measurement_version": MEASUREMENT_VERSION,
        "method": "measured",
        "outcome": "ok",
        "started_at": datetime(2025, 2, 19, 12, 0, tzinfo=UTC),
        "step_time_s": 0.5,
        "peak_allocated_bytes": 3 * 2**30,
        "losses": [11.7, None, 11.2],
        "hosts": ["node1", "node2"],
        "git_dirty": False,
    } | columns


def steps(attempt_id: str, ranks: int = 2, count: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "attempt_id": attempt_id,
            "experiment_id": f"experiment-{attempt_id}",
            "measurement_version": MEASUREMENT_VERSION,
            "rank": rank,
            "step": step,
            "is_warmup": step == 0,
            "step_time_s": 0.5,
        }
        for rank in range(ranks)
        for step in range(count)
    ]


class PausedThread:
    """Stops the thread of a given name just before it removes or renames ``path`` or something in it for the first
    time, until ``go_on`` is set. Everything that it has read before is old by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._name, self._path = name, path
        for function in ("unlink", "rename", "rmdir"):
            monkeypatch.setattr(os, function, self._pausing(getattr(os, function)))

    def _pausing(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *args: Any, **kwargs: Any) -> None:
            target = Path(path) == self._path or Path(path).parent == self._path
            if target and threading.current_thread().name == self._name and not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(30)
            original(path, *args, **kwargs)

        return call
