"""The pilot's command, which runs on every node of an allocation: as the pilot on the first node, as an agent on
others.

``python -m launchers.pilot SWEEP_DIR CONFIG_ID`` reads its options from ``pilots/CONFIG_ID.json`` in the sweep's
folder, a file that `launchers.local` or the Slurm submission has written before.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launchers.node.agent import run_agent
from launchers.node.connection import NodeLost, connect_to_pilot, read_head_address
from launchers.node.fork import RunRank
from launchers.pilot.agent_server import AgentServer
from launchers.pilot.allocation import Allocation, allocation_of
from launchers.pilot.batch_system import BatchSystem, is_environment_fault
from launchers.pilot.node_pool import start_pool
from launchers.pilot.pilot import Pilot
from launchers.state import node_exclusions, pilot_state
from launchers.state.code_snapshot import code_root
from launchers.state.pilot_config import PilotConfig, read_pilot_config
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError

HEAD_LIMIT_S = 300.0
"""Seconds that an agent waits for the head node's address, and then for its connection."""
_HEAD_LOOK_S = 3.0
"""Seconds between two checks whether the pilot's own process has ended."""


def main(argv: list[str] | None = None, *, run_rank: RunRank | None = None, batch: BatchSystem | None = None) -> int:
    """Run one pilot, or the agent of one of its nodes. Returns the exit status.

    ``run_rank``: code that a rank runs; None: the engine. ``batch``: None without a batch system.
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
            address = _wait_for_head(sweep, allocation, head_address, batch)
            connection = connect_to_pilot(address, allocation.node, HEAD_LIMIT_S)
            run_agent(connection, config.settings, allocation.node, run_rank)
        provenance = _provenance(config)
        wake = threading.Event()
        pool = start_pool(sweep, allocation, config, run_rank, head_address, AgentServer(wake), batch)
    except UltrasweepError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return Pilot(sweep, allocation, config, pool, wake, provenance, batch).run()
    finally:
        pool.close()
        with contextlib.suppress(OSError):
            head_address.unlink(missing_ok=True)


def _wait_for_head(sweep: SweepDir, allocation: Allocation, path: Path, batch: BatchSystem | None) -> Mapping[str, Any]:
    """The pilot's address. Raises `NodeLost` when it does not appear, or when the batch system reports that the pilot's
    process has ended. In the second case the pilot's node is to blame, since this agent has started."""
    until = time.monotonic() + HEAD_LIMIT_S
    while True:
        try:
            return read_head_address(path, _HEAD_LOOK_S)
        except NodeLost:
            ended = batch.ended_tasks(sweep, allocation) if batch is not None else ()
            for one in ended:
                if one.task == 0:
                    # if so, the pilot ended for another reason, before this agent came
                    started = _has_state(sweep, allocation)
                    if not started and not is_environment_fault(
                        len(ended), len(batch.nodes()) if batch is not None else 0
                    ):
                        with contextlib.suppress(OSError):
                            node_exclusions.exclude(sweep, one.node, one.reason, allocation.pilot_id)
                    why = f"the pilot on {one.node} could not start: {one.reason}"
                    raise NodeLost(f"node {allocation.node}: {why}") from None
            if time.monotonic() > until:
                late = f"the pilot has not written its address to {path} within {HEAD_LIMIT_S:.0f} s"
                raise NodeLost(late) from None


def _has_state(sweep: SweepDir, allocation: Allocation) -> bool:
    """Whether the pilot has written its state, which it does before it waits for agents. True if unknown."""
    try:
        pilot_state.state_path(sweep, allocation.pilot_id).stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _provenance(config: PilotConfig) -> dict[str, Any]:
    from results.tables import provenance

    code = config.provenance if config.provenance is not None else provenance.code_provenance(code_root())
    return {**code, "python_version": provenance.python_version(), "command": config.command}
