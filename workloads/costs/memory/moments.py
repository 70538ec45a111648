"""Building blocks of the memory moments of a backward at which a pipeline rank may peak.

The moments are in `workloads.costs.memory.layer_moments` and `workloads.costs.memory.end_moments`;
`workloads.costs.memory.estimate` takes the highest. Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import (
    HeadBytes,
    LayerBytes,
    deferred_bytes,
    first_half_bytes,
    head_bytes,
    layer_bytes,
    rank_tokens,
)
from workloads.costs.shape.fp8 import gathered_bytes
from workloads.costs.shape.params import (
    COMPUTE_BYTES,
    MASTER_BYTES,
    dense_layer,
    local_params,
    moe_layer,
    num_dense_layers,
)
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
    `workloads.costs.memory.estimate`. ``..._kept`` is the size of a layer that is not recomputed (``recompute_every``).
    """

    c: int
    g: int
    dense_saved: int
    """Bytes saved by one dense layer for one micro-batch."""
    moe_saved: int
    """Bytes saved by one layer with experts; 0 if the model has none."""
    dense_deferred: int
    """Bytes that one dense layer holds between the two passes of a split backward."""
    moe_deferred: int
    dense_first_half: int
    """Extra working bytes of a dense layer in the input-gradient pass, on top of ``dense_working``."""
    working: int
    """Working bytes of the kind of layer that needs most."""
    dense_working: int
    """Working bytes of a dense layer; 0 if the model has none."""
    dense_working_kept: int
    dense_kept: int
    """Bytes saved by a dense layer that is not recomputed."""
    moe_kept: int
    working_kept: int
    b: int
    """Bytes per element of a gathered block: c, or 1 for fp8 weights with one scale."""
    b_experts: int
    """Bytes per element of gathered routed experts."""
    block: int
    """Elements of the largest block on one rank, without routed experts, which are separate units."""
    down: int
    """Elements of a dense layer's down projection, part of ``block``."""
    moe_block: int
    """Elements of a layer with routed experts, without those experts; 0 if the model has none."""
    experts: int
    """Elements of one layer's routed experts on one rank."""
    expert_shards: int
    """Number of ranks that share an expert's master weights."""
    reducing_experts: int
    """Bytes that a layer with experts needs in addition to its saved tensors while its expert gradients are reduced."""
    reducing_experts_kept: int
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
        has_dense, has_routed = num_dense_layers(model) > 0, model.moe is not None
        kinds = [routed for routed, there in ((False, has_dense), (True, has_routed)) if there]
        recomputed = {routed: layer_bytes(e, routed=routed, c=c) for routed in kinds}
        kept = recomputed
        if e.recompute != "none":
            kept = {routed: layer_bytes(e, routed=routed, c=c, recomputed=False) for routed in kinds}
        splits = e.pp_schedule in SPLIT_BACKWARD or e.virtual_stages > 1  # the others defer nothing
        none = LayerBytes(0, 0)
        dense, moe = recomputed.get(False, none), recomputed.get(True, none)
        elements = [local_params(e, moe_layer(model) if routed else dense_layer(model)) for routed in kinds]
        return cls(
            c=c,
            g=MASTER_BYTES[e.precision],
            dense_saved=dense.saved,
            moe_saved=moe.saved,
            dense_deferred=deferred_bytes(e, routed=False, c=c) if has_dense and splits else 0,
            moe_deferred=deferred_bytes(e, routed=True, c=c) if has_routed and splits else 0,
            dense_first_half=first_half_bytes(e, c) if has_dense and splits else 0,
            working=max(one.working for one in recomputed.values()),
            dense_working=dense.working,
            dense_working_kept=kept.get(False, none).working,
            dense_kept=kept.get(False, none).saved,
            moe_kept=kept.get(True, none).saved,
            working_kept=max(one.working for one in kept.values()),
            b=gathered_bytes(e, c),
            b_experts=gathered_bytes(e, c, of_experts=True),
            block=max(rest for rest, _ in elements),
            down=model.ffn_hidden_size // e.tp * model.hidden_size,
            moe_block=elements[-1][0] if has_routed else 0,
            experts=max(experts for _, experts in elements),
            expert_shards=expert_degrees(e)[1] if has_routed else 1,
            reducing_experts=moe.reducing_experts,
            reducing_experts_kept=kept.get(True, none).reducing_experts,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=c * stream_tokens * model.hidden_size,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * model.rope_dim,
            unsharded=accumulates_unsharded(e),
            num_microbatches=e.num_microbatches,
            shards=data_degrees(e)[1],
        )

    def shard(self, rest: int, experts: int) -> int:
        """Bytes of reduced gradients of ``rest`` elements plus ``experts`` elements of routed experts."""
        return self.g * rest // self.shards + self.g * experts // self.expert_shards

    def saved(self, held: StageParams) -> int:
        """Bytes saved by the layers of a stage for one micro-batch."""
        dense, moe = held.dense_recomputed, held.moe_recomputed
        recomputed = dense * self.dense_saved + moe * self.moe_saved
        return recomputed + (held.dense_layers - dense) * self.dense_kept + (held.moe_layers - moe) * self.moe_kept


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
