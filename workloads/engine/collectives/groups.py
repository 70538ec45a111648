"""Makes the process groups of one rank, which are passed to all that use them; there are no global groups.

Data and context parallelism see different tokens of the same parameters, so one ``data_mesh`` of (replicate, shard)
covers both: `workloads.spec.mesh.data_degrees` says how. Pipeline neighbours get a group for each kind of message and
each direction. Within such a group a pair of ranks sends one way only, in the same order on both sides, so no message
waits behind one of the other kind or the other way.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workloads.costs.shape.schedule import place_of, stage_at
from workloads.engine.collectives.communication import Axis
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec import mesh as ranks
from workloads.spec.errors import InfeasibleLayout, UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.weights import Placement

Channel = tuple[str, bool]
"""What is sent between stages, activations ("F") or gradients ("B"), and whether to a higher pipeline rank."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Where one rank stands in the layout, and the groups that it communicates in."""

    experiment: Experiment
    rank: int
    device: torch.device
    position: dict[str, int]
    """Coordinate of this rank on every mesh axis."""
    axes: dict[str, Axis]
    """``tp`` and ``cp``, along which layers communicate; with routed experts ``ep`` and ``etp`` too."""
    data_mesh: DeviceMesh
    """(replicate, shard): what FSDP replicates and shards over."""
    expert_mesh: DeviceMesh | None
    """The same of expert parameters (`workloads.spec.mesh.expert_degrees`); None where the model has no experts."""
    channels: dict[Channel, dist.ProcessGroup]
    """All ranks of this pipeline, once for each way that messages take in it; empty when ``pp == 1``."""
    tied_embedding: dist.ProcessGroup | None
    """The ranks that hold the first and the last stage of this pipeline, where each has a copy of a tied embedding."""
    is_rehearsal: bool = False
    """The other ranks do not exist. What this rank receives has no meaning, and so its loss and gradients have none."""

    def mesh_of(self, placement: Placement) -> DeviceMesh:
        """(replicate, shard) of a parameter."""
        if not placement.is_expert:
            return self.data_mesh
        assert self.expert_mesh is not None
        return self.expert_mesh

    @property
    def data_rank(self) -> int:
        """Index among the ``dp`` ranks that see different sequences."""
        return self.position["dp_replicate"] * self.experiment.dp_shard + self.position["dp_shard"]

    def stage_of(self, chunk: int) -> int:
        """Which stage of the whole pipeline this rank's ``chunk`` is, from 0."""
        return stage_at(self.experiment.pp_schedule, self.position["pp"], chunk, self.experiment.pp)

    def rank_of_stage(self, stage: int) -> int:
        """Global rank that holds a stage of this rank's pipeline."""
        return self.rank + (_holder(self.experiment, stage) - self.position["pp"]) * ranks.stride(self.experiment, "pp")

    def channel(self, kind: str, source: int, target: int) -> dist.ProcessGroup:
        """The group in which stage ``source`` sends activations ("F") or gradients ("B") to stage ``target``."""
        return self.channels[kind, _holder(self.experiment, source) < _holder(self.experiment, target)]


def make_groups(experiment: Experiment, rank: int, device: torch.device) -> Groups:
    """Build every group of ``rank``. Collective over the (already initialised) default group.

    Every rank begins here, so a layout that cannot be built is refused here: raises `InfeasibleLayout` with the rule
    that it breaks, `UnsupportedByEngine` with what this version of the engine cannot run.
    """
    if broken := layout_violations(experiment):
        raise InfeasibleLayout("; ".join(violation.message for violation in broken))
    if missing := lacking(experiment):
        raise UnsupportedByEngine(f"engine version {experiment.engine_version} cannot run {', '.join(missing)} yet")
    replicas, shards = ranks.data_degrees(experiment)
    shape = (experiment.pp, replicas, shards, experiment.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    position = ranks.coordinates(experiment, rank)
    groups = {
        "tp": mesh["tp"].get_group() if experiment.tp > 1 else None,
        "cp": _own_group(ranks.lines(experiment, "cp"), rank) if experiment.cp > 1 else None,
    }
    is_rehearsal = dist.get_backend() == "fake"
    axes = {
        name: Axis(name, getattr(experiment, name), position[name], group, is_rehearsal)
        for name, group in groups.items()
    }
    expert_mesh = None
    if experiment.model.moe is not None:
        expert_mesh, of_experts = _expert_groups(experiment, rank, device, axes["tp"])
        axes |= of_experts
    channels: dict[Channel, dist.ProcessGroup] = {}
    tied = None
    if experiment.pp > 1:
        pipelines = ranks.lines(experiment, "pp")
        for channel in _channels(experiment):
            group = _own_group(pipelines, rank)
            assert group is not None
            channels[channel] = group
        first, last = _holder(experiment, 0), _holder(experiment, experiment.num_stages - 1)
        if experiment.model.tie_embeddings and first != last:
            tied = _own_group([[pipeline[first], pipeline[last]] for pipeline in pipelines], rank)
    return Groups(
        experiment=experiment,
        rank=rank,
        device=device,
        position=position,
        axes=axes,
        data_mesh=mesh["replicate", "shard"],
        expert_mesh=expert_mesh,
        channels=channels,
        tied_embedding=tied,
        is_rehearsal=is_rehearsal,
    )


def _expert_groups(e: Experiment, rank: int, device: torch.device, tp: Axis) -> tuple[DeviceMesh, dict[str, Axis]]:
    shape = (e.pp, *ranks.expert_degrees(e), e.ep, e.etp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "ep", "etp"))
    position = ranks.expert_coordinates(e, rank)
    group = None
    if e.ep == e.world_size > 1:
        # The mesh would give the group of all ranks, which data parallelism has: exchanges would wait for its messages.
        group = _own_group([list(range(e.world_size))], rank)
    elif e.ep > 1:
        group = mesh["ep"].get_group()
    ep = Axis("ep", e.ep, position["ep"], group, tp.is_rehearsal)
    etp = dataclasses.replace(tp, name="etp") if e.etp > 1 else Axis("etp", 1, 0, None)
    return mesh["replicate", "shard"], {"ep": ep, "etp": etp}


def _holder(experiment: Experiment, stage: int) -> int:
    """Pipeline rank that holds a stage."""
    return place_of(experiment.pp_schedule, stage, experiment.pp, experiment.virtual_stages)[0]


def _channels(experiment: Experiment) -> list[Channel]:
    """The ways that messages take in a pipeline, in one order on all ranks."""
    found: set[Channel] = set()
    for stage in range(experiment.num_stages - 1):
        here, there = _holder(experiment, stage), _holder(experiment, stage + 1)
        if here != there:
            found |= {("F", here < there), ("B", there < here)}
    return sorted(found)


def _own_group(members: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Create one group for each list (all ranks must take part) and return the one that holds ``rank``."""
    own = None
    for group_ranks in members:
        group = dist.new_group(group_ranks)
        if rank in group_ranks:
            own = group
    return own
