"""The command of a Slurm job on each of its nodes: a pilot that queries Slurm about its own job.

``python -m launchers.slurm.pilot_job SWEEP_DIR CONFIG_ID``: see `launchers.pilot.command`. The pilot may run in an
image without Slurm's commands. Then the environment and the job's script, which runs outside the image, help instead.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence

from launchers.node.fork import RunRank
from launchers.pilot import command
from launchers.pilot.allocation import Allocation
from launchers.pilot.batch_system import EndedTask
from launchers.slurm import srun_log
from launchers.slurm.client import SlurmClient
from launchers.slurm.host_list import hostnames
from launchers.state import pilot_state
from launchers.state.sweep_dir import SweepDir

_CALL_LIMIT_S = 5.0
"""Time limit of a question about the job's end: meanwhile the pilot starts no point and writes no state."""


class SlurmJob:
    """Slurm as a `launchers.pilot.batch_system.BatchSystem`, seen from the processes of one job."""

    def __init__(self) -> None:
        self._client = SlurmClient()
        self._brief_client = SlurmClient(call_limit_s=_CALL_LIMIT_S)
        self._end_known = False
        """Whether squeue has shown the job's end. The environment only has the end at the job's start."""

    def nodes(self) -> Sequence[str]:
        return hostnames(os.environ.get("SLURM_JOB_NODELIST", ""))

    def ended_tasks(self, sweep: SweepDir, place: Allocation) -> Sequence[EndedTask]:
        return srun_log.ended_tasks(sweep, place.pilot_id, place.job) if place.job is not None else []

    def requeue(self, sweep: SweepDir, place: Allocation) -> str | None:
        assert place.job is not None
        if all(shutil.which(name) is not None for name in ("squeue", "scontrol")):
            return self._client.requeue(place.job)
        try:
            pilot_state.requeue_request(sweep, place.pilot_id).touch()
        except OSError as error:
            return f"squeue or scontrol is missing here, and no request could be left for the job's script: {error}"
        return None

    def seconds_left(self, place: Allocation) -> float | None:
        left_s = self._brief_client.seconds_left(place.job) if place.job is not None else None
        self._end_known = self._end_known or left_s is not None
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if self._end_known or not end.isdigit():
            return left_s
        return int(end) - time.time()


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None) -> int:
    """Run `launchers.pilot.command.main` with Slurm as the batch system."""
    return command.main(argv, run_rank=run_rank, batch=SlurmJob())


if __name__ == "__main__":
    sys.exit(main())
