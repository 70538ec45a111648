"""Softmax attention over keys and values of heads: full, sliding, chunked, latent, and sparse with an indexer."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from workloads.spec.layer_kinds.exchange import ContextParallel, TensorParallel
from workloads.spec.layer_kinds.spans import Chunk, Full, Span, Window
from workloads.spec.layer_kinds.weight import Mixing, Splits, Weight, vector, whole

FULL = Full()

HeadNorm = Literal["none", "head", "all_heads", "without_weight"]
"""Norm of queries and keys: none, one of a head's size for all heads, one over all heads together (MiniMax-M2), or one
without a weight (Llama 4)."""
Gate = Literal["none", "element", "head"]
"""Gate of the output: none, one number for each element (Qwen3.5) or for each head (Step)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. Its scaling has no effect on cost; it is kept as the file has it."""

    theta: float
    rotated: float = 1.0
    """Share of a head's columns that is rotated."""
    scaling: str = ""
    proportional: bool = False
    """Where a share is rotated: the pairs of columns, and their frequencies, are the first ones of a head that is
    rotated as a whole (Gemma 4). False: the first columns of a head are rotated as if they were all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245) with the options of published models."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    span: Span = FULL
    rope: Rope | None = None
    """None: no positions."""
    bias: bool = False
    """Biases of the projections of queries, keys and values."""
    output_bias: bool = False
    norm: HeadNorm = "none"
    gate: Gate = "none"
    sinks: bool = False
    """One learned score for each head in the softmax."""
    shared_kv: bool = False
    """Values are made of the projection of keys, before its norm and rotation: they have none of their own (Gemma 4's
    full layers)."""
    soft_cap: bool = False
    """Scores are capped by a tanh (Gemma 2)."""
    value_scale: float = 1.0
    value_norm: bool = False
    """Values of every head are normed, without a weight (Gemma 4)."""
    score_scale: float = 0.0
    """What products of queries and keys are multiplied by; 0: one over the root of a head's size."""

    @property
    def label(self) -> str:
        return self.span.label

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        values, outputs = self.kv_heads * self.value_dim, self.heads * self.value_dim
        parts = [Weight("q", hidden, queries), Weight("k", hidden, keys)]
        parts += [] if self.shared_kv else [Weight("v", hidden, values)]
        parts += [Weight("o", outputs, hidden)]
        if self.bias:
            parts += [vector("qkv bias", queries + keys + (0 if self.shared_kv else values), held="split")]
        if self.output_bias:
            parts += [vector("o bias", hidden)]
        if self.norm == "head":
            parts += [vector("qk norm", self.head_dim, 2, 2)]
        if self.norm == "all_heads":
            parts += [vector("qk norm", queries + keys, held="split")]
        if self.gate != "none":
            parts += [Weight("gate", hidden, outputs if self.gate == "element" else self.heads)]
        if self.sinks:
            parts += [vector("sinks", self.heads, held="split")]
        return tuple(parts)

    @property
    def sees_all(self) -> bool:
        return isinstance(self.span, Full)

    @property
    def splits(self) -> Splits:
        return Splits(heads=self.heads, kv_heads=self.kv_heads)

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        return TensorParallel((hidden,), normed=2 if self.norm == "all_heads" else 0)

    @property
    def context_parallel(self) -> ContextParallel:
        return ContextParallel(
            split=self.kv_heads * (self.head_dim + self.value_dim),
            queries=self.heads * self.head_dim,
            outputs=self.heads * self.value_dim,
            reach=self._reach,
        )

    @property
    def _reach(self) -> int | None:
        """Earlier tokens that a query sees at most."""
        if isinstance(self.span, Window):
            return self.span.size - 1
        return self.span.size if isinstance(self.span, Chunk) else None

    def mixing(self, seq_len: float) -> Mixing:
        return Mixing(2 * self.heads * (self.head_dim + self.value_dim) * self.span.keys(seq_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """A small attention without values that chooses the keys that a query sees (DeepSeek-V3.2). Its scores take no
    gradient in a plain step."""

    heads: int
    head_dim: int
    chosen: int
    """Keys that a query sees."""

    @property
    def shared(self) -> int:
        """16-bit numbers a token that say which keys it sees: 32 bits for each."""
        return 2 * self.chosen

    def scores(self, keys: float) -> float:
        return 2 * self.heads * self.head_dim * keys


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434), not absorbed; sparse if it has an indexer."""

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0
    """0: queries are projected without a latent."""
    rope: Rope | None = None
    bias: bool = False
    output_gate: bool = False
    """Each element of the output is gated from the input (Kimi K3)."""
    indexer: Indexer | None = None
    owns_indexer: bool = True
    """False: it uses the choice of a layer before it (GLM-5.2)."""

    @property
    def label(self) -> str:
        if self.indexer is None:
            return "latent" if self.rope is not None else "latent without positions"
        return f"latent with top {self.indexer.chosen} " + (
            "by an indexer" if self.owns_indexer else "of a layer before"
        )

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        q_dim, outputs = self.nope_dim + self.rope_dim, self.heads * self.value_dim
        parts = [Weight("q", self.q_rank or hidden, self.heads * q_dim)]
        if self.q_rank:
            parts += [whole("q latent", hidden, self.q_rank), vector("q norm", self.q_rank)]
        parts += [
            whole("kv latent", hidden, self.kv_rank + self.rope_dim),
            vector("kv norm", self.kv_rank),
            Weight("kv", self.kv_rank, self.heads * (self.nope_dim + self.value_dim)),
            Weight("o", outputs, hidden),
        ]
        if self.bias:
            parts += [vector("biases", self.q_rank + self.kv_rank + self.rope_dim + hidden)]
        if self.output_gate:
            parts += [Weight("gate", hidden, outputs)]
        if self.indexer is not None and self.owns_indexer:
            size = self.indexer.head_dim
            parts += [
                whole("indexer q", self.q_rank or hidden, self.indexer.heads * size),
                whole("indexer k", hidden, size),
                vector("indexer norm", 2 * size),
                whole("indexer heads", hidden, self.indexer.heads),
            ]
        return tuple(parts)

    @property
    def sees_all(self) -> bool:
        return self.indexer is None

    @property
    def splits(self) -> Splits:
        return Splits(heads=self.heads)

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        gate = (hidden,) if self.output_gate and self.q_rank else ()
        chosen = self.indexer.shared if self.indexer is not None else 0
        return TensorParallel((self.q_rank or hidden, self.kv_rank, *gate), self.rope_dim + chosen)

    @property
    def context_parallel(self) -> ContextParallel:
        query = self.nope_dim + self.rope_dim
        return ContextParallel(
            split=self.heads * (query + self.value_dim),
            whole=self.indexer.head_dim if self.indexer is not None and self.owns_indexer else 0,
            queries=self.heads * query,
            outputs=self.heads * self.value_dim,
        )

    def mixing(self, seq_len: float) -> Mixing:
        pair = 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)
        if self.indexer is None:
            return Mixing(pair * Full().keys(seq_len))
        scores = self.indexer.scores(Full().keys(seq_len)) if self.owns_indexer else 0.0
        return Mixing(pair * Window(self.indexer.chosen).keys(seq_len), scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttention:
    """Grouped-query attention to blocks of keys that an indexer of few heads chooses (MiniMax-M3)."""

    attention: Attention
    indexer: Indexer
    block: int
    """Keys of a block: ``indexer.chosen`` counts keys, not blocks."""

    @property
    def label(self) -> str:
        return f"block-sparse with top {self.indexer.chosen // self.block} blocks of {self.block}"

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        size = self.indexer.head_dim
        return (
            *self.attention.weights(hidden),
            whole("indexer q", hidden, self.indexer.heads * size),
            whole("indexer k", hidden, size),
            vector("indexer norms", 2 * size),
        )

    @property
    def splits(self) -> Splits:
        return self.attention.splits

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        return TensorParallel((hidden,), self.indexer.shared // self.block)

    @property
    def context_parallel(self) -> ContextParallel:
        return self.attention.context_parallel._replace(whole=self.indexer.head_dim)

    def mixing(self, seq_len: float) -> Mixing:
        pair = 2 * self.attention.heads * (self.attention.head_dim + self.attention.value_dim)
        seen = Window(self.indexer.chosen).keys(seq_len)
        return Mixing(pair * seen, self.indexer.scores(Full().keys(seq_len)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """DeepSeek-V4's attention: a window, and entries of which each stands for ``ratio`` tokens. Keys are values, of one
    head. With an indexer (CSA) a query sees its choice of the entries, without (HCA) all of them."""

    heads: int
    head_dim: int
    q_rank: int
    output_groups: int
    output_rank: int
    window: int
    ratio: int
    """0: the window alone."""
    rope_dim: int
    indexer: Indexer | None = None

    @property
    def label(self) -> str:
        if not self.ratio:
            return f"sliding {self.window} with shared keys and values"
        chosen = f" with top {self.indexer.chosen} by an indexer" if self.indexer is not None else ""
        return f"compressed {self.ratio}{chosen}"

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        size, width = self.head_dim, self.heads * self.head_dim
        parts = [
            whole("q latent", hidden, self.q_rank),
            vector("q norm", self.q_rank),
            Weight("q", self.q_rank, width),
            whole("kv", hidden, size),
            vector("kv norm", size),
            Weight("o latent", width // self.output_groups, self.output_groups * self.output_rank),
            Weight("o", self.output_groups * self.output_rank, hidden),
            vector("sinks", self.heads, held="split"),
        ]
        if self.ratio:
            parts += self._compressor("compressor", hidden, size)
        if self.indexer is not None:
            parts += [
                *self._compressor("indexer compressor", hidden, self.indexer.head_dim),
                whole("indexer q", self.q_rank, self.indexer.heads * self.indexer.head_dim),
                whole("indexer heads", hidden, self.indexer.heads),
            ]
        return tuple(parts)

    def _compressor(self, name: str, hidden: int, size: int) -> list[Weight]:
        """Weights of what makes entries from ``ratio`` tokens; entries that an indexer chooses from overlap, and so
        are made twice."""
        width = size if self.indexer is None else 2 * size
        return [
            whole(f"{name} kv", hidden, width),
            whole(f"{name} gate", hidden, width),
            vector(f"{name} positions", self.ratio * width),
            vector(f"{name} norm", size),
        ]

    @property
    def splits(self) -> Splits:
        return Splits(heads=gcd(self.heads, self.output_groups))

    @property
    def entry_numbers(self) -> int:
        """Numbers a token of the entries, and of the indexer's, of which each stands for ``ratio`` tokens."""
        indexer = self.indexer.head_dim if self.indexer is not None else 0
        return -(-(self.head_dim + indexer) // self.ratio) if self.ratio else 0

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        chosen = self.indexer.shared if self.indexer is not None else 0
        return TensorParallel((self.q_rank,), self.head_dim + self.entry_numbers + chosen)

    @property
    def context_parallel(self) -> ContextParallel:
        width = self.heads * self.head_dim
        if self.ratio:
            return ContextParallel(whole=self.entry_numbers, queries=width, outputs=width)
        return ContextParallel(whole=self.head_dim, queries=width, outputs=width, reach=self.window)

    def mixing(self, seq_len: float) -> Mixing:
        seen, scores = Window(self.window).keys(seq_len), 0.0
        if self.ratio and self.indexer is None:
            seen += seq_len / (2 * self.ratio)
        elif self.indexer is not None:
            seen += Window(self.indexer.chosen).keys(seq_len / self.ratio)
            scores = self.indexer.scores(seq_len / (2 * self.ratio))
        return Mixing(4 * self.heads * self.head_dim * seen, scores)
