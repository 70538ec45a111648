"""From a configuration to its plan: grids expanded, earlier results and limits looked up, every point judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweep.composing.config import SweepConfig
from sweep.grids.expand import expand_all
from sweep.planning.limits import device_limit, host_bytes
from sweep.planning.plan import Plan, make_plan
from sweep.planning.progress import PlanProgress
from sweep.planning.reuse import find_finished
from sweep.predicting.forecast import known_of
from workloads.contract.protocol import Method

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions


def plan_sweep(config: SweepConfig, method: Method, slurm: SlurmOptions | None, devices_here: int | None) -> Plan:
    """The plan that ``plan``, ``run`` and ``search`` show and execute; its progress is printed.

    ``slurm`` and ``devices_here`` limit how many devices a point can get, as in `device_limit`. Raises
    `UltrasweepError` for a mistake in a grid.
    """
    with PlanProgress() as progress:
        return make_plan(
            config,
            expand_all(config.grids, config.models.__getitem__, progress),
            method,
            find_finished(config, method),
            device_limit(config, method, slurm, devices_here),
            host_bytes(config, method),
            progress,
            known_of(config),
        )
