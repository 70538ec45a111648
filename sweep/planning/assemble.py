"""From a configuration to its plan: grids expanded, earlier results and limits looked up, every point judged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sweep.composing.config import SweepConfig
from sweep.grids.expand import Expansion, expand_all
from sweep.planning.auto_recompute import with_choices
from sweep.planning.earlier_peaks import earlier_peaks
from sweep.planning.limits import device_limit, host_bytes
from sweep.planning.plan import Plan, make_plan
from sweep.planning.progress import PlanProgress
from sweep.planning.reuse import begun_experiments, find_finished
from sweep.predicting.known import Known, known_of
from workloads.contract.protocol import Method

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions


def plan_sweep(config: SweepConfig, method: Method, slurm: SlurmOptions | None, devices_here: int | None) -> Plan:
    """The plan that ``plan``, ``run`` and ``search`` show and execute; its progress is printed.

    ``slurm`` and ``devices_here`` limit how many devices a point can get, as in `device_limit`. Raises
    `UltrasweepError` for a mistake in a grid.
    """
    known = known_of(config)
    with PlanProgress() as progress:
        return make_plan(
            config,
            _as_begun(config, _expanded(config, known, progress)),
            method,
            find_finished(config, method),
            device_limit(config, method, slurm, devices_here),
            host_bytes(config, method),
            progress,
            known,
            earlier_peaks(config),
        )


def _expanded(config: SweepConfig, known: Known, progress: PlanProgress) -> Expansion:
    expansion = expand_all(config.grids, config.models.__getitem__, progress, config.cluster.backend)
    return with_choices(expansion, config.cluster, known, progress)


def _as_begun(config: SweepConfig, expansion: Expansion) -> Expansion:
    """The expansion with the experiments that the sweep already holds under another id in the place of equal ones."""
    if all(point.experiment.model.moe is None and point.experiment.model.mla is None for point in expansion.points):
        return expansion
    begun = begun_experiments(config)
    if not begun:
        return expansion
    points = (
        dataclasses.replace(point, experiment=begun.get(point.experiment.id, point.experiment))
        for point in expansion.points
    )
    return dataclasses.replace(expansion, points=tuple(points))
