"""Predicted traffic of one rank, by axis, kind and link, and the rank's position in the layout. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from workloads.costs.shape.params import COMPUTE_BYTES
from workloads.costs.shape.partition import experiment_layers, recompute_by_layer
from workloads.costs.shape.schedule import place_of, stage_at
from workloads.costs.traffic.collectives import Collective
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.mesh import coordinates, data_degrees, expert_coordinates, expert_degrees, stride
from workloads.spec.model_layers import layers_of
from workloads.spec.updates.optimizer import master_bytes, reduced_bytes

Link = Literal["inside_node", "between_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls of one kind that one rank makes along one axis in one step, and their bytes."""

    axis: str
    """A name of `workloads.spec.mesh.AXES`, or one of: ``ep``, the ranks that hold different experts, which belong to
    other axes, too; ``stage``, all ranks with the same pipeline stages, if no axis has them all; ``tied``, the two
    copies of a tied embedding; ``world``, all ranks, if no axis has all of them (if several have, the first of
    dp_replicate, dp_shard, tp, cp and pp counts). Data-parallel traffic of routed experts is along dp_replicate and
    dp_shard, too, although fewer ranks hold the same experts."""
    op: Collective
    link: Link | None
    """``between_nodes`` if the ranks of the call are on more than one node; None if the nodes are unknown."""
    calls: int
    bytes: int


@dataclass(slots=True)
class SentTally:
    """Sums up the traffic of one rank. ``devices_per_node``: ranks fill one node after the other; None: unknown."""

    rank: int
    devices_per_node: int | None = None
    _sums: dict[tuple[str, Collective, Link | None], tuple[int, int]] = field(default_factory=dict)

    def add(self, axis: str, op: Collective, bytes: int, peers: Iterable[int], *, calls: int = 1) -> None:
        """Count ``calls`` calls of ``bytes`` bytes each among this rank and ``peers`` (global ranks)."""
        ranks = {self.rank, *peers}
        if len(ranks) == 1 or calls == 0:
            return
        key = axis, op, self._link(ranks)
        known_calls, known_bytes = self._sums.get(key, (0, 0))
        self._sums[key] = known_calls + calls, known_bytes + calls * bytes

    def result(self) -> list[Traffic]:
        """Sums in alphabetical order."""
        ordered = sorted(self._sums.items(), key=lambda item: [text or "" for text in item[0]])
        return [
            Traffic(axis=axis, op=op, link=link, calls=calls, bytes=bytes)
            for (axis, op, link), (calls, bytes) in ordered
        ]

    def _link(self, ranks: Iterable[int]) -> Link | None:
        if self.devices_per_node is None:
            return None
        return "inside_node" if len({rank // self.devices_per_node for rank in ranks}) == 1 else "between_nodes"


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage that a rank holds."""

    index: int
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class Sender:
    """One rank, with the traffic counted so far."""

    experiment: Experiment
    rank: int
    tally: SentTally
    position: dict[str, int] = field(init=False)
    stages: list[Stage] = field(init=False)
    """Stages by chunk."""

    def __post_init__(self) -> None:
        e = self.experiment
        self.position = coordinates(e, self.rank)
        held = [stage_at(e.pp_schedule, self.position["pp"], chunk, e.pp) for chunk in range(e.virtual_stages)]
        self.stages = [Stage(stage, stage == 0, stage == e.num_stages - 1) for stage in held]

    def kinds_of(self, stage: Stage) -> list[Layer]:
        """The kind of each layer of a stage, in order."""
        layers = layers_of(self.experiment.model)
        return [layers.kinds[layers.order[at]] for at in experiment_layers(self.experiment)[stage.index]]

    def looked_up(self, stage: Stage) -> int:
        """Number of lists of tokens whose embeddings a stage looks up: of the model, of each multi-token module."""
        return stage.is_first + (self.experiment.model.mtp_modules if stage.is_last else 0)

    def kinds(self) -> list[tuple[Layer, int, str]]:
        """This rank's layers: (kind, number of layers, the word of recomputation that they have)."""
        e, layers = self.experiment, layers_of(self.experiment.model)
        of_stage, words = experiment_layers(e), recompute_by_layer(e)
        held = [at for stage in self.stages for at in of_stage[stage.index]]
        counted = Counter((layers.order[at], words[at]) for at in held)
        return [(layers.kinds[kind], count, word) for (kind, word), count in sorted(counted.items())]

    @property
    def compute(self) -> int:
        return COMPUTE_BYTES[self.experiment.precision]

    @property
    def master(self) -> int:
        return master_bytes(self.experiment)

    @property
    def reduced(self) -> int:
        """Bytes per gradient in reductions over data-parallel ranks."""
        return reduced_bytes(self.experiment)

    @property
    def accumulated(self) -> int:
        """Bytes per number in the precision of sums."""
        return 8 if self.experiment.precision == "fp64" else 4

    @property
    def tokens(self) -> int:
        return self.experiment.micro_batch_size * self.experiment.seq_len // self.experiment.cp

    @property
    def num_routed(self) -> int:
        return sum(layers for kind, layers, _ in self.kinds() if kind.routed)

    @property
    def num_routed_repeated(self) -> int:
        """Of those the ones whose whole forward runs again."""
        return sum(layers for kind, layers, word in self.kinds() if kind.routed and word == "full")

    @property
    def num_outputs_repeated(self) -> int:
        """Of those the ones with a norm or a product after the experts, which needs what they return: of their outputs,
        or of a multi-token module before the head."""
        return sum(layers for kind, layers, word in self.kinds() if kind.needs_experts_outputs and word == "full")

    def along(self, axis: str, op: Collective, bytes: int, calls: int = 1) -> None:
        """Count calls among the ranks that differ from this one on ``axis`` alone."""
        size, step = getattr(self.experiment, axis), stride(self.experiment, axis)
        self._among(axis, op, bytes, calls, size, step)

    def along_copies(self, op: Collective, bytes: int, copies: int) -> None:
        """Count a call among the neighbouring tensor-parallel ranks that hold copies of the same heads."""
        self._among("tp", op, bytes, 1, copies, 1)

    def along_shards(self, op: Collective, bytes: int, calls: int, *, of_experts: bool = False) -> None:
        """Count calls among the ranks that share one copy of the master weights."""
        _, shards, inner = self._data_mesh(of_experts)
        self._among("dp_shard", op, bytes, calls, shards, inner)

    def along_replicas(self, op: Collective, bytes: int, *, of_experts: bool = False) -> None:
        """Count a call among the ranks that hold copies of this one's master weights."""
        replicas, shards, inner = self._data_mesh(of_experts)
        self._among("dp_replicate", op, bytes, 1, replicas, shards * inner)

    def along_experts(self, bytes: int, calls: int) -> None:
        """Count exchanges among the ranks that hold different experts."""
        self._among("ep", "all_to_all", bytes, calls, self.experiment.ep, self.experiment.etp)

    @property
    def rank_in_stage(self) -> int:
        """Index of this rank among those that hold the same pipeline stages."""
        return self.rank % self._stage_ranks

    def along_stage(self, op: Collective, bytes: int) -> None:
        """Count a call among the ranks that hold the same pipeline stages. The engine takes a group that has them
        already, if there is one."""
        e, size = self.experiment, self._stage_ranks
        replicas, shards = data_degrees(e)
        degrees = {"dp_replicate": replicas, "dp_shard": shards, "tp": e.tp}
        axis = next((axis for axis, degree in degrees.items() if degree == size), "stage")
        first = self.rank - self.rank_in_stage
        name = self.axis_of_all if size == e.world_size else axis
        self.tally.add(name, op, bytes, range(first, first + size))

    @property
    def _stage_ranks(self) -> int:
        return self.experiment.world_size // self.experiment.pp

    def shards(self, *, of_experts: bool = False) -> int:
        """Number of ranks that share one copy of the master weights."""
        return self._data_mesh(of_experts)[1]

    @property
    def own_shard(self) -> int:
        """Index of this rank among those that share one copy of the master weights."""
        return self.rank // self.experiment.tp % self.shards()

    @property
    def expert_rank(self) -> int:
        """Index of this rank among those that hold different experts."""
        return expert_coordinates(self.experiment, self.rank)["ep"]

    @property
    def axis_of_all(self) -> str:
        """Name of the group of all ranks: the first axis that has them all, else ``world``."""
        e = self.experiment
        replicas, shards = data_degrees(e)
        sizes = [("dp_replicate", replicas), ("dp_shard", shards), ("tp", e.tp), ("cp", e.cp), ("pp", e.pp)]
        if e.model.moe is not None:
            sizes += zip(("dp_replicate", "dp_shard"), expert_degrees(e), strict=True)
        return next((axis for axis, size in sizes if size == e.world_size), "world")

    def _data_mesh(self, of_experts: bool) -> tuple[int, int, int]:
        """(replicas, shards, distance between shards) of a parameter's data parallelism."""
        e = self.experiment
        if of_experts:
            return *expert_degrees(e), e.ep * e.etp
        return *data_degrees(e), e.tp

    def _among(self, axis: str, op: Collective, bytes: int, calls: int, size: int, step: int) -> None:
        if axis.startswith("dp") and size == self.experiment.world_size:
            axis = self.axis_of_all
        first = self.rank - self.rank // step % size * step
        self.tally.add(axis, op, bytes, range(first, first + size * step, step), calls=calls)

    def own_rows(self, rows: int) -> int:
        """Number of a parameter's rows that this rank holds. FSDP shards dim 0 like `torch.chunk`: the last shard may
        be short."""
        whole = -(-rows // self.shards())
        return max(0, min(rows, (self.own_shard + 1) * whole) - self.own_shard * whole)

    def rank_of_stage(self, stage: int) -> int:
        """Global rank that holds a stage of this rank's pipeline."""
        e = self.experiment
        holder = place_of(e.pp_schedule, stage, e.pp, e.virtual_stages)[0]
        return self.rank + (holder - self.position["pp"]) * stride(e, "pp")
