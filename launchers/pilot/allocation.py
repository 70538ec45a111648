"""Reads from the environment to which job and node this process belongs."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from launchers.state.pilot_config import PilotConfig

STARTED_AT = "ULTRASWEEP_JOB_STARTED_AT"
"""Variable in which a job's script notes its start, in seconds since the boot of the job's first node. That clock is
the same inside a container, and nobody sets it."""
_OLDEST_S = 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The job and node of this process."""

    pilot_id: str
    job: str | None
    """Job id in the form of ``squeue``: ``1234``, or ``1234_5`` in an array. None without a scheduler."""
    node: str
    """The scheduler's name for this machine."""
    is_head: bool
    """Whether this process is the pilot. On other nodes it is an agent, which forks ranks."""
    restarts: int = 0
    """Number of times the scheduler has restarted the job."""
    age_s: float = 0.0
    """Seconds from the start of the job to that of this process; 0 if unknown."""


def allocation_of(config: PilotConfig, config_id: str) -> Allocation:
    """The allocation of this process. A job that Slurm has requeued is a new pilot: the pilot's id ends with the number
    of restarts."""
    if config.batch_system == "none":
        return Allocation(pilot_id=config_id, job=None, node=socket.gethostname(), is_head=True)
    env = os.environ
    task = env.get("SLURM_ARRAY_TASK_ID")
    job = f"{env['SLURM_ARRAY_JOB_ID']}_{task}" if task is not None else env.get("SLURM_JOB_ID")
    return Allocation(
        pilot_id=f"{config_id}.{task or 0}.{env.get('SLURM_RESTART_COUNT', '0')}",
        job=job,
        node=env.get("SLURMD_NODENAME") or socket.gethostname(),
        is_head=env.get("SLURM_PROCID", "0") == "0",
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        age_s=job_age_s() or 0.0,
    )


def job_age_s() -> float | None:
    """Seconds since the start of this job as its script has noted it; None if unknown."""
    try:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - float(os.environ[STARTED_AT])
    except (KeyError, ValueError):
        return None
    return age_s if 0.0 <= age_s <= _OLDEST_S else None
