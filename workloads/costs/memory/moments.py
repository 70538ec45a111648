"""What the moments of a backward are made of, at which a pipeline rank may hold most.

They are in `workloads.costs.memory.layer_moments` and `workloads.costs.memory.end_moments`;
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
    """ZeRO 0 and 1 reduce gradients with the last micro-batch only, of a split backward in its second half; until then
    they are whole on every rank."""
    later = experiment.num_microbatches > 1 or experiment.pp_schedule in SPLIT_BACKWARD
    return experiment.zero_stage <= 1 and later


class Shared(NamedTuple):
    """What is the same on every stage. Bytes unless said otherwise; c, g and m as in
    `workloads.costs.memory.estimate`."""

    c: int
    g: int
    dense_saved: int
    """Of one dense layer and one micro-batch."""
    moe_saved: int
    """Of one layer with experts; 0 where the model has none."""
    dense_deferred: int
    """Of one dense layer between the halves of a split backward."""
    moe_deferred: int
    dense_first_half: int
    """More than ``dense_working`` in the first half of a split backward."""
    working: int
    """Of the kind of layer that needs most."""
    dense_working: int
    """Of a dense layer; 0 where the model has none. The same of one that is not recomputed."""
    dense_working_kept: int
    dense_kept: int
    """As ``dense_saved``, of a layer that is not recomputed (``recompute_every``)."""
    moe_kept: int
    working_kept: int
    b: int
    """Bytes of an element of a block as it is gathered: c, or 1 for fp8 weights with one scale."""
    b_experts: int
    """The same of routed experts."""
    block: int
    """Elements of the largest block on one rank, without routed experts, which are a unit of their own."""
    down: int
    """Of them the weight of a dense layer's way down."""
    moe_block: int
    """The same of a layer with routed experts; 0 where the model has none."""
    experts: int
    """Elements of one layer's routed experts on one rank."""
    expert_shards: int
    """Ranks that share an expert's master weights."""
    beside_experts: int
    """Of a layer with experts, beside what it saved, when its experts' gradients are reduced."""
    beside_experts_kept: int
    vocabulary: int
    """Elements of the embedding (or head) on one rank."""
    head: HeadBytes
    stream: int
    """Residual stream of one micro-batch, also a stage's output: ``c T_s h``."""
    inputs: int
    """Token ids and targets of every micro-batch (int64), and the RoPE tables (fp32 sine and cosine)."""
    whole: bool
    """Gradients accumulate unsharded."""
    rounds: int
    """m, the micro-batches of a step."""
    shards: int
    """S, the ranks that share master weights and optimizer state."""

    @classmethod
    def of(cls, e: Experiment) -> Shared:
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens, stream_tokens = rank_tokens(e)
        has_dense, has_routed = num_dense_layers(model) > 0, model.moe is not None
        kinds = [routed for routed, there in ((False, has_dense), (True, has_routed)) if there]
        again = {routed: layer_bytes(e, routed=routed, c=c) for routed in kinds}
        kept = {routed: layer_bytes(e, routed=routed, c=c, recomputed=False) for routed in kinds}
        none = LayerBytes(0, 0)
        dense, moe = again.get(False, none), again.get(True, none)
        elements = [local_params(e, moe_layer(model) if routed else dense_layer(model)) for routed in kinds]
        return cls(
            c=c,
            g=MASTER_BYTES[e.precision],
            dense_saved=dense.saved,
            moe_saved=moe.saved,
            dense_deferred=deferred_bytes(e, routed=False, c=c) if has_dense else 0,
            moe_deferred=deferred_bytes(e, routed=True, c=c) if has_routed else 0,
            dense_first_half=first_half_bytes(e, c) if has_dense else 0,
            working=max(one.working for one in again.values()),
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
            beside_experts=moe.beside_experts,
            beside_experts_kept=kept.get(True, none).beside_experts,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=c * stream_tokens * model.hidden_size,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * model.rope_dim,
            whole=accumulates_unsharded(e),
            rounds=e.num_microbatches,
            shards=data_degrees(e)[1],
        )

    def shard(self, rest: int, experts: int) -> int:
        """Bytes of reduced gradients: ``rest`` elements, and ``experts`` of routed experts."""
        return self.g * rest // self.shards + self.g * experts // self.expert_shards

    def saved(self, held: StageParams) -> int:
        """Of the layers of a stage and one micro-batch."""
        dense, moe = held.dense_recomputed, held.moe_recomputed
        recomputed = dense * self.dense_saved + moe * self.moe_saved
        return recomputed + (held.dense_layers - dense) * self.dense_kept + (held.moe_layers - moe) * self.moe_kept


class Units(NamedTuple):
    """One stage's FSDP units, in elements."""

    head: int
    """The output projection; 0 where the stage has none of its own."""
    first: int
    """The unit whose gradient comes last: the embedding, the tied weight or a block."""
    first_copy: int
    """Bytes of that unit as it is gathered."""
    tied: int
    """The embedding that is also the output projection; 0 where the stage has no such weight."""
    experts: int
    """The routed experts of one layer; 0 where the stage has none."""
    all_experts: int
    """Those of all its layers."""


class Round(NamedTuple):
    """The backward of one micro-batch."""

    in_flight: float
    """Micro-batches held when it starts."""
    deferred: int
    """Bytes of what other micro-batches hold for their weights' gradients."""
    prior: int
    """Bytes of gradients that earlier micro-batches left."""
    last: bool
    """Of the step: gradients are reduced here at the latest."""
    forward_follows: bool
    """Another micro-batch's forward comes after it."""
    own: int = 0
    """Bytes of what its own products keep for the second half; 0 for a whole backward."""
    first_half: bool = False
    """The second half is a round by itself: blocks have no gradients in this one."""
    second_half: bool = False
    """That round: the head, whose gradient is there, stays gathered until it is reduced after all blocks."""


Moment = tuple[int, int, int]
"""Bytes of (gathered parameters, gradients, activations)."""


def reduces(x: Shared, turn: Round) -> bool:
    return turn.last or not x.whole


def reduce_bytes(x: Shared, unit: int, turn: Round) -> int:
    """Buffers while FSDP reduces a unit, besides gradients that stay.

    A flat copy in g bytes an element, and with one shard a scaled copy of it. With several shards a variable of FSDP
    keeps the gradient of the unit's last weight until the end, in c bytes an element: that is all of the head's or the
    embedding's. So lives the new shard where there is an earlier one to add to.
    """
    if x.shards == 1 or x.whole:
        return 2 * x.g * unit
    return (x.g + x.c) * unit + (x.g * unit // x.shards if turn.prior else 0)


def waiting(x: Shared, units: Units, turn: Round) -> int:
    """The flat copy through which the previous micro-batch's last unit was reduced: it lives until the next is."""
    return x.g * units.first if turn.prior and not x.whole else 0


def held_bytes(x: Shared, turn: Round, saved: int, has_head: bool) -> int:
    """Saved activations at the start of a backward, without what the head keeps for this micro-batch."""
    return turn.deferred + int(turn.in_flight * saved + (turn.in_flight - 1) * (x.head.saved if has_head else 0))
