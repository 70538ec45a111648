"""Device memory of a training step on another engine, in closed form: what differs from this project's engine by
structure, as named terms.

Symbols as in `workloads.costs.memory.estimate`: P parameters of a rank, S ranks over which ZeRO shards, h hidden size,
K columns of the keys, F feed-forward columns, V vocabulary, T tokens of a micro-batch on a rank. A stage holds

    states      `EngineMemory.held` P, `EngineMemory.sharded` P / S, and the copy that FSDP or autocast computes with
    layers      of every micro-batch in flight and every layer, T times the bytes of `Saved`
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
from workloads.costs.shape.partition import StageParams, experiment_stages
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees

BETWEEN = 1.0
"""Share of a layer's tensors that are kept for the weight gradients, in torch's split backwards."""


class Saved(NamedTuple):
    """Bytes that a layer saves for its backward, a token and unit."""

    hidden: float
    keys: float
    ffn: float


NOTHING = Saved(0, 0, 0)


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
    eager=Saved(12, 4, 8),
    compiled=Saved(12, 4, 6),
    logit=12,
    compiled_logit=4,
    gathered=4,
    ring=2,
    fp8=Saved(2, 0, 1),
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
    eager=Saved(22, 4, 8),
    compiled=Saved(14, 4, 6),
    logit=12,
    compiled_logit=4,
    ends=6,
    residual=4,
    fp8=Saved(4, 0, 2),
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
    eager=Saved(14, 6, 6),
    compiled=Saved(14, 6, 6),
    logit=6,
    compiled_logit=6,
)
MEGATRON_TE = EngineMemory(
    source=(
        "megatron-core with transformer-engine: as the local layers, with the gradient of the loss written over the "
        "logits (2 V)"
    ),
    sharded=12,
    held=6,
    gradients=0,
    copied=0,
    eager=Saved(13, 6, 6),
    compiled=Saved(13, 6, 6),
    logit=2,
    compiled_logit=2,
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
    eager=Saved(20, 4, 8),
    compiled=Saved(12, 4, 6),
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
    `workloads.rules.layout_rules` and have a dense model."""
    terms = terms_of(e)
    return [one for stage, held in enumerate(experiment_stages(e)) for one in _of_stage(e, terms, stage, held)]


def _of_stage(e: Experiment, terms: EngineMemory, stage: int, held: StageParams) -> list[Moment]:
    tokens = e.micro_batch_size * e.seq_len / e.cp
    layer, kept = _layer(e, terms)
    compiled, whole = e.compile != "none", e.recompute == "full"
    flights = [live + BETWEEN * between for live, between in moments_held(e, stage)]
    activations = tokens * held.num_layers * (kept if whole else layer) * max(flights)
    working = tokens * layer if whole else 0.0
    begun = e.num_microbatches > 1 or e.pp > 1
    states = _states(e, terms, held, begun, casts_all=not whole or not terms.casts_in_forward)
    if not held.has_head:
        return [Moment(stage, states, activations + working, 0.0)]
    of_logits = tokens * e.model.vocab_size / e.tp
    ends = tokens * terms.ends * e.model.hidden_size / e.tp
    logit = terms.compiled_logit if compiled else terms.logit
    moments = [
        Moment(stage, states, activations + ends, logit * of_logits),
        Moment(stage, _states(e, terms, held, True, casts_all=not whole), tokens * layer, 0.0),
    ]
    if terms.casts_in_forward:
        cast = _states(e, terms, held, begun, casts_all=True)
        forward = min(logit, terms.forward_logit)
        moments.append(Moment(stage, cast, activations + ends, forward * of_logits))
    return moments


def _layer(e: Experiment, terms: EngineMemory) -> tuple[float, float]:
    """Bytes that a layer saves a token, and those of its input alone."""
    model, saved = e.model, terms.compiled if e.compile != "none" else terms.eager
    if e.precision.startswith("fp8"):
        saved = Saved(*(a - b for a, b in zip(saved, terms.fp8, strict=True)))
    keys = model.hidden_size * model.num_kv_heads / model.num_heads
    split = saved.hidden * model.hidden_size + saved.keys * keys + saved.ffn * model.ffn_hidden_size
    whole = (terms.gathered if e.tp > 1 else 0.0) + (terms.ring if e.cp > 1 else 0.0)
    return split / e.tp + whole * model.hidden_size, terms.residual * model.hidden_size / e.tp


def _states(e: Experiment, terms: EngineMemory, held: StageParams, begun: bool, *, casts_all: bool) -> float:
    """Bytes of weights, gradients and optimizer. ``begun``: whether a backward has left gradients; ``casts_all``:
    whether layers keep their copy to compute with."""
    params = held.total / e.tp
    layers = held.layers.total / e.tp
    replicas, shards = data_degrees(e)
    divided = shards if e.zero_stage else 1
    gradients = terms.gradients * params / (divided if e.zero_stage >= 2 else 1) if begun else 0.0
    copied = terms.copied
    of_layers = copied * layers * (0.5 if e.precision.startswith("fp8") else 1.0)
    twice = held.embedding / e.tp if terms.copies_tied_twice and e.model.tie_embeddings and held.has_head else 0.0
    of_ends = copied * (params - layers + twice)
    if terms.casts_in_forward:  # autocast: products alone are cast, and only while their graph needs it
        head = held.head or (held.embedding if held.has_head else 0)
        of_layers = 0.0 if e.precision.startswith("fp8") or not casts_all else of_layers
        of_ends = copied * head / e.tp
    if e.zero_stage == 3:
        of_layers = of_ends = 0.0
    buckets = terms.buckets * params if replicas * shards > 1 and not e.zero_stage else 0.0
    return terms.sharded * params / divided + terms.held * params + gradients + of_layers + of_ends + buckets
