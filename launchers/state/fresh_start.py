"""Describes a sweep anew for another cluster, as long as none of its points has ever begun."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launchers.state import pilot_state, submissions
from launchers.state.process_identity import provably_dead
from launchers.state.sweep_dir import SweepDir, entry_names
from results.errors import InvalidResults
from workloads.contract.protocol import read_json, write_json

_ROWS = ("attempts.parquet", "steps.parquet")


def has_begun(sweep: SweepDir) -> bool:
    """Whether any point was ever claimed or has a row."""
    folders = (sweep.claimed, sweep.done, sweep.history, sweep.attempts, sweep.path / "parts" / "attempts")
    return sweep.archived or any(map(_holds_anything, folders)) or any((sweep.path / rows).exists() for rows in _ROWS)


def has_pilots(sweep: SweepDir) -> bool:
    """Whether a pilot may be alive, or may still come from Slurm."""
    everything = submissions.all_submissions(sweep)
    cancelled = submissions.cancelled_among(sweep, everything)
    coming = any(one.open and one.token not in cancelled for one in everything)
    states = pilot_state.all_states(sweep)
    return coming or any(state.activity != "ended" and not provably_dead(state.identity) for state in states)


def describe_anew(sweep: SweepDir, settings: Mapping[str, Any]) -> None:
    """Store other ``settings`` and empty the queue, whose points were predicted for other devices."""
    for name in entry_names(sweep.todo):
        (sweep.todo / name).unlink(missing_ok=True)
    try:
        write_json(sweep.marker, {**read_json(sweep.marker), "settings": dict(settings)})
    except OSError as error:
        raise InvalidResults(f"cannot write {sweep.marker}: {error.strerror or error}") from None


def _holds_anything(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return any(folder.iterdir())
    return False
