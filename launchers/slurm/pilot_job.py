"""The command of a Slurm job on each of its nodes: a pilot that queries Slurm about its own job.

``python -m launchers.slurm.pilot_job SWEEP_DIR CONFIG_ID``: see `launchers.pilot.command`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launchers.node.fork import RunRank
from launchers.pilot import command
from launchers.pilot.allocation import Allocation
from launchers.pilot.batch_system import EndedTask
from launchers.slurm import srun_log
from launchers.slurm.client import SlurmClient
from launchers.state.sweep_dir import SweepDir


class SlurmJob:
    """Slurm as a `launchers.pilot.batch_system.BatchSystem`, seen from the processes of one job."""

    def __init__(self) -> None:
        self._client = SlurmClient()

    def nodes(self) -> Sequence[str]:
        return self._client.hostnames(os.environ.get("SLURM_JOB_NODELIST", ""))

    def ended_tasks(self, sweep: SweepDir, place: Allocation) -> Sequence[EndedTask]:
        return srun_log.ended_tasks(sweep, place.pilot_id, place.job, self._client) if place.job is not None else []

    def requeue(self, job: str) -> bool:
        return self._client.requeue(job)


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None) -> int:
    """Run `launchers.pilot.command.main` with Slurm as the batch system."""
    return command.main(argv, run_rank=run_rank, batch=SlurmJob())


if __name__ == "__main__":
    sys.exit(main())
