"""What the scheduler tells a process about the allocation it runs in, from its environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from launchers.state.pilot_config import PilotConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The place of this process in its allocation."""

    pilot_id: str
    job: str | None
    """As ``squeue`` prints it: ``1234``, or ``1234_5`` in an array. None without a scheduler."""
    node: str
    """This machine's name to the scheduler."""
    is_head: bool
    """Whether this process draws and watches; the others fork ranks for it."""
    restarts: int = 0
    """How often the scheduler has started the job again."""


def allocation_of(config: PilotConfig, config_id: str) -> Allocation:
    """Where this process runs. A job that Slurm has requeued is another pilot: its id counts the restarts."""
    if config.scheduler == "none":
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
    )
