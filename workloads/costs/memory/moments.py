"""Building blocks of the memory moments of a backward at which a pipeline rank may peak.

The moments are in `workloads.costs.memory.layer_moments` and `workloads.costs.memory.end_moments`;
`workloads.costs.memory.estimate` takes the highest. Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import HeadBytes, head_bytes, rank_tokens
from workloads.costs.memory.layer_classes import LayerClass, LayerSizes, classes_of, layer_sizes
from workloads.costs.shape.fp8 import gathered_bytes
from workloads.costs.shape.params import COMPUTE_BYTES, MASTER_BYTES
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees


def accumulates_unsharded(experiment: Experiment) -> bool:
    """Whether gradients stay unsharded until the last micro-batch, as with ZeRO 0 and 1, which reduce only there (in a
    split backward, in its weight-gradient pass)."""
    later = experiment.num_microbatches > 1 or experiment.pp_schedule in SPLIT_BACKWARD
    return experiment.zero_stage <= 1 and later


class Shared(NamedTuple):
    """Sizes that are the same on every stage, in bytes unless stated otherwise; c, g and m as in
    `workloads.costs.memory.estimate`."""

    c: int
    g: int
    sizes: tuple[LayerSizes, ...]
    """Sizes of each class of layers of the model."""
    working: int
    """Working bytes of the class of layers that needs most."""
    working_kept: int
    """The same of layers that are not recomputed (``recompute_every``)."""
    b: int
    """Bytes per element of a gathered block: c, or 1 for fp8 weights with one scale."""
    b_experts: int
    """Bytes per element of gathered routed experts."""
    block: int
    """Elements of the largest block on one rank, without routed experts, which are separate units."""
    experts: int
    """Elements of one layer's routed experts on one rank."""
    expert_shards: int
    """Number of ranks that share an expert's master weights."""
    vocabulary: int
    """Elements of the embedding (or head) on one rank."""
    head: HeadBytes
    stream: int
    """Bytes of one micro-batch's residual stream, also of a stage's output: ``c T_s h``."""
    inputs: int
    """Bytes of token ids and targets of every micro-batch (int64), and of the RoPE tables (fp32 sine and cosine)."""
    unsharded: bool
    """Whether gradients accumulate unsharded (`accumulates_unsharded`)."""
    num_microbatches: int
    """m, the number of micro-batches of a step."""
    shards: int
    """S, the number of ranks that share master weights and optimizer state."""

    @classmethod
    def of(cls, e: Experiment) -> Shared:
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens, stream_tokens = rank_tokens(e)
        sizes = layer_sizes(e)
        return cls(
            c=c,
            g=MASTER_BYTES[e.precision],
            sizes=sizes,
            working=max(size.working for size in sizes),
            working_kept=max(size.working_kept for size in sizes),
            b=gathered_bytes(e, c),
            b_experts=gathered_bytes(e, c, of_experts=True),
            block=max(size.block for size in sizes),
            experts=max(size.experts for size in sizes),
            expert_shards=expert_degrees(e)[1] if model.moe is not None else 1,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=c * stream_tokens * model.hidden_size * model.streams,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * model.rope_dim,
            unsharded=accumulates_unsharded(e),
            num_microbatches=e.num_microbatches,
            shards=data_degrees(e)[1],
        )

    def shard(self, rest: int, experts: int) -> int:
        """Bytes of reduced gradients of ``rest`` elements plus ``experts`` elements of routed experts."""
        return self.g * rest // self.shards + self.g * experts // self.expert_shards

    def classes(self, held: StageParams) -> tuple[LayerClass, ...]:
        """The layers of a stage by class."""
        return classes_of(self.sizes, held)


class Units(NamedTuple):
    """FSDP units of one stage, in elements."""

    head: int
    """Output projection; 0 if the stage has no separate one."""
    first: int
    """Unit whose gradient comes last: the embedding, the tied weight or a block."""
    first_copy: int
    """Bytes of ``first`` when gathered."""
    tied: int
    """Embedding that is also the output projection; 0 if the stage has no such weight."""
    experts: int
    """Routed experts of one layer; 0 if the stage has none."""
    all_experts: int
    """Routed experts of all layers."""
    classes: tuple[LayerClass, ...]
    """The stage's layers by class, in order."""

    def last_layers(self, count: int) -> list[tuple[LayerSizes, int]]:
        """The last ``count`` layers by class, as (sizes, number), the last class first."""
        result: list[tuple[LayerSizes, int]] = []
        for one in reversed(self.classes):
            taken = min(count, one.layers)
            if taken:
                result.append((one.size, taken))
            count -= taken
        return result


class MicroBatchBackward(NamedTuple):
    """The backward of one micro-batch."""

    in_flight: float
    """Number of micro-batches held when the backward starts."""
    deferred: int
    """Bytes that other micro-batches hold for their pending weight-gradient passes."""
    prior: int
    """Bytes of gradients left by earlier micro-batches."""
    last: bool
    """Whether this is the last backward of the step, which reduces gradients at the latest."""
    forward_follows: bool
    """Whether another micro-batch's forward follows."""
    own_deferred: int = 0
    """Bytes this micro-batch saves for its deferred weight-gradient pass; 0 if the backward is not split."""
    first_half: bool = False
    """Whether this is an input-gradient pass only: blocks get no weight gradients in it."""
    second_half: bool = False
    """Whether this is a weight-gradient pass: the head, whose gradient exists, stays gathered until its reduction at
    the end."""


Moment = tuple[int, int, int]
"""Bytes of (gathered parameters, gradients, activations)."""


def reduces(x: Shared, turn: MicroBatchBackward) -> bool:
    return turn.last or not x.unsharded


def reduce_bytes(x: Shared, unit: int, turn: MicroBatchBackward) -> int:
    """Bytes of buffers while FSDP reduces a unit, besides gradients that stay.

    These are a flat copy of g bytes per element and, with one shard, a scaled copy of it. With several shards a
    variable of FSDP keeps the gradient of the unit's last weight until the end, in c bytes per element: for the head or
    the embedding that is all of it. The new shard also exists if there is an earlier one to add to.
    """
    if x.shards == 1 or x.unsharded:
        return 2 * x.g * unit
    return (x.g + x.c) * unit + (x.g * unit // x.shards if turn.prior else 0)


def pending_reduce_buffer(x: Shared, units: Units, turn: MicroBatchBackward) -> int:
    """Bytes of FSDP's flat reduce-scatter buffer of the previous micro-batch's last unit, freed by the next
    reduction."""
    return x.g * units.first if turn.prior and not x.unsharded else 0


def held_bytes(x: Shared, turn: MicroBatchBackward, saved: int, has_head: bool) -> int:
    """Bytes of saved activations at the start of a backward, without those that the head saves for this micro-batch."""
    return turn.deferred + int(turn.in_flight * saved + (turn.in_flight - 1) * (x.head.saved if has_head else 0))
