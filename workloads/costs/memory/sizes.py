"""Sizes that the events of a pipeline rank are made of: of every rank alike, and of one rank or chunk.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import HeadBytes, head_bytes, rank_tokens
from workloads.costs.memory.document_tensors import input_bytes, packed_bytes
from workloads.costs.memory.host import device_state_bytes
from workloads.costs.memory.layer_classes import LayerClass, LayerSizes, Place, classes_of, layer_sizes, places_of
from workloads.costs.shape.fp8 import gathered_bytes
from workloads.costs.shape.params import COMPUTE_BYTES, local_params
from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.costs.shape.updates import shard_numbers, temporary_bytes
from workloads.costs.shape.weight_sums import experts_add
from workloads.spec.activations.offload import last_layer_stays
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.model_layers import layers_of
from workloads.spec.updates.optimizer import master_bytes, reduced_bytes


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
    r: int
    """Bytes per element of sums of gradients while they are unsharded, and of reductions."""
    g_experts: int
    """Bytes per element of reduced gradients of routed experts."""
    sums: int
    """Bytes per element of sharded gradients between micro-batches: g, or r where replicas are summed with the last
    micro-batch, before the cast to g bytes."""
    sums_experts: int
    """The same of routed experts."""
    stays: int
    """Bytes per element of a reduced shard that exist until the next reduction besides the gradient: of the shard
    before it is cast, if replicas are summed, or if with ``adds`` several ranks share master weights; and with ``adds``
    of one that has been added to the gradient of earlier micro-batches."""
    scaled: int
    """Bytes per element of what one shard alone takes beside its flat copy and its gradient: r, of a scaled copy, which
    comes before the gradient, so that g of them are counted with it where r is more."""
    adds: bool
    """Whether products add weight gradients to sums over micro-batches (``gradient_accumulation_fusion``)."""
    experts_add: bool
    """Whether those of routed experts do (`workloads.costs.shape.weight_sums`)."""
    flat: int
    """Bytes per element of a unit from its reduction to the next one, besides its gradient: r, of FSDP's flat copy, or
    with ``adds`` of the sums that are read; 0 where the sums become the gradients."""
    w: int
    """Bytes that an element of a dense weight's gradient takes beside earlier sums over micro-batches: c; with ``adds``
    none, but r in the first backward, which makes the sums."""
    w_blocks: int
    """The same of weights of the blocks, whose fp8 products cannot add to fp32 sums."""
    w_experts: int
    """The same of routed experts."""
    sizes: tuple[LayerSizes, ...]
    """Sizes of each class of layers of the model."""
    b: int
    """Bytes per element of a gathered block: c, or 1 for fp8 weights with one scale."""
    b_experts: int
    """Bytes per element of gathered routed experts."""
    block: int
    """Elements of the largest block on one rank, without routed experts, which are separate units, and without modules
    of multi-token prediction."""
    expert_shards: int
    """Number of ranks that share an expert's master weights."""
    experts_alone: bool
    """Whether each expert is on one rank alone, which reduces its gradients without a message."""
    vocabulary: int
    """Elements of the embedding (or head) on one rank."""
    head: HeadBytes
    stream: int
    """Bytes of one micro-batch's residual stream, also of a stage's output: ``c T_s h``."""
    after_head: int
    """Bytes of gradients that the head's backward leaves: of the stream, and with modules of multi-token prediction of
    each of their hidden states and of one norm's input more."""
    inputs: int
    """Bytes of the tokens of every micro-batch, and of the RoPE tables (`input_bytes`)."""
    packed: int
    """Bytes of tables and masks of packed documents for one micro-batch in a chunk with layers."""
    unsharded: bool
    """Whether gradients accumulate unsharded (`accumulates_unsharded`)."""
    num_microbatches: int
    """m, the number of micro-batches of a step."""
    shards: int
    """S, the number of ranks that share master weights and optimizer state."""
    zero01: bool
    """Whether gradients are reduced in the last backward only (ZeRO 0 and 1)."""
    zero3: bool
    """Whether weights are gathered for each unit, and freed after it."""
    splits: bool
    """Whether the schedule has split backwards."""
    chunks: int
    """Number of chunks of a rank."""
    last_stays: bool
    """Whether the last layer before the head offloads nothing (`last_layer_stays`)."""
    head_in_backward: bool
    """Whether the head's gradients are made in its backward, after the forwards of all micro-batches (GPipe)."""

    @classmethod
    def of(cls, e: Experiment, *, makes_sums: bool = False) -> Shared:
        """``makes_sums``: for a first backward with ``adds``."""
        model, c, g, r = e.model, COMPUTE_BYTES[e.precision], master_bytes(e), reduced_bytes(e)
        stream = c * rank_tokens(e)[1] * model.hidden_size * model.streams
        of_sums = r if makes_sums else 0
        w = w_blocks = of_sums if e.gradient_accumulation_fusion else c
        if e.precision in ("fp8_tensorwise", "fp8_blockwise"):
            w_blocks = c
        flat_sums = e.gradient_accumulation_fusion and data_degrees(e)[1] > 1
        w_experts = of_sums if experts_add(e) else c
        adds_in_place = e.gradient_accumulation_fusion and not experts_add(e) and not makes_sums and r == c
        sizes = layer_sizes(e, w_blocks, w_experts, experts_add=adds_in_place)
        later = e.zero_stage >= 2 and e.num_microbatches > 1
        experts_replicas, expert_shards = expert_degrees(e) if model.moe is not None else (1, 1)
        kinds = layers_of(model).kinds
        held = [size for size, kind in zip(sizes, kinds, strict=True) if not kind.ahead]
        return cls(
            c=c,
            g=g,
            r=r,
            g_experts=g,
            sums=r if later and data_degrees(e)[0] > 1 else g,
            sums_experts=r if later and (experts_replicas > 1 or experts_add(e)) else g,
            stays=r if r != g and (data_degrees(e)[0] > 1 or flat_sums) else 0,
            scaled=r + max(0, r - g),
            adds=e.gradient_accumulation_fusion,
            experts_add=experts_add(e),
            flat=0 if e.gradient_accumulation_fusion and data_degrees(e)[1] == 1 else r,
            w=w,
            w_blocks=w_blocks,
            w_experts=w_experts,
            sizes=sizes,
            b=gathered_bytes(e, c),
            b_experts=gathered_bytes(e, c, of_experts=True),
            block=max(size.block for size in held),
            expert_shards=expert_shards,
            experts_alone=experts_replicas * expert_shards == 1,
            vocabulary=model.vocab_size // e.tp * model.hidden_size,
            head=head_bytes(e, c),
            stream=stream,
            after_head=stream * (1 + model.mtp_modules + (model.mtp_modules > 0)),
            inputs=input_bytes(e),
            packed=packed_bytes(e),
            unsharded=accumulates_unsharded(e),
            num_microbatches=e.num_microbatches,
            shards=data_degrees(e)[1],
            zero01=e.zero_stage <= 1,
            zero3=e.zero_stage == 3,
            splits=e.pp_schedule in SPLIT_BACKWARD,
            chunks=e.virtual_stages,
            last_stays=last_layer_stays(e.pp_schedule),
            head_in_backward=e.pp_schedule == "gpipe",
        )

    @property
    def cast(self) -> int:
        """Bytes per element of a reduced shard that exists beside its cast to g bytes: r, or 0 where nothing is
        cast."""
        return self.r if self.r != self.g else 0

    @property
    def only_sums(self) -> bool:
        """Whether each micro-batch, or the only one of a step, makes sums (``adds``), which are reduced as soon as they
        are made."""
        return self.adds and not self.unsharded

    @property
    def cast_experts(self) -> int:
        """The same of routed experts."""
        return self.r if self.r != self.g_experts else 0

    def after(self, unit: int) -> int:
        """Bytes that stay after the reduction of ``unit`` elements until the next one, besides the gradient."""
        return self.flat * unit + self.stays * unit // self.shards

    def left(self, unit: int) -> int:
        """As `after`, when the next backward begins: shards of replicas have been cast by then."""
        return self.after(unit) if self.only_sums else self.flat * unit

    def of_second_sums(self) -> Shared:
        """With ``only_sums`` for backwards after the first: shards are added to others."""
        return self._replace(stays=self.g + self.cast)

    def made_of_sums(self, unit: int, shards: int) -> int:
        """Bytes that a reduction makes of the sums of ``unit`` elements while it reads them, with ``adds``: a shard, if
        there are several, and its cast."""
        return (self.g + self.cast) * unit // shards if shards > 1 else self.g * unit if self.cast else 0

    def shard(self, rest: int, experts: int) -> int:
        """Bytes of reduced gradients of ``rest`` elements plus ``experts`` elements of routed experts."""
        return self.g * rest // self.shards + self.g_experts * experts // self.expert_shards

    def summed(self, rest: int, experts: int) -> int:
        """Bytes of the sums of these gradients between micro-batches."""
        if self.unsharded:
            return self.r * (rest + experts)
        return self.sums * rest // self.shards + self.sums_experts * experts // self.expert_shards


class Part(NamedTuple):
    """What a pipeline rank holds, or one of its chunks. FSDP's units are in elements, all else is in bytes unless
    stated otherwise."""

    classes: tuple[LayerClass, ...]
    """The layers by class."""
    places: tuple[Place, ...]
    """Layers in whose backward it may peak, from the last one to the first; none of several chunks together."""
    num_layers: int
    has_head: bool
    has_embedding: bool
    params: int
    """Parameters on one rank, in elements."""
    head: int
    """Output projection; 0 if there is no separate one."""
    first: int
    """Unit whose gradient comes last: the embedding, the tied weight or a block."""
    first_down: int
    """The weight of it whose gradient comes last in FSDP's order; all of it if that is not known."""
    first_copy: int
    """Bytes of ``first`` when gathered."""
    first_block: int
    """Block of the first layer, without routed experts; the largest block without layers."""
    last_block: int
    """That of the last layer."""
    last_buffer: int
    """Bytes of FSDP's buffer of the last unit of the layers: the last block or its experts. One rank that has experts
    alone casts them weight by weight, and has none."""
    tied: int
    """Embedding that is also the output projection; 0 if there is no such weight."""
    all_experts: int
    """Routed experts of all layers."""
    ends: int
    """Embedding, head and final norm."""
    whole: int
    """Gathered parameters."""
    master: int
    """Master weights."""
    optimizer: int
    """State of the optimizer on the device."""
    updating: int
    """Temporary memory of the update."""
    shard: int
    """Reduced gradients."""
    accumulated: int
    """Gradients between micro-batches: sums."""
    saved: int
    """Saved by the layers for one micro-batch, on the device, with the output that is sent on."""
    output: int
    """That output, part of ``saved``, which exists until the backward ends; 0 with the head."""
    offloaded: tuple[int, ...]
    """Held by each layer on the host from forward to backward, from the last layer to the first."""
    last_stays: int
    """Part of ``saved`` that the last layer would offload, if its backward did not come next."""
    input_stays: int
    """Part of ``saved`` that the first layer would offload, if the pipeline did not hold it too: a received input."""
    packed: int
    """Tables and masks of packed documents for one micro-batch."""
    of_head: int
    """Saved by the head for one micro-batch."""
    deferred: int
    """Held between the two passes of one split backward."""

    @classmethod
    def of(cls, e: Experiment, x: Shared, held: StageParams) -> Part:
        """``held``: the layers and ends of a rank, or of one of its chunks."""
        layers, experts = local_params(e, held.layers)
        ends = (held.embedding + held.head) // e.tp + held.final_norm
        params = layers + experts + ends
        own = (layers + ends) // x.shards + experts // x.expert_shards
        master = x.g * own
        shard = master if e.virtual_stages == 1 else x.shard(layers + ends, experts)
        classes = classes_of(x.sizes, held)
        of_host, last_stays, input_stays = _offloaded(x, held)
        output = 0 if held.has_head else x.stream
        places = places_of(x.sizes, held)
        first_block, last_block = (places[at].size.block if places else x.block for at in (-1, 0))
        first_down = places[-1].size.down if places else 0
        last_experts = places[0].size.experts if places else 0
        last_buffer = x.b * last_block
        if last_experts:
            last_buffer = x.b_experts * last_experts if x.expert_shards > 1 else 0
        return cls(
            classes=classes,
            places=places,
            num_layers=held.num_layers,
            has_head=held.has_head,
            has_embedding=held.embedding > 0,
            params=params,
            head=x.vocabulary if held.head else 0,
            first=x.vocabulary if held.embedding else first_block,
            first_down=x.vocabulary if held.embedding else first_down or first_block,
            first_copy=x.c * x.vocabulary if held.embedding else x.b * first_block,
            first_block=first_block,
            last_block=last_block,
            last_buffer=last_buffer,
            tied=x.vocabulary if held.has_head and held.embedding > 0 and held.head == 0 else 0,
            all_experts=experts,
            ends=ends,
            whole=x.b * layers + x.b_experts * experts + x.c * ends,
            master=master,
            optimizer=device_state_bytes(e, own, *shard_numbers(e, held)),
            updating=temporary_bytes(e, held),
            shard=shard,
            accumulated=shard
            if (x.sums, x.sums_experts) == (x.g, x.g_experts) and not x.unsharded
            else x.summed(layers + ends, experts),
            saved=sum(one.saved for one in classes) + last_stays + input_stays + output,
            output=output,
            offloaded=of_host,
            last_stays=last_stays,
            input_stays=input_stays,
            packed=x.packed if held.num_layers else 0,
            of_head=x.head.saved if held.has_head else 0,
            deferred=sum(one.layers * one.size.deferred for one in classes),
        )

    @property
    def only_unit(self) -> bool:
        """Whether there is no unit besides one layer, so that none is gathered ahead."""
        return self.num_layers == 1 and not self.has_embedding and not self.has_head

    @property
    def last_forward(self) -> int:
        """Bytes in addition to ``saved`` at the end of the last layer's forward; there must be one."""
        last = self.places[0]
        return last.size.forward if last.recomputed else last.size.forward_kept

    def received(self, x: Shared, *, first_half: bool) -> int:
        """Bytes of the gradient that a stage other than the last has received, which it holds until the backward ends.
        ``first_half``: in an input-gradient pass, in which it may be counted with what the last layer holds."""
        counted = first_half and len(self.places) > 0 and self.places[0].size.holds_gradient
        return 0 if self.has_head or counted else x.stream

    def fetched(self, place: int) -> int:
        """Bytes that have come back from the host while the backward of a layer runs, ``place`` layers before the last
        one: its own, and those of the layer before it."""
        return sum(self.offloaded[place : place + 2])


def _offloaded(x: Shared, held: StageParams) -> tuple[tuple[int, ...], int, int]:
    """`Part.offloaded`, `Part.last_stays` and `Part.input_stays`."""
    offloaded = [x.sizes[kind].offloaded for kind in reversed(held.order)]
    last_stays = input_stays = 0
    if offloaded and held.has_head and x.last_stays:
        last_stays = offloaded[0]
        offloaded[0] = 0
    first = len(offloaded) - 1
    if offloaded and held.embedding == 0 and offloaded[first] > 0:
        input_stays = x.sizes[held.order[0]].offloaded_input
        offloaded[first] -= input_stays
    return tuple(offloaded), last_stays, input_stays
