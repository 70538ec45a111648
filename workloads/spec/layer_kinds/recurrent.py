"""Mixers with a state of fixed size instead of keys and values: gated delta rule, KDA, Mamba-2. FLOPs are those of the
recurrent form, so they are what is needed and not what a kernel of chunks computes."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from workloads.spec.layer_kinds.exchange import ContextParallel, TensorParallel
from workloads.spec.layer_kinds.weight import Mixing, Splits, Weight, convolution, vector, whole

DELTA_CHUNK, MAMBA_CHUNK = 64, 256
"""Tokens of a chunk in the kernels of flash-linear-attention and of Mamba-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaRule:
    """Gated DeltaNet (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def label(self) -> str:
        return "gated delta rule"

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return (
            Weight("qkv", hidden, 2 * keys + values),
            Weight("gate", hidden, values),
            Weight("decay and rate", hidden, 2 * self.value_heads),
            convolution("convolution", 2 * keys + values, self.kernel),
            vector("decay", 2 * self.value_heads, held="split"),
            vector("norm of heads", self.value_dim),
            Weight("o", values, hidden),
        )

    @property
    def splits(self) -> Splits:
        return Splits(recurrent_heads=gcd(self.key_heads, self.value_heads))

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        return TensorParallel((hidden,))

    @property
    def context_parallel(self) -> ContextParallel:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return ContextParallel(inputs=2 * (keys + values + self.value_heads), outputs=values)

    def kernel_flops(self) -> float:
        """Forward FLOPs of a token in a kernel that works in chunks, which are more than those of `mixing`."""
        return self.mixing(1).trained + self.value_heads * DELTA_CHUNK * (6 * self.key_dim + 4 * self.value_dim)

    def mixing(self, seq_len: float) -> Mixing:
        return Mixing(6 * self.value_heads * self.key_dim * self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv:2510.26692): a delta rule with a decay for each channel."""

    heads: int
    head_dim: int
    kernel: int
    full_rank_gate: bool = False

    @property
    def label(self) -> str:
        return "KDA"

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        width, size = self.heads * self.head_dim, self.head_dim
        gate = (
            [Weight("gate", hidden, width)]
            if self.full_rank_gate
            else [whole("gate down", hidden, size), Weight("gate up", size, width)]
        )
        return (
            Weight("qkv", hidden, 3 * width),
            convolution("convolution", 3 * width, self.kernel),
            whole("decay down", hidden, size),
            Weight("decay up", size, width),
            *gate,
            Weight("rate", hidden, self.heads),
            vector("decay", width + self.heads, held="split"),
            vector("norm of heads", size),
            Weight("o", width, hidden),
        )

    @property
    def splits(self) -> Splits:
        return Splits(recurrent_heads=self.heads)

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        return TensorParallel((hidden, self.head_dim, *(() if self.full_rank_gate else (self.head_dim,))))

    @property
    def context_parallel(self) -> ContextParallel:
        """The inputs are queries, keys, values, decays and gates of every channel, and rates."""
        width = self.heads * self.head_dim
        return ContextParallel(inputs=5 * width + self.heads, outputs=width)

    def kernel_flops(self) -> float:
        """Forward FLOPs of a token in a kernel that works in chunks, which are more than those of `mixing`."""
        return self.mixing(1).trained + self.heads * DELTA_CHUNK * 10 * self.head_dim

    def mixing(self, seq_len: float) -> Mixing:
        return Mixing(6 * self.heads * self.head_dim**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 (arXiv:2405.21060), as Nemotron-H has it."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    bias: bool = False
    convolution_bias: bool = True

    @property
    def label(self) -> str:
        return "Mamba-2"

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        width = self.heads * self.head_dim
        channels, inner = width + 2 * self.groups * self.state, 2 * width + 2 * self.groups * self.state + self.heads
        return (
            Weight("in", hidden, inner),
            convolution("convolution", channels, self.kernel),
            *([vector("convolution bias", channels, held="split")] if self.convolution_bias else []),
            *([vector("in bias", inner, held="split"), vector("out bias", hidden)] if self.bias else []),
            vector("decay, step and skip", 3 * self.heads, held="split"),
            vector("norm", width, held="split"),
            Weight("out", width, hidden),
        )

    @property
    def splits(self) -> Splits:
        return Splits(recurrent_heads=gcd(self.heads, self.groups))

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        return TensorParallel((hidden,))

    @property
    def context_parallel(self) -> ContextParallel:
        width = self.heads * self.head_dim
        return ContextParallel(inputs=2 * (width + self.groups * self.state) + self.heads, outputs=width)

    def kernel_flops(self) -> float:
        """Forward FLOPs of a token in a kernel that works in chunks, which are more than those of `mixing`."""
        return self.mixing(1).trained + MAMBA_CHUNK * (self.groups * self.state + self.heads * self.head_dim)

    def mixing(self, seq_len: float) -> Mixing:
        return Mixing(4 * self.heads * self.head_dim * self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningAttention:
    """Linear attention with a decay for each head that is not learned (arXiv:2501.08313, section 2.2), as MiniMax-01
    has it."""

    heads: int
    head_dim: int
    block: int = 256
    """Tokens that a kernel treats as full attention; their scores are masked."""

    @property
    def label(self) -> str:
        return "lightning attention"

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        width = self.heads * self.head_dim
        return (
            Weight("qkv", hidden, 3 * width),
            Weight("gate", hidden, width),
            vector("norm", width, held="split"),
            Weight("o", width, hidden),
        )

    @property
    def splits(self) -> Splits:
        return Splits(recurrent_heads=self.heads)

    def tensor_parallel(self, hidden: int) -> TensorParallel:
        return TensorParallel((hidden,))

    @property
    def context_parallel(self) -> ContextParallel:
        return ContextParallel(state=self.heads * self.head_dim**2)

    def kernel_flops(self) -> float:
        """As that of the gated delta rule; half of a block's scores are needed."""
        return self.mixing(1).trained + 2 * self.heads * self.head_dim * self.block

    def mixing(self, seq_len: float) -> Mixing:
        return Mixing(4 * self.heads * self.head_dim**2)


Recurrent = GatedDeltaRule | KimiDelta | Mamba2 | LightningAttention
