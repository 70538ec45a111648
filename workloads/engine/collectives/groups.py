"""Makes the process groups of one rank, which are passed to everything that uses them; there are no global groups.

Data and context parallelism see different tokens of the same parameters, so one ``data_mesh`` of (replicate, shard)
covers both (`workloads.spec.mesh.data_degrees`). Pipeline neighbours get a group for each kind of message and each
direction. Within such a group a pair of ranks sends one way only, in the same order on both sides, so no message waits
behind one of the other kind or direction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workloads.costs.shape.held_model import copies_of_heads
from workloads.costs.shape.schedule import place_of, stage_at
from workloads.engine.collectives.communication import Axis
from workloads.rules.engine_kinds import lacking_kinds
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec import mesh as ranks
from workloads.spec.errors import InfeasibleLayout, UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import optimizer_of
from workloads.spec.weights import Placement

Channel = tuple[str, bool]
"""(kind, upwards): activations ("F") or gradients ("B"), and whether they go to a higher pipeline rank."""


@dataclass(frozen=True, slots=True)
class Groups:
    """One rank's position in the layout, and the groups that it communicates in."""

    experiment: Experiment
    rank: int
    device: torch.device
    position: dict[str, int]
    """Coordinate of this rank on every mesh axis."""
    axes: dict[str, Axis]
    """``tp`` and ``cp``, along which layers communicate; with routed experts ``ep`` and ``etp`` too."""
    data_mesh: DeviceMesh
    """(replicate, shard) mesh that FSDP replicates and shards parameters over."""
    expert_mesh: DeviceMesh | None
    """(replicate, shard) mesh of expert parameters (`workloads.spec.mesh.expert_degrees`); None if the model has no
    experts."""
    channels: dict[Channel, dist.ProcessGroup]
    """Groups of all ranks of this pipeline, one for each kind and direction of messages; empty when ``pp == 1``."""
    tied_embedding: dist.ProcessGroup | None
    """Group of the ranks that hold this pipeline's first and last stage, if each has a copy of a tied embedding."""
    copies: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    """By number of copies, the tensor-parallel ranks that hold the same key and value heads as this one."""
    stage: Axis | None = None
    """All ranks that hold the same pipeline stages, in rank order, for an optimizer that needs whole matrices; None for
    other optimizers, and for a stage of one rank."""
    is_rehearsal: bool = False
    """True if the other ranks do not exist. What this rank receives then has no meaning, nor have its loss and
    gradients."""

    def mesh_of(self, placement: Placement) -> DeviceMesh:
        """(replicate, shard) mesh of a parameter."""
        if not placement.is_expert:
            return self.data_mesh
        assert self.expert_mesh is not None
        return self.expert_mesh

    @property
    def data_rank(self) -> int:
        """Index among the ``dp`` ranks that see different sequences."""
        return self.position["dp_replicate"] * self.experiment.dp_shard + self.position["dp_shard"]

    def stage_of(self, chunk: int) -> int:
        """Index, from 0, of this rank's ``chunk`` among the stages of the whole pipeline."""
        return stage_at(self.experiment.pp_schedule, self.position["pp"], chunk, self.experiment.pp)

    def rank_of_stage(self, stage: int) -> int:
        """Global rank that holds a stage of this rank's pipeline."""
        return self.rank + (_holder(self.experiment, stage) - self.position["pp"]) * ranks.stride(self.experiment, "pp")

    def channel(self, kind: str, source: int, target: int) -> dist.ProcessGroup:
        """The group in which stage ``source`` sends activations ("F") or gradients ("B") to stage ``target``."""
        return self.channels[kind, _holder(self.experiment, source) < _holder(self.experiment, target)]


def make_groups(experiment: Experiment, rank: int, device: torch.device) -> Groups:
    """Build every group of ``rank``. Collective over the default group, which must be initialised.

    Raises `InfeasibleLayout` with the rule that the layout breaks, and `UnsupportedByEngine` with what this version of
    the engine cannot run. Every rank begins here, so a layout that cannot be built is refused here.
    """
    if broken := layout_violations(experiment):
        raise InfeasibleLayout("; ".join(violation.message for violation in broken))
    if missing := lacking(experiment):
        raise UnsupportedByEngine(f"engine version {experiment.engine_version} cannot run {', '.join(missing)} yet")
    if kinds := lacking_kinds(experiment.model):
        raise UnsupportedByEngine(f"model {experiment.model.name}: the engine lacks {'; '.join(kinds)}")
    replicas, shards = ranks.data_degrees(experiment)
    shape = (experiment.pp, replicas, shards, experiment.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    position = ranks.coordinates(experiment, rank)
    groups = {
        "tp": mesh["tp"].get_group() if experiment.tp > 1 else None,
        "cp": _own_group(ranks.lines(experiment, "cp"), rank) if experiment.cp > 1 else None,
    }
    copies = {number: _of_copies(experiment, rank, number, groups["tp"]) for number in copies_of_heads(experiment)}
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
        if (experiment.model.tie_embeddings or experiment.model.mtp_modules) and first != last:
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
        copies=copies,
        stage=_stage(experiment, rank, mesh, is_rehearsal) if optimizer_of(experiment).whole_matrices else None,
        is_rehearsal=is_rehearsal,
    )


def _expert_groups(e: Experiment, rank: int, device: torch.device, tp: Axis) -> tuple[DeviceMesh, dict[str, Axis]]:
    shape = (e.pp, *ranks.expert_degrees(e), e.ep, e.etp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "ep", "etp"))
    position = ranks.expert_coordinates(e, rank)
    group = None
    if e.ep == e.world_size > 1:
        # The mesh would return the group of all ranks, which data parallelism uses: exchanges would wait for its
        # messages.
        group = _own_group([list(range(e.world_size))], rank)
    elif e.ep > 1:
        group = mesh["ep"].get_group()
    ep = Axis("ep", e.ep, position["ep"], group, tp.is_rehearsal)
    etp = dataclasses.replace(tp, name="etp") if e.etp > 1 else Axis("etp", 1, 0, None)
    return mesh["replicate", "shard"], {"ep": ep, "etp": etp}


def _of_copies(e: Experiment, rank: int, number: int, tp: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The tensor-parallel ranks in a row that hold this rank's key and value head, as many as ``number``."""
    lines = [line[first : first + number] for line in ranks.lines(e, "tp") for first in range(0, e.tp, number)]
    group = tp if number == e.tp else _own_group(lines, rank)
    assert group is not None
    return group


def _stage(e: Experiment, rank: int, mesh: DeviceMesh, is_rehearsal: bool) -> Axis | None:
    """The ranks of this rank's pipeline stages. A group that has them already is taken: a new one takes memory of the
    device."""
    size = e.world_size // e.pp
    if size == 1:
        return None
    group: dist.ProcessGroup | None = dist.group.WORLD
    if e.pp > 1:
        dims = [dim for dim in ("replicate", "shard", "tp") if mesh[dim].size() == size]
        own = [list(range(first, first + size)) for first in range(0, e.world_size, size)]
        group = mesh[dims[0]].get_group() if dims else _own_group(own, rank)
    return Axis("stage", size, rank % size, group, is_rehearsal)


def _holder(experiment: Experiment, stage: int) -> int:
    """Pipeline rank that holds a stage."""
    return place_of(experiment.pp_schedule, stage, experiment.pp, experiment.virtual_stages)[0]


def _channels(experiment: Experiment) -> list[Channel]:
    """Kinds and directions of messages in a pipeline, in the same order on all ranks."""
    channels: set[Channel] = set()
    for stage in range(experiment.num_stages - 1):
        here, there = _holder(experiment, stage), _holder(experiment, stage + 1)
        if here != there:
            channels |= {("F", here < there), ("B", there < here)}
    return sorted(channels)


def _own_group(members: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Create one group for each list (all ranks must take part) and return the one that holds ``rank``."""
    group_of_rank = None
    for group_ranks in members:
        group = dist.new_group(group_ranks)
        if rank in group_ranks:
            group_of_rank = group
    return group_of_rank
