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
from launchers.pilot.allocation import Allocation, job_age_s
from launchers.pilot.batch_system import EndedTask
from launchers.slurm import srun_log
from launchers.slurm.client import SlurmClient, TimeLeft
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
        known = self._brief_client.time_left(place.job) if place.job is not None else None
        if known is None and not self._end_known:
            known = _time_left_at_start()
        elif known is not None:
            self._end_known = True
        if known is None:
            return None
        # The clocks of this machine and of Slurm's controller may differ, so the limit less the job's age counts too.
        age_s = job_age_s()
        if age_s is None or known.limit_s is None:
            return known.left_s
        return min(known.left_s, known.limit_s - age_s)


def _time_left_at_start() -> TimeLeft | None:
    """What the environment says about the job's end; None if nothing."""
    start, end = (os.environ.get(f"SLURM_JOB_{which}_TIME", "") for which in ("START", "END"))
    if not end.isdigit():
        return None
    return TimeLeft(int(end) - time.time(), float(int(end) - int(start)) if start.isdigit() else None)


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None) -> int:
    """Run `launchers.pilot.command.main` with Slurm as the batch system."""
    return command.main(argv, run_rank=run_rank, batch=SlurmJob())


if __name__ == "__main__":
    sys.exit(main())
