"""What a pilot asks of the batch system that gave it its allocation. Without one there is nobody to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launchers.pilot.allocation import Allocation
from launchers.state.sweep_dir import SweepDir

LOOK_S = 1.0
"""Between two questions for ended tasks while nodes start."""


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A process of a pilot's job, one a node, that has ended or could not be started."""

    node: str
    task: int | None
    """Its number in the job, 0 for the pilot itself; None where it is not known."""
    reason: str


class BatchSystem(Protocol):
    """The batch system, as the processes of one job see it."""

    def nodes(self) -> Sequence[str]:
        """The nodes of this job; empty when that cannot be found out."""

    def ended_tasks(self, sweep: SweepDir, place: Allocation) -> Sequence[EndedTask]:
        """The tasks of this job that have ended since it was last started."""

    def requeue(self, job: str) -> bool:
        """Have this job started again later; False when the batch system refuses."""


def is_environment(failed: int, of: int) -> bool:
    """Whether so many of all nodes failed to start that it is not for the nodes: most of them, and more than one."""
    return failed > 1 and 2 * failed > of
