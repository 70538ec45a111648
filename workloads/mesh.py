"""The coordinates of a rank on the axes of a layout. No torch here: planner, engine and rehearsal use it.

Global ranks count with ``tp`` innermost and ``pp`` outermost, so that the axis with most traffic stays inside a node:

    rank = (((pp * DP_REPLICATE + dp_replicate) * DP_SHARD + dp_shard) * CP + cp) * TP + tp
"""

from __future__ import annotations

from workloads.experiment import Experiment

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from outermost to innermost."""


def coordinates(experiment: Experiment, rank: int) -> dict[str, int]:
    """Coordinate of ``rank`` on every axis of `AXES`."""
    assert 0 <= rank < experiment.world_size, (rank, experiment.world_size)
    result: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, result[axis] = divmod(rank, getattr(experiment, axis))
    return result


def rank_of(experiment: Experiment, **position: int) -> int:
    """Inverse of `coordinates`; an axis that is not given is 0."""
    rank = 0
    for axis in AXES:
        rank = rank * getattr(experiment, axis) + position.get(axis, 0)
    return rank


def stride(experiment: Experiment, axis: str) -> int:
    """Distance in global ranks between neighbours on ``axis``."""
    result = 1
    for inner in AXES[AXES.index(axis) + 1 :]:
        result *= getattr(experiment, inner)
    return result


def layers_of_stage(num_layers: int, pp: int, stage: int) -> range:
    """Contiguous layers of one pipeline stage; the first ``num_layers % pp`` stages hold one more."""
    base, extra = divmod(num_layers, pp)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))
