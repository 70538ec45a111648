"""The coordinates of a rank on the axes of a layout. No torch here: planner, engine and rehearsal use it.

Global ranks count with ``tp`` innermost and ``pp`` outermost, so that the axis with most traffic stays inside a node:

    rank = (((pp * DP_REPLICATE + dp_replicate) * DP_SHARD + dp_shard) * CP + cp) * TP + tp

Routed experts arrange the same ranks on other axes, with ``etp`` innermost (`expert_degrees`):

    rank = (((pp * REPLICAS + replica) * SHARDS + shard) * EP + ep) * ETP + etp
"""

from __future__ import annotations

from workloads.spec.experiment import Experiment

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


def lines(experiment: Experiment, axis: str) -> list[list[int]]:
    """Global ranks of every group along ``axis``, in the order of the axis."""
    step, degree = stride(experiment, axis), getattr(experiment, axis)
    first = [rank for rank in range(experiment.world_size) if rank // step % degree == 0]
    return [[start + i * step for i in range(degree)] for start in first]


def expert_degrees(experiment: Experiment) -> tuple[int, int]:
    """(replicas, shards) of expert parameters: the number of copies of an expert's master weights, and the number of
    ranks over which each copy is sharded.

    The ranks of a pipeline stage are ``replicas * shards * ep * etp``. ``ep`` first takes ranks that would share master
    weights, then replicas; with ``etp=1`` tensor-parallel ranks count as data-parallel ones.
    """
    e = experiment
    replicas, shards = data_degrees(e)
    if e.zero_stage == 0:
        return replicas * (e.tp // e.etp) // e.ep, 1
    shards *= e.tp // e.etp
    return (replicas, shards // e.ep) if shards % e.ep == 0 else (replicas * shards // e.ep, 1)


def expert_coordinates(experiment: Experiment, rank: int) -> dict[str, int]:
    """Coordinate of ``rank`` on ``replicate``, ``shard``, ``ep`` and ``etp``."""
    e = experiment
    replicas, shards = expert_degrees(e)
    result: dict[str, int] = {}
    for axis, size in (("etp", e.etp), ("ep", e.ep), ("shard", shards), ("replicate", replicas)):
        rank, result[axis] = divmod(rank, size)
    return result


def data_degrees(experiment: Experiment) -> tuple[int, int]:
    """(replicas, shards): the number of copies of the master weights, and the number of ranks over which each is
    sharded.

    Context-parallel ranks hold the same parameters and see different tokens, as data-parallel ranks do. With ZeRO they
    shard along with ``dp_shard``; without it (stage 0) they are replicas.
    """
    e = experiment
    return (e.dp_replicate * e.cp, 1) if e.zero_stage == 0 else (e.dp_replicate, e.dp_shard * e.cp)
