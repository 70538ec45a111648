"""Tensors that a layer of any kind saves for backward, each with its bytes and the word of ``recompute`` that drops it.

Symbols are those of `workloads.costs.memory.activations`: T tokens of a micro-batch on one rank, T_s of them between
tensor-parallel regions, c bytes of an activation, h hidden size. A kind's tensors are one function here. Operations are
taken to save what the engine's do, and those that it lacks what published kernels do: an indexer its choice
as 32-bit numbers. Mamba-2, the gated delta rule and KDA save their projections and, for the output projection, the
gated norm; everything between them is computed again (`workloads.engine.kind_ops.segments`).

The accounting follows Korthikanti et al. 2022 (arXiv:2205.05198, eq. 1-6), with this engine's operators in place of a
GPT layer's. A column-parallel layer saves this rank's part of its input, not the gathered one. Ulysses saves queries,
keys and values once, as received: the rotated ones are freed when sent, and so is the projection unless it is the input
of query and key norms; the attention output is saved before and after it is sent back. In fp8 the inputs of products
are smaller (`workloads.costs.shape.fp8`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workloads.costs.memory.activations import STATISTICS_BYTES, rank_tokens
from workloads.costs.memory.expert_activations import ExpertTensors, expert_tensors
from workloads.costs.shape import fp8
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import (
    Attention,
    BlockSparseAttention,
    CompressedAttention,
    LatentAttention,
)
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, LightningAttention, Mamba2
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.model_layers import layers_of

_CHOICE_BYTES = 4
ALWAYS = "none"
LATENT_SUM = "experts' latent sum"
OUTPUT = "attention output"
"""Input of a product, if nothing gates it. It is no product's output, so a split backward holds no gradient of it."""


class Tensor(NamedTuple):
    """One saved tensor."""

    name: str
    bytes: int
    dropped_by: str = ""
    """Word of ``recompute`` with which it is not saved; empty: ``full`` alone; `ALWAYS`: none."""
    moved: int = 0
    """Bytes that the memory-bound operation that makes it reads and writes; 0: a product, or part of another one."""
    feeds: bool = False
    """Whether it is the input of a product, and so is held until the weight-gradient pass of a split backward."""
    gradient: bool = False
    """Whether a gradient as large exists while the part's backward runs; in a split backward it is held, too."""
    offloaded_by: str = ""
    """Word of ``activation_offload`` with which it waits on the host; empty: ``dropped_by``, if that is one."""


class Sizes(NamedTuple):
    """What of an experiment the tensors of a layer depend on."""

    e: Experiment
    tokens: int
    stream: int
    seq_len: int
    tp: int
    c: int
    hidden: int
    sent: bool
    """Whether Ulysses sends heads to context-parallel ranks."""

    @classmethod
    def of(cls, e: Experiment, c: int) -> Sizes:
        tokens, stream = rank_tokens(e)
        return cls(e, tokens, stream, e.seq_len, e.tp, c, e.model.hidden_size, e.cp > 1 and e.cp_kind == "ulysses")

    def split(self, columns: int) -> int:
        """Bytes of ``columns`` activations a token that tensor-parallel ranks divide."""
        return self.c * self.tokens * columns // self.tp

    def own(self, columns: int) -> int:
        """Bytes of ``columns`` activations of each of the rank's own tokens."""
        return self.c * self.stream * columns

    def statistics(self, *, heads: int = 0) -> int:
        """Bytes of a norm's statistics, of own tokens or of heads."""
        return STATISTICS_BYTES * (self.tokens * heads // self.tp if heads else self.stream)

    def norm(self, name: str, columns: int, *, norms: int = 1, cast: bool | None = None) -> tuple[Tensor, ...]:
        """Output and statistics of one or more norms of own tokens; their input is another tensor. ``cast``: whether
        the product that follows saves the output in fp8; None: if the rank has whole rows of it."""
        size = self.own(columns)
        cast = self.tp == 1 if cast is None else cast
        kept = fp8.cast_bytes(self.e, self.stream * columns) if cast and fp8.keeps_low(self.e) else size
        statistics = Tensor(f"{name}: statistics", norms * self.statistics())
        return Tensor(name, kept, "norm", 2 * size, feeds=True), statistics


def _softmax(s: Sizes, heads: int, keys: float) -> Tensor:
    each = s.c * round(keys) if s.e.attention == "math" else STATISTICS_BYTES
    return Tensor("softmax", s.tokens * heads // s.tp * each)


def _choice(s: Sizes, chosen: int) -> list[Tensor]:
    return [Tensor("choice of the indexer", _CHOICE_BYTES * s.tokens * chosen)]


def _sent_back(s: Sizes, outputs: int) -> list[Tensor]:
    return [Tensor("attention output, sent back", s.split(outputs))] if s.sent else []


def _before_parts(mixer: Attention, s: Sizes) -> int:
    """Tokens before a rank's two parts of every sequence that its queries see through a window; 0 without a window, or
    if Ulysses sends heads."""
    if s.e.cp == 1 or s.sent or not isinstance(mixer.span, Window):
        return 0
    return 2 * (mixer.span.size - 1) * s.e.micro_batch_size


def _attention(mixer: Attention, s: Sizes) -> list[Tensor]:
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    values, outputs = mixer.kv_heads * mixer.value_dim, mixer.heads * mixer.value_dim
    turned, normed = s.split(queries + keys), mixer.norm != "none"
    projected = s.split(queries + keys + (0 if mixer.shared_kv else values))
    rotated, normed_values = (0, 0) if s.sent else (turned, s.split(values))
    before, of_norms = _before_parts(mixer, s), projected
    if s.sent:
        projected = s.split(queries + keys + values)
    if before:  # a part of the sequence is copied with what it needs of the part before it
        rows = s.tokens + before
        projected, rotated, normed_values = s.c * rows * (queries + keys + values) // s.tp, 0, 0
    elif s.e.cp > 1 and not s.sent and mixer.value_scale != 1.0:
        projected = s.split(values)  # scaled values are a copy; the projection is free
    tensors = [Tensor("projected", projected, gradient=True, offloaded_by="qkv")]
    if before:
        tensors += [Tensor("output with the part before", s.c * rows * outputs // s.tp)]
    if normed and (s.sent or before):
        tensors += [Tensor("input of norms of heads", of_norms)]
    if mixer.norm == "all_heads":
        tensors += [Tensor("norm of heads: statistics", 2 * STATISTICS_BYTES * s.tokens)]
    elif normed:
        normed_heads = mixer.heads + (2 if mixer.value_norm else 1) * mixer.kv_heads
        tensors += [Tensor("norm of heads: statistics", s.statistics(heads=normed_heads))]
    if mixer.rope is not None or normed:
        passes = 4 if normed and mixer.rope is not None else 2
        tensors += [Tensor("rotated", rotated, "rope", passes * turned)]
    if mixer.value_norm:
        tensors += [Tensor("normed values", normed_values, "rope", 2 * s.split(values))]
    tensors += [_softmax(s, mixer.heads, min(s.seq_len, 2 * mixer.span.keys(s.seq_len))), *_sent_back(s, outputs)]
    feeds = mixer.gate == "none"
    output = Tensor(OUTPUT, s.split(outputs), feeds=feeds, gradient=True, offloaded_by="attention")
    if mixer.gate == "none":
        return [*tensors, output]
    gates = s.split(outputs if mixer.gate == "element" else mixer.heads)
    gated = Tensor("gated output", s.split(outputs), "swiglu", 2 * s.split(outputs) + gates, feeds=True)
    return [*tensors, output, Tensor("gate", gates, gradient=True), gated]


def _latent(mixer: LatentAttention, s: Sizes) -> list[Tensor]:
    query, outputs = mixer.nope_dim + mixer.rope_dim, mixer.heads * mixer.value_dim
    keys = s.split(mixer.heads * query)
    tensors = [Tensor("latents", s.own(mixer.q_rank + mixer.kv_rank + mixer.rope_dim), gradient=True)]
    tensors += s.norm("norms of latents", mixer.q_rank + mixer.kv_rank, norms=2 if mixer.q_rank else 1)
    up = "" if s.sent else "mla_up"  # received tensors are not recomputed
    # With rope recomputed the shared key is saved rotated, or as it was gathered; as it is projected it is one of the
    # latents. Ulysses receives keys and values of every head.
    shared = s.c * s.tokens * mixer.rope_dim if mixer.rope is not None or s.tp > 1 else 0
    received = s.split(mixer.heads * mixer.rope_dim)
    tensors += [
        Tensor("keys and values", s.split(mixer.heads * (mixer.nope_dim + mixer.value_dim)), up, gradient=True),
        Tensor("queries", keys, up if mixer.q_rank else "", gradient=True),
        Tensor("whole keys", 0 if s.sent else keys - shared, "rope", 2 * keys),
        Tensor("rotated key", received if s.sent else shared, moved=2 * keys),
        _softmax(s, mixer.heads, s.seq_len if mixer.indexer is None else mixer.indexer.chosen),
        *_sent_back(s, outputs),
        Tensor(OUTPUT, s.split(outputs), feeds=not mixer.output_gate, gradient=True),
    ]
    if mixer.output_gate:
        size = s.split(outputs)
        tensors += [Tensor("gate", size, gradient=True), Tensor("gated output", size, "swiglu", 3 * size, feeds=True)]
    return tensors + (_choice(s, mixer.indexer.chosen) if mixer.indexer is not None else [])


def _block_sparse(mixer: BlockSparseAttention, s: Sizes) -> list[Tensor]:
    blocks = mixer.indexer.heads * mixer.indexer.chosen // mixer.block
    return [*_attention(mixer.attention, s), *_choice(s, blocks)]


def _compressed(mixer: CompressedAttention, s: Sizes) -> list[Tensor]:
    width, size = mixer.heads * mixer.head_dim, mixer.head_dim
    tensors = [
        Tensor("latent and key", s.own(mixer.q_rank + size), gradient=True),
        *s.norm("norm of queries' latent", mixer.q_rank),
        *s.norm("norm of keys", size),
        Tensor("queries", s.split(width), gradient=True),
        Tensor("rotated", s.split(width) + s.c * s.tokens * size, "rope", 2 * s.split(width)),
        _softmax(s, mixer.heads, mixer.window),
        Tensor(OUTPUT, s.split(width), feeds=True, gradient=True),
        Tensor("grouped output", s.split(mixer.output_groups * mixer.output_rank), feeds=True),
    ]
    if mixer.ratio:
        entries = [size if mixer.indexer is None else 2 * size]
        entries += [2 * mixer.indexer.head_dim] if mixer.indexer is not None else []
        tensors += [
            Tensor("compressor's values and gates", s.own(2 * sum(entries)), gradient=True),
            Tensor("entries", s.c * s.tokens * mixer.entry_numbers, moved=s.own(2 * sum(entries))),
        ]
    return tensors + (_choice(s, mixer.indexer.chosen) if mixer.indexer is not None else [])


def _gated_delta(mixer: GatedDeltaRule, s: Sizes) -> list[Tensor]:
    values = mixer.value_heads * mixer.value_dim
    convolved = 2 * mixer.key_heads * mixer.key_dim + values
    projected = s.split(convolved + values + 2 * mixer.value_heads)
    return [
        Tensor("projected", projected, moved=4 * s.split(convolved), gradient=True),
        _recurrence(s, values),
    ]


def _kimi_delta(mixer: KimiDelta, s: Sizes) -> list[Tensor]:
    width = mixer.heads * mixer.head_dim
    full = width if mixer.full_rank_gate else 0
    ups = 1 if mixer.full_rank_gate else 2
    return [
        Tensor("projected", s.split(3 * width + mixer.heads + full), moved=12 * s.split(width), gradient=True),
        Tensor("latents of decay and gate", s.own(ups * mixer.head_dim), feeds=True),
        Tensor("decay and gate", s.split(ups * width), moved=3 * s.split(width), gradient=True),
        _recurrence(s, width),
    ]


def _recurrence(s: Sizes, columns: int) -> Tensor:
    """The gated norm, which the output projection saves; what the recurrence has before it is computed again."""
    size = s.split(columns)
    kept = fp8.cast_bytes(s.e, size // s.c) if fp8.keeps_low(s.e) else size
    return Tensor("gated norm", kept, moved=3 * size, feeds=True)


def _mamba(mixer: Mamba2, s: Sizes) -> list[Tensor]:
    width, channels = mixer.heads * mixer.head_dim, 2 * mixer.groups * mixer.state
    return [
        Tensor(
            "projected", s.split(2 * width + channels + mixer.heads), moved=2 * s.split(width + channels), gradient=True
        ),
        _recurrence(s, width),
    ]


def _lightning(mixer: LightningAttention, s: Sizes) -> list[Tensor]:
    width = s.split(mixer.heads * mixer.head_dim)
    return [
        Tensor("projected", 3 * width, gradient=True),
        Tensor("activated", 3 * width, moved=6 * width),
        Tensor("output", width, gradient=True),
        Tensor("norm: statistics", STATISTICS_BYTES * s.tokens),
        Tensor("gate", width, gradient=True),
        Tensor("normed output", width, "norm", 2 * width),
        Tensor("gated output", width, "swiglu", 3 * width, feeds=True),
    ]


def _dense(mlp: DenseMLP, s: Sizes, name: str = "") -> list[Tensor]:
    size, inputs = s.split(mlp.width), 2 if mlp.gated else 1
    kept = fp8.cast_bytes(s.e, size // s.c) if fp8.keeps_low(s.e) else size
    return [
        Tensor(
            f"{name}gate and up" if mlp.gated else f"{name}up", inputs * size, gradient=True, offloaded_by="gate_up"
        ),
        Tensor(f"{name}product", kept, "swiglu", (inputs + 1) * size, feeds=True),
    ]


MIXERS: Mapping[type[Any], Callable[[Any, Sizes], list[Tensor]]] = {
    Attention: _attention,
    LatentAttention: _latent,
    BlockSparseAttention: _block_sparse,
    CompressedAttention: _compressed,
    GatedDeltaRule: _gated_delta,
    KimiDelta: _kimi_delta,
    Mamba2: _mamba,
    LightningAttention: _lightning,
}
"""The tensors of each kind of mixer."""


class KindTensors(NamedTuple):
    """Saved tensors of one layer, by part."""

    entry: tuple[Tensor, ...]
    """Inputs of the parts; the first is the layer's, which full recomputation saves."""
    mixer: tuple[Tensor, ...]
    mlp: tuple[Tensor, ...]
    """With routed experts also the tensors around them, without those of `expert_tensors`."""

    def all(self) -> tuple[Tensor, ...]:
        return self.entry + self.mixer + self.mlp


def kind_tensors(kind: Layer, s: Sizes, streams: int = 1) -> KindTensors:
    """The tensors that a layer of a kind saves, without those of routed experts. ``streams``: of hyper-connections."""
    parts = [(name, part) for name, part in (("mixer", kind.mixer), ("MLP", kind.mlp)) if part is not None]
    entry = _ahead(s) if kind.ahead else []
    if kind.outputs_normed:
        parts, entry = [], [*entry, *_inputs_without_norms(s)]
    for at, (name, part) in enumerate(parts):
        entry += [Tensor("input" if at == 0 else "residual", streams * s.own(s.hidden), offloaded_by="input")]
        if streams > 1:
            entry += [Tensor(f"{name}: mixed streams", s.own(s.hidden), moved=(2 * streams + 1) * s.own(s.hidden))]
        cast = None if name == "MLP" and kind.normed_beside else _is_cast(part, s)
        entry += s.norm(f"{name}: norm", s.hidden, cast=cast)
    if kind.normed_beside:  # what experts get is sent, and not saved
        entry += [Tensor("experts: norm", 0, moved=2 * s.own(s.hidden))]
        entry += [Tensor("experts: norm: statistics", s.statistics()), *s.norm("router: norm", s.hidden, cast=False)]
    for extra in range(kind.norms - len(parts) - (1 if kind.normed_beside else 0)):  # those of outputs save their input
        size = s.own(s.hidden)
        entry += [Tensor(f"input of norm {extra + 1} of outputs", size, moved=2 * size)]
        entry += [Tensor(f"norm {extra + 1} of outputs: statistics", s.statistics())]
    mixer = MIXERS[type(kind.mixer)](kind.mixer, s) if kind.mixer is not None else []
    mlp: list[Tensor] = []
    if isinstance(kind.mlp, DenseMLP):
        mlp = _dense(kind.mlp, s)
    elif isinstance(kind.mlp, RoutedMLP):
        mlp = _beside_experts(kind.mlp, s)
    return KindTensors(tuple(entry), tuple(mixer), tuple(mlp))


def _inputs_without_norms(s: Sizes) -> list[Tensor]:
    """Inputs of both parts where norms are of outputs: products save them, in fp8 if the rank has whole rows."""
    cast = s.tp == 1 and fp8.keeps_low(s.e)
    size = fp8.cast_bytes(s.e, s.stream * s.hidden) if cast else s.own(s.hidden)
    return [Tensor(name, size, feeds=True, offloaded_by="input") for name in ("input", "residual")]


def _ahead(s: Sizes) -> list[Tensor]:
    """Tensors of a module of multi-token prediction before and after its layer. Its output is the next module's input,
    or counted with the head (`workloads.costs.memory.activations.head_bytes`)."""
    size = s.own(s.hidden)
    cast = fp8.keeps_low(s.e) and s.e.precision != "fp8_blockwise"
    both = fp8.cast_bytes(s.e, 2 * s.stream * s.hidden) if cast else 2 * size
    return [
        Tensor("hidden state", size, gradient=True),
        Tensor("later tokens' embedding", size, ALWAYS),
        Tensor("both inputs, normed", both, moved=8 * size, feeds=True),
        Tensor("norms of a module: statistics", 3 * s.statistics(), moved=2 * size),
    ]


def _is_cast(part: object, s: Sizes) -> bool | None:
    """Whether products save their input, a normed stream, in fp8 (as in `Sizes.norm`). Routers save it in 16 bits, and
    so do down-projections of latents, unless all of them are products of own tokens alone (KDA has others)."""
    if isinstance(part, LatentAttention):
        return part.q_rank > 0 and s.e.precision != "fp8_blockwise"
    return False if isinstance(part, RoutedMLP | KimiDelta) else None


def _beside_experts(mlp: RoutedMLP, s: Sizes) -> list[Tensor]:
    tensors = _dense(mlp.shared, s, "shared ") if mlp.shared is not None else []
    if mlp.shared_gate:
        tensors += [Tensor("shared output", s.own(s.hidden))]
    if mlp.latent:
        low = fp8.keeps_low(s.e) and s.e.precision != "fp8_blockwise"
        kept = fp8.cast_bytes(s.e, s.stream * mlp.latent) if low else s.own(mlp.latent)
        tensors += [Tensor(LATENT_SUM, kept, feeds=True)]
    if mlp.latent_norm:
        tensors += s.norm("norm of the latent", mlp.latent)
    return tensors


def routed_tensors(e: Experiment, c: int) -> ExpertTensors:
    """Tensors of the routed experts of one layer of a model that has some."""
    mlps = [kind.mlp for kind in layers_of(e.model).kinds if isinstance(kind.mlp, RoutedMLP)]
    return expert_tensors(e, mlps[0], c)
