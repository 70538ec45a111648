"""Makes the process groups of one rank, which are passed to all that use them; there are no global groups.

Every axis of `workloads.mesh.AXES` is a dimension of one `DeviceMesh`. Pipeline stages get two more groups, one for
each direction, so that activations and gradients between two neighbours never wait behind each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workloads import mesh as ranks
from workloads.experiment import Experiment


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor-parallel group as the layers need it. With ``size == 1`` no collective runs."""

    size: int
    rank: int
    group: dist.ProcessGroup | None
    name: str
    """Registered name of the group, for functional collectives."""
    sequence_parallel: bool


@dataclass(frozen=True, slots=True)
class Groups:
    """Where one rank stands in the layout, and the groups that it communicates in."""

    experiment: Experiment
    rank: int
    device: torch.device
    position: dict[str, int]
    """Coordinate of this rank on every mesh axis."""
    data_mesh: DeviceMesh
    """(dp_replicate, dp_shard): what FSDP replicates and shards over."""
    tp: TensorParallel
    pp_forward: dist.ProcessGroup | None
    """Pipeline neighbours, activations downstream. None when ``pp == 1``."""
    pp_backward: dist.ProcessGroup | None
    """The same ranks, gradients upstream."""
    tied_embedding: dist.ProcessGroup | None
    """First and last stage of this pipeline, where both hold a copy of one tied embedding."""
    is_rehearsal: bool = False
    """The other ranks do not exist. What this rank receives has no meaning, and so its loss and gradients have none."""

    @property
    def stage(self) -> int:
        return self.position["pp"]

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.experiment.pp - 1

    @property
    def data_rank(self) -> int:
        """Index among the ``dp`` ranks that see different sequences."""
        return self.position["dp_replicate"] * self.experiment.dp_shard + self.position["dp_shard"]

    def neighbour(self, offset: int) -> int:
        """Global rank of the pipeline stage ``offset`` away from this one."""
        return self.rank + offset * ranks.stride(self.experiment, "pp")


def make_groups(experiment: Experiment, rank: int, device: torch.device) -> Groups:
    """Build every group of ``rank``. Collective over the (already initialised) default group."""
    shape = tuple(getattr(experiment, axis) for axis in ranks.AXES)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=ranks.AXES)
    tp_group = mesh["tp"].get_group() if experiment.tp > 1 else None
    tp = TensorParallel(
        size=experiment.tp,
        rank=ranks.coordinates(experiment, rank)["tp"],
        group=tp_group,
        name=tp_group.group_name if tp_group is not None else "",
        sequence_parallel=experiment.sequence_parallel,
    )
    forward = backward = tied = None
    if experiment.pp > 1:
        pipelines = _pipelines(experiment)
        forward, backward = _own_group(pipelines, rank), _own_group(pipelines, rank)
        if experiment.model.tie_embeddings:
            ends = [[pipeline[0], pipeline[-1]] for pipeline in pipelines]
            tied = _own_group(ends, rank)
    return Groups(
        experiment=experiment,
        rank=rank,
        device=device,
        position=ranks.coordinates(experiment, rank),
        data_mesh=mesh["dp_replicate", "dp_shard"],
        tp=tp,
        pp_forward=forward,
        pp_backward=backward,
        tied_embedding=tied,
        is_rehearsal=dist.get_backend() == "fake",
    )


def _pipelines(experiment: Experiment) -> list[list[int]]:
    """Global ranks of every pipeline, first stage first."""
    step = ranks.stride(experiment, "pp")
    return [[first + stage * step for stage in range(experiment.pp)] for first in range(step)]


def _own_group(members: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Create one group for each list (all ranks must take part) and return the one that holds ``rank``."""
    own = None
    for group_ranks in members:
        group = dist.new_group(group_ranks)
        if rank in group_ranks:
            own = group
    return own
