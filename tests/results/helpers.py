"""Small rows of every table, and a sweep folder to put them into."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from results.schema import MEASUREMENT_VERSION, SCHEMA_VERSION


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
