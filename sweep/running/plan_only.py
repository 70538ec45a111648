"""A plan of which nothing runs: what ``plan`` shows, and what the Python interface returns."""

from __future__ import annotations

from collections.abc import Sequence

from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import Machine, default_launcher, method_of
from sweep.planning.assemble import plan_sweep
from sweep.planning.plan import Plan
from sweep.running.launch import launch_options


def plan_only(overrides: Sequence[str], folders: ConfFolders, where: Sequence[str] = ()) -> Plan:
    """The plan of the ``overrides`` of a command line, whatever devices this machine has.

    ``where``: more conditions on points. Raises `UltrasweepError` for a mistake, also in the launcher's options.
    """
    config = compose_sweep(overrides, folders, extra_where=where, launcher=default_launcher())
    # Report mistakes in the launcher's options before planning, whatever this machine is.
    _, slurm = launch_options(config, Machine(gpu_name=None, num_gpus=config.cluster.devices_per_node))
    return plan_sweep(config, method_of(config), slurm, devices_here=None)
