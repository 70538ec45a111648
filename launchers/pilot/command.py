"""The pilot's command, which runs on every node of an allocation: on the first node the pilot, on the others an agent.

``python -m launchers.pilot SWEEP_DIR CONFIG_ID`` reads its options from ``pilots/CONFIG_ID.json`` in the sweep's
folder. `launchers.local` or the Slurm submission has written that file before.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

from launchers.node.agent import run_agent
from launchers.node.connection import connect_to_pilot, read_head_address
from launchers.node.fork import RunRank
from launchers.pilot.agent_server import AgentServer
from launchers.pilot.allocation import allocation_of
from launchers.pilot.node_pool import start_pool
from launchers.pilot.pilot import Pilot, RequeueJob
from launchers.state import pilot_state
from launchers.state.code_snapshot import code_root
from launchers.state.pilot_config import PilotConfig, read_pilot_config
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError

HEAD_LIMIT_S = 300.0
"""How long an agent waits for the head node's address, and then for its connection."""


def main(
    argv: list[str] | None = None, *, run_rank: RunRank | None = None, requeue_job: RequeueJob | None = None
) -> int:
    """Run one pilot, or the agent of one of its nodes; the exit status.

    ``run_rank``: what a rank does; None: the engine. ``requeue_job``: see `launchers.pilot.pilot.RequeueJob`; None:
    there is no batch system.
    """
    parser = argparse.ArgumentParser(
        prog="python -m launchers.pilot", description="Run the points of one sweep's queue."
    )
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("config_id")
    arguments = parser.parse_args(argv)
    try:
        sweep = SweepDir.open(arguments.sweep_dir)
        config = read_pilot_config(pilot_state.config_path(sweep, arguments.config_id))
        allocation = allocation_of(config, arguments.config_id)
        head_address = sweep.pilots / f"{allocation.pilot_id}.head.json"
        if not allocation.is_head:
            connection = connect_to_pilot(read_head_address(head_address, HEAD_LIMIT_S), allocation.node, HEAD_LIMIT_S)
            run_agent(connection, config.settings, allocation.node, run_rank)
        provenance = _provenance(config)
        wake = threading.Event()
        pool = start_pool(sweep, allocation, config, run_rank, head_address, AgentServer(wake))
    except UltrasweepError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return Pilot(sweep, allocation, config, pool, wake, provenance, requeue_job).run()
    finally:
        pool.close()
        with contextlib.suppress(OSError):
            head_address.unlink(missing_ok=True)


def _provenance(config: PilotConfig) -> dict[str, Any]:
    from results import provenance

    code = config.provenance if config.provenance is not None else provenance.code_provenance(code_root())
    return {**code, "python_version": provenance.python_version(), "command": config.command}
