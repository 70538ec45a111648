"""`BatchSystem`: the interface to the batch system that gave a pilot its allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launchers.pilot.allocation import Allocation
from launchers.state.sweep_dir import SweepDir

LOOK_S = 1.0
"""Seconds between two queries for ended tasks while nodes start."""


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A process of a pilot's job (one per node) that has ended or could not be started."""

    node: str
    task: int | None
    """Its number in the job, 0 for the pilot itself; None if unknown."""
    reason: str


class BatchSystem(Protocol):
    """The batch system, as the processes of one job see it."""

    def nodes(self) -> Sequence[str]:
        """The nodes of this job; empty if unknown."""

    def ended_tasks(self, sweep: SweepDir, place: Allocation) -> Sequence[EndedTask]:
        """The tasks of this job that have ended since it was last started."""

    def requeue(self, sweep: SweepDir, place: Allocation) -> str | None:
        """Ask for a later restart of this job. Returns None when it will come, or why it will not."""

    def seconds_left(self, place: Allocation) -> float | None:
        """Seconds until the batch system ends this job; infinite without a limit, None where it does not say."""


def is_environment_fault(failed: int, of: int) -> bool:
    """Whether the environment rather than the nodes is to blame: more than one node failed to start, and most of all
    nodes did."""
    return failed > 1 and 2 * failed > of
