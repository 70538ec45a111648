"""Reading the queue of a sweep as a pilot does."""

from __future__ import annotations

from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import Point, SweepDir


def everything(waiting: list[Point]) -> list[Point]:
    return waiting


def queue_reader(sweep: SweepDir, pilot_id: str, said: list[str] | None = None) -> QueueReader:
    """``said`` collects the lines that the reader reports."""
    return QueueReader(sweep, pilot_id, (said if said is not None else []).append)
