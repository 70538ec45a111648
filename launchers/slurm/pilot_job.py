"""The command of a Slurm job on each of its nodes: a pilot that can have its own job queued again.

``python -m launchers.slurm.pilot_job SWEEP_DIR CONFIG_ID``: see `launchers.pilot.command`.
"""

from __future__ import annotations

import sys

from launchers.node.fork import RunRank
from launchers.pilot import command
from launchers.slurm.client import SlurmClient


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None) -> int:
    """As `launchers.pilot.command.main`."""
    return command.main(argv, run_rank=run_rank, requeue_job=SlurmClient().requeue)


if __name__ == "__main__":
    sys.exit(main())
