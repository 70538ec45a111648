"""Device memory of a training step on another engine, in closed form: what differs from this project's engine by
structure, as named terms.

Symbols as in `workloads.costs.memory.estimate`: P parameters of a rank, S ranks over which ZeRO shards, h hidden size,
Q columns of the queries, K of the keys, F feed-forward columns, V vocabulary, T tokens of a micro-batch on a rank, M
copies of tokens that its experts receive. A stage holds

    states      `EngineMemory.held` P, `EngineMemory.sharded` P / S, and the copy that FSDP or autocast computes with
    layers      of every micro-batch in flight and every layer, T times the bytes of `Saved`; of routed experts M times
                those of `EngineMemory.row`
    loss        T V times the bytes of a logit at the peak, which is the backward of the loss

and peaks in the backward of the loss, in the forward of the loss, or in the last layer's recomputation. The numbers
come from the tensors that the modules save, counted one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from workloads.costs.memory.estimate import moments_held
from workloads.costs.memory.expert_activations import received_rows
from workloads.costs.shape.fp8 import is_low
from workloads.costs.shape.partition import StageParams, experiment_stages
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec

BETWEEN = 1.0
"""Share of a layer's tensors that are kept for the weight gradients, in torch's split backwards."""


class Saved(NamedTuple):
    """Bytes that a layer saves for its backward, a token and unit."""

    hidden: float
    queries: float
    keys: float
    ffn: float

    def of(self, model: ModelSpec, columns: int) -> float:
        """Bytes a token of a layer with so many feed-forward columns."""
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        return self.hidden * model.hidden_size + self.queries * queries + self.keys * keys + self.ffn * columns


NOTHING = Saved(0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Terms of one engine with 16-bit products."""

    source: str
    sharded: float
    """Bytes of a parameter that ZeRO 1 divides: fp32 weights and moments."""
    held: float
    """Bytes of a parameter that are always there and never divided."""
    gradients: float
    """Bytes of a gradient between micro-batches, divided from ZeRO 2 on."""
    copied: float
    """Bytes of a parameter of the copy to compute with; ZeRO 3 has none at the peak."""
    eager: Saved
    compiled: Saved
    logit: float
    """Bytes of a logit in the backward of the loss."""
    compiled_logit: float
    ends: float = 4.0
    """Bytes a token and hidden unit of the final norm."""
    residual: float = 2.0
    """Bytes a token and hidden unit of a layer's input, which full recomputation keeps."""
    gathered: float = 0.0
    """Bytes a token and hidden unit of inputs that tensor parallelism gathers and keeps whole."""
    ring: float = 0.0
    """Bytes a token and hidden unit that ring attention saves more."""
    fp8: Saved = NOTHING
    """Bytes by which a layer in fp8 saves less."""
    copies_tied_twice: bool = False
    """Whether a tied weight is sharded, and gathered, once as embedding and once as head."""
    buckets: float = 0.0
    """Bytes of a parameter of the buffers in which replicas reduce their gradients."""
    casts_in_forward: bool = False
    """Whether the copy to compute with covers all weights until the loss is computed, even if layers recompute."""
    forward_logit: float = 0.0
    """Bytes of a logit in the forward of the loss."""
    row: Saved | None = None
    """Bytes that a layer's routed experts save, a copy of a token that they receive; None: not counted."""
    scores: float = 0.0
    """Bytes of a token and expert that routing saves."""


TORCHTITAN = EngineMemory(
    source=(
        "torchtitan 0.2.2 over FSDP2, models/llama3 and components/loss.py: inputs and outputs of both norms (8 h), q, "
        "k, v and the attention's output (4 h + 4 K), both products of the feed-forward layer, SiLU and their product "
        "(8 F; compiled without SiLU); logits in fp32, their log-softmax, and the gradients of both (12 V)"
    ),
    sharded=12,
    held=0,
    gradients=4,
    copied=2,
    eager=Saved(8, 4, 4, 8),
    compiled=Saved(8, 4, 4, 6),
    logit=12,
    compiled_logit=4,
    gathered=4,
    ring=2,
    fp8=Saved(2, 0, 0, 1),
    copies_tied_twice=True,
)
TORCHTITAN_AUTOCAST = EngineMemory(
    source=(
        "torchtitan 0.2.2 without FSDP, under torch.autocast: fp32 residuals (8 h), an input cast for each of five "
        "products (10 h; compiled one of them, 2 h), q, k, v and the attention's output (4 h + 4 K); cast weights are "
        "kept, all but the embedding"
    ),
    sharded=12,
    held=0,
    gradients=4,
    copied=2,
    eager=Saved(16, 6, 4, 8),
    compiled=Saved(10, 4, 4, 6),
    logit=12,
    compiled_logit=4,
    ends=6,
    residual=4,
    fp8=Saved(4, 0, 0, 2),
    buckets=4,
    casts_in_forward=True,
    forward_logit=10,
)
MEGATRON_LOCAL = EngineMemory(
    source=(
        "megatron-core 0.16.1, local layers: inputs, outputs of both norms (8 h), q, k, v as one tensor (2 h + 4 K), "
        "q and k after RoPE (2 h + 2 K), the attention's output (2 h), both products and the result of SwiGLU (6 F); "
        "logits and vocab_parallel_cross_entropy's exponentials in fp32 (6 V); main gradients in fp32, never sharded"
    ),
    sharded=12,
    held=6,
    gradients=0,
    copied=0,
    eager=Saved(8, 6, 6, 6),
    compiled=Saved(8, 6, 6, 6),
    logit=6,
    compiled_logit=6,
)
MEGATRON_TE = EngineMemory(
    source=(
        "megatron-core with transformer-engine: as the local layers, with the gradient of the loss written over the "
        "logits (2 V); a copy of a token at the experts: its row (2 h), gate, up and their product (6 F); the router's "
        "scores in fp32"
    ),
    sharded=12,
    held=6,
    gradients=0,
    copied=0,
    eager=Saved(7, 6, 6, 6),
    compiled=Saved(7, 6, 6, 6),
    logit=2,
    compiled_logit=2,
    row=Saved(2, 0, 0, 6),
    scores=4,
)
TRANSFORMERS = EngineMemory(
    source=(
        "transformers' Llama over FSDP2, counted and not yet measured: its norms keep their inputs in fp32 and two "
        "results (16 h), the rest as torchtitan"
    ),
    sharded=12,
    held=0,
    gradients=4,
    copied=2,
    eager=Saved(16, 4, 4, 8),
    compiled=Saved(8, 4, 4, 6),
    logit=12,
    compiled_logit=12,
    ends=10,
)
TERMS: Mapping[str, tuple[tuple[str, EngineMemory, EngineMemory], ...]] = {
    "torchtitan": (("", TORCHTITAN, TORCHTITAN_AUTOCAST),),
    "megatron": (("without Transformer Engine", MEGATRON_LOCAL, MEGATRON_LOCAL), ("", MEGATRON_TE, MEGATRON_TE)),
    "transformers": (("", TRANSFORMERS, TRANSFORMERS),),
}
"""By engine: (regular expression of the version, terms, terms without sharding); the first match counts."""


def terms_of(e: Experiment) -> EngineMemory:
    """Terms of an experiment's engine; those of torchtitan over FSDP2 for an engine without terms of its own."""
    for pattern, usual, whole in TERMS.get(e.engine, ()):
        if re.search(pattern, e.engine_version):
            return whole if e.zero_stage == 0 else usual
    return TORCHTITAN


def counts_layers(e: Experiment) -> bool:
    """Whether the terms of the experiment's engine know its layers and numbers: dense layers, and experts where they
    are counted, in 16 bits or less."""
    model, precision = e.model, e.precision
    known = model.mla is None and model.layers is None and (model.moe is None or terms_of(e).row is not None)
    return known and (precision == "bf16" or is_low(e))


class Moment(NamedTuple):
    """Bytes of one stage at one moment."""

    stage: int
    states: float
    layers: float
    loss: float

    @property
    def total(self) -> float:
        return self.states + self.layers + self.loss


def moments_of(e: Experiment) -> list[Moment]:
    """Moments of all stages at one of which the step's memory peaks. The experiment must break no rule of
    `workloads.rules.layout_rules`; `counts_layers` is true for it."""
    terms = terms_of(e)
    return [one for stage, held in enumerate(experiment_stages(e)) for one in _of_stage(e, terms, stage, held)]


def _of_stage(e: Experiment, terms: EngineMemory, stage: int, held: StageParams) -> list[Moment]:
    tokens = e.micro_batch_size * e.seq_len / e.cp
    kinds = layers_of(e.model).kinds
    of_kind = [(count, kind.routed) for count, kind in zip(held.of_kind, kinds, strict=True) if count]
    layers = sum(count * _layer(e, terms, routed=routed) for count, routed in of_kind)
    kept = held.num_layers * tokens * terms.residual * e.model.hidden_size / e.tp
    compiled, whole = e.compile != "none", e.recompute == "full"
    flights = [live + BETWEEN * between for live, between in moments_held(e, stage)]
    activations = (kept if whole else layers) * max(flights)
    layer = _layer(e, terms, routed=any(routed for _, routed in of_kind))
    working = layer if whole else 0.0
    begun = e.num_microbatches > 1 or e.pp > 1
    states = _states(e, terms, held, begun, casts_all=not whole or not terms.casts_in_forward)
    if not held.has_head:
        return [Moment(stage, states, activations + working, 0.0)]
    of_logits = tokens * e.model.vocab_size / e.tp
    ends = tokens * terms.ends * e.model.hidden_size / e.tp
    logit = terms.compiled_logit if compiled else terms.logit
    moments = [
        Moment(stage, states, activations + ends, logit * of_logits),
        Moment(stage, _states(e, terms, held, True, casts_all=not whole), layer, 0.0),
    ]
    if terms.casts_in_forward:
        cast = _states(e, terms, held, begun, casts_all=True)
        forward = min(logit, terms.forward_logit)
        moments.append(Moment(stage, cast, activations + ends, forward * of_logits))
    return moments


def _layer(e: Experiment, terms: EngineMemory, *, routed: bool) -> float:
    """Bytes that a layer saves of a micro-batch."""
    model, saved = e.model, terms.compiled if e.compile != "none" else terms.eager
    if is_low(e):
        saved = Saved(*(a - b for a, b in zip(saved, terms.fp8, strict=True)))
    tokens = e.micro_batch_size * e.seq_len / e.cp
    whole = (terms.gathered if e.tp > 1 else 0.0) + (terms.ring if e.cp > 1 else 0.0)
    moe = model.moe if routed else None
    columns = model.ffn_hidden_size if moe is None else moe.num_shared_experts * moe.expert_hidden_size
    layer = tokens * (saved.of(model, columns) / e.tp + whole * model.hidden_size)
    if moe is None or terms.row is None:
        return layer
    row = terms.row.hidden * model.hidden_size + terms.row.ffn * moe.expert_hidden_size / e.etp
    return layer + received_rows(e) * row + tokens * terms.scores * moe.num_experts / e.tp


def _states(e: Experiment, terms: EngineMemory, held: StageParams, begun: bool, *, casts_all: bool) -> float:
    """Bytes of weights, gradients and optimizer. ``begun``: whether a backward has left gradients; ``casts_all``:
    whether layers keep their copy to compute with."""
    experts = held.layers.experts / (e.ep * e.etp)
    layers = (held.layers.total - held.layers.experts) / e.tp + experts
    params = layers + (held.total - held.layers.total) / e.tp
    replicas, shards = data_degrees(e)
    divided = (params - experts) / shards + experts / expert_degrees(e)[1] if e.zero_stage else params
    gradients = terms.gradients * (divided if e.zero_stage >= 2 else params) if begun else 0.0
    copied = terms.copied
    of_layers = copied * layers * (0.5 if is_low(e) else 1.0)
    twice = held.embedding / e.tp if terms.copies_tied_twice and e.model.tie_embeddings and held.has_head else 0.0
    of_ends = copied * (params - layers + twice)
    if terms.casts_in_forward:  # autocast: products alone are cast, and only while their graph needs it
        head = held.head or (held.embedding if held.has_head else 0)
        of_layers = 0.0 if is_low(e) or not casts_all else of_layers
        of_ends = copied * head / e.tp
    if e.zero_stage == 3:
        of_layers = of_ends = 0.0
    buckets = terms.buckets * params if replicas * shards > 1 and not e.zero_stage else 0.0
    return terms.sharded * divided + terms.held * params + gradients + of_layers + of_ends + buckets
