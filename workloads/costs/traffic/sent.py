"""Exact traffic of one rank in one optimizer step, by axis of the layout and kind of collective. No torch here.

Bytes are S of `workloads.costs.traffic.collectives`: the whole (gathered, or not yet scattered) buffer of one rank. A
message between two ranks counts at its sender. Groups of one rank send nothing. The engine counts the same in a warm-up
step (`workloads.engine.observing.traffic`); a test requires that both agree to the byte on every rank.

Symbols: c and g bytes of a compute and of a master value, T tokens of a micro-batch on one rank, D hidden size. Axes
``dp_shard`` and ``dp_replicate`` are the data mesh's shards and replicas, cp among them (`mesh.data_degrees`), and
those of the expert mesh (`mesh.expert_degrees`).

tp      each block, forward and backward of one micro-batch, S = c T D:
        with sequence parallelism (arXiv:2205.05198, section 4.2) 6 gathers and 4 scatters (a column-parallel layer
        gathers its input again in its backward), without it 4 all-reduces. Full recomputation repeats the forward up to
        the last projection's sum. Selective recomputation repeats nothing, except in compiled blocks
        (`Experiment.compiles`) the 2 gathers of the forward. Blocks that ``recompute_every`` skips repeat nothing
        With latent attention the input of its first layers is not D wide: each latent, S = c T C, is gathered and
        scattered like the input of a column-parallel layer, and the shared key, S = c T R, without a second gather.
        Recomputing ``mla_up`` gathers the latents once more
        The embedding and the head add one gather and one scatter each, or one all-reduce; modules of multi-token
        prediction add one of the head each, and their look-ups are in the message of the embedding. The loss adds two
        all-reduces a chunk: the largest logit of each token, then two sums (accumulated in fp32, or fp64). Once a step
        the gradients of weights that every tp rank holds whole are summed, in one all-reduce of this rank's shards, and
        where key and value heads are copied, those of their projections over the ranks with copies, in another
cp      each layer's attention, see `workloads.costs.traffic.context_parallel`. A ring's messages are all-to-alls
ep      layers with routed experts, along tp and cp too: `workloads.costs.traffic.expert_traffic`
dp      FSDP sends one message for each unit that it wraps, see `_data_parallel`
pp      c T D a micro-batch and stage on another rank (c T D / tp with sequence parallelism): activations to the next
        stage, gradients to the previous one
tied    one all-reduce of this rank's shard of the embedding's gradient, between the first and the last stage, if they
        are on two ranks and both have it: tied to the head, or looked up by modules of multi-token prediction
world   the loss and the squared gradient norm, and the loss of such modules, in one all-reduce of master values. If one
        axis has all ranks, this is a call along that axis

update  what the optimizer sends (`workloads.costs.traffic.updates`), along ``stage``, dp_shard and tp

Further kinds of parallelism are added as terms in `_TERMS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from workloads.costs.memory.activations import LOSS_CHUNK_TOKENS
from workloads.costs.shape.copied_rows import rows_of_shard
from workloads.costs.shape.held_model import as_held, copies_of_heads
from workloads.costs.shape.schedule import schedule_actions
from workloads.costs.traffic.expert_traffic import routed_experts
from workloads.costs.traffic.fsdp import FsdpWalk, Unit
from workloads.costs.traffic.kind_traffic import blocks_along_cp, blocks_along_tp, layer_units, replicated_shapes
from workloads.costs.traffic.sender import Sender, SentTally, Stage, Traffic
from workloads.costs.traffic.updates import held_parameters, updates
from workloads.spec.experiment import Experiment

__all__ = ["SentTally", "Traffic", "step_traffic"]

_FP8_SCALE_BYTES = 4


def step_traffic(experiment: Experiment, rank: int, devices_per_node: int | None = None) -> list[Traffic]:
    """Returns the traffic of ``rank`` in one step.

    With learned routing the bytes of the exchanges among experts are means over the ranks of a group
    (`workloads.costs.traffic.expert_traffic`); everything else is exact. Raises `UnsupportedByEngine` for a schedule
    without a list.
    """
    tally = SentTally(rank, devices_per_node)
    held, by_head = Sender(as_held(experiment), rank, tally), Sender(experiment, rank, tally)
    for term in _TERMS:
        term(held)
    for term_of_weights in (_copied_heads, updates):
        term_of_weights(by_head)
    return tally.result()


def _tensor_parallel(s: Sender) -> None:
    """Count what the layers send, the ends of the model, and the gradients of weights that every rank holds whole."""
    e = s.experiment
    has_head = any(stage.is_last for stage in s.stages)
    activations, passes = s.compute * s.tokens * e.model.hidden_size, has_head * (1 + e.model.mtp_modules)
    blocks_along_tp(s)
    for size in [*(s.looked_up(stage) * activations for stage in s.stages), *[activations] * passes]:
        if size and e.sequence_parallel:
            s.along("tp", "all_gather", size, e.num_microbatches)
            s.along("tp", "reduce_scatter", size, e.num_microbatches)
        elif size:
            s.along("tp", "all_reduce", size, e.num_microbatches)
    if has_head:
        chunks = -(-s.tokens // LOSS_CHUNK_TOKENS)
        size = -(-s.tokens // chunks)
        for start in range(0, s.tokens, size):
            tokens = min(size, s.tokens - start)
            for values in (1, 2):
                s.along("tp", "all_reduce", values * tokens * s.accumulated, passes * e.num_microbatches)
    replicated = [*replicated_shapes(s), *([(e.model.hidden_size,)] if has_head and e.sequence_parallel else [])]
    if replicated:
        elements = (s.own_rows(rows) * math.prod(rest) for rows, *rest in replicated)
        s.along("tp", "all_reduce", s.master * sum(elements))


def _copied_heads(s: Sender) -> None:
    """Count the sums of the gradients of key and value heads over the tp ranks that hold copies of them: one message
    for every number of copies, of this rank's rows."""
    e = s.experiment
    elements: Counter[int] = Counter()
    for parts in held_parameters(s) if copies_of_heads(e) else ():
        if any(part.kv_heads for part in parts):
            for rows in rows_of_shard(parts, e.tp, s.shards(), s.own_shard):
                elements[rows.copies] += (rows.stop - rows.start) * math.prod(parts[0].shape[1:])
    for copies, count in elements.items():
        if copies > 1:
            s.along_copies("all_reduce", s.master * count, copies)


def _units(s: Sender, stage: Stage) -> tuple[Unit | None, list[Unit]]:
    """(the stage's own unit, with parameters of no other unit, or None; the other units in forward order)."""
    e, model, blocks = s.experiment, s.experiment.model, list(layer_units(s, stage))
    d, zero3 = model.hidden_size, e.zero_stage == 3
    vocabulary = (model.vocab_size // e.tp, d)
    embeds = s.looked_up(stage) > 0
    if model.tie_embeddings and embeds and stage.is_last:
        return Unit((vocabulary, (d,)), False), blocks
    first = [Unit((vocabulary,), zero3)] if embeds else []
    last = [Unit(((d,), vocabulary), False)] if stage.is_last else []
    return None, [*first, *blocks, *last]


def _data_parallel(s: Sender) -> None:
    """Walks the schedule as FSDP does, separately for each of this rank's stages.

    A unit is gathered when a forward or a backward finds it sharded: S = c times its padded elements, except one byte
    for each element of matrices with one fp8 scale, whose largest values are all-reduced once a step (experts'
    separately). It is sharded again after its forward (ZeRO 3; not the head, whose backward comes next) and after its
    backward (ZeRO 3: always, else with the last micro-batch). As soon as a unit's backward has begun, FSDP gathers the
    unit that ran before it in the order of all forwards so far; before the first unit of a forward that is the last
    unit of the previous forward. In the last micro-batch that gather is unnecessary, but it is sent. Experts are a unit
    inside that of their layer, and are sent among the ranks that hold the same experts.

    Gradients are reduce-scattered with every micro-batch (ZeRO 2 and 3) or with the last (S = g times the padded
    elements), and all-reduced over the replicas with the last (S = the shard of it). In a split backward W reduces,
    except for the embedding and the head with ZeRO 2 and 3; it gathers nothing.
    """
    e = s.experiment
    actions = schedule_actions(e.pp_schedule, s.position["pp"], e.pp, e.num_microbatches, e.virtual_stages)
    units = [_units(s, stage) for stage in s.stages]
    for of_experts in (False, True):
        in_fp8 = [unit for _, others in units for unit in others if unit.of_experts == of_experts and unit.fp8_shapes]
        each = e.model.moe.num_experts // e.ep if of_experts and e.model.moe is not None else 1
        scales = each * sum(len(unit.fp8_shapes) for unit in in_fp8)
        if scales:
            s.along_shards("all_reduce", _FP8_SCALE_BYTES * scales, 1, of_experts=of_experts)
    for chunk, (stage_unit, others) in enumerate(units):
        walk = FsdpWalk(stage_unit, others, keep_gathered=e.zero_stage <= 2)
        reductions = 0
        of_chunk = [action for action in actions if action.chunk == chunk]
        final = [action for action in of_chunk if action.kind in ("B", "W")][-1]
        for action in of_chunk:
            if action.kind == "F":
                walk.forward()
            elif action.kind == "I":
                walk.backward(last=False)
            else:
                if action.kind == "B":
                    walk.backward(last=action == final)
                reductions += action == final or e.zero_stage >= 2
        for unit, gathers in zip(walk.units, walk.gathers, strict=True):
            of_experts = unit.of_experts
            shards = s.shards(of_experts=of_experts)
            elements = unit.padded(shards)
            s.along_shards("all_gather", unit.gathered(shards, s.compute), gathers, of_experts=of_experts)
            s.along_shards("reduce_scatter", s.reduced * elements, reductions, of_experts=of_experts)
            s.along_replicas("all_reduce", s.reduced * elements // shards, of_experts=of_experts)


def _pipeline(s: Sender) -> None:
    e = s.experiment
    message = s.compute * (s.tokens // (e.tp if e.sequence_parallel else 1)) * e.model.hidden_size * e.model.streams
    for stage in s.stages:
        neighbours = ([] if stage.is_last else [stage.index + 1]) + ([] if stage.is_first else [stage.index - 1])
        for neighbour in neighbours:
            s.tally.add("pp", "p2p", message, [s.rank_of_stage(neighbour)], calls=e.num_microbatches)


def _once(s: Sender) -> None:
    """Count the gradient of an embedding with two copies, the losses and the gradient norm."""
    e = s.experiment
    ends = [s.rank_of_stage(0), s.rank_of_stage(e.num_stages - 1)]
    if (e.model.tie_embeddings or e.model.mtp_modules) and s.rank in ends:
        elements = s.own_rows(e.model.vocab_size // e.tp) * e.model.hidden_size
        s.tally.add("tied", "all_reduce", s.master * elements, ends)
    values = 3 if e.model.mtp_modules else 2
    s.tally.add(s.axis_of_all, "all_reduce", values * s.accumulated, range(e.world_size))


_TERMS: tuple[Callable[[Sender], None], ...] = (
    *(_tensor_parallel, blocks_along_cp, _data_parallel, routed_experts, _pipeline, _once),
)
"""Terms of the model whose parts the ranks hold."""
