"""Gated DeltaNet and KDA from their projections to the input of their output projection: convolution, unit keys and
queries, the gated delta rule in chunks, norm and gate.

Shapes as in `workloads.engine.kind_ops.delta_rule`; W = H V columns of the output. The norm is of each head's values,
with one weight for all heads, and comes before the gate, other than in Mamba-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.kind_ops.delta_rule import CHUNK, delta_rule, unit
from workloads.engine.kind_ops.segments import convolved


@dataclass(frozen=True, slots=True)
class GatedDeltaStep:
    """Gated DeltaNet of one tensor-parallel rank, whose heads these are; J of them have keys and queries, each for
    H / J heads of values in a row. Its one sequence is the projection: queries and keys [J K] each, values, gates [W],
    decays, rates [H]. Its parameters: the convolution [2 J K + W, kernel], a and the bias of decays [2 H], the norm's
    weight [V]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    chunk: int = CHUNK

    @property
    def outputs(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        tail = like.new_zeros(like.shape[0], self.kernel - 1, 2 * self.keys + self.outputs)
        return tail, like.new_zeros(like.shape[0], self.value_heads, self.key_dim, self.value_dim)

    def __call__(
        self, sequences: Sequence[Tensor], parameters: Sequence[Tensor], state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, vectors, norm = parameters
        log_rate_H, bias_H = vectors.chunk(2)
        mixed, gate, decay, rate = sequences[0].split(
            [2 * self.keys + self.outputs, self.outputs, self.value_heads, self.value_heads], 2
        )
        mixed, tail = convolved(mixed, state[0], weight, None)
        q, k, v = mixed.split([self.keys, self.keys, self.outputs], 2)
        shared = self.value_heads // self.key_heads
        q, k = (unit(x.unflatten(2, (-1, self.key_dim))).repeat_interleave(shared, 2) for x in (q, k))
        v = v.unflatten(2, (-1, self.value_dim))
        log_decay = -log_rate_H.exp() * F.softplus(decay + bias_H)
        o, after = delta_rule(q * self.key_dim**-0.5, k, v, log_decay, rate.sigmoid(), state[1])
        return normed(o, norm, self.eps).flatten(2) * F.silu(gate), (tail, after)


def normed(o_BLHV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Every head's values normed by themselves."""
    return o_BLHV * torch.rsqrt(o_BLHV.square().mean(3, keepdim=True) + eps) * weight_V


@dataclass(frozen=True, slots=True)
class KimiDeltaStep:
    """KDA of one tensor-parallel rank, whose heads these are, with K = V: every channel of a key decays by itself. Its
    sequences: queries, keys and values [3 W], rates [H], decays [W], gates [W]. Its parameters: the convolution [3 W,
    kernel], the bias of decays with a behind it [W + H], the norm's weight [K]."""

    heads: int
    head_dim: int
    kernel: int
    eps: float
    chunk: int = CHUNK

    @property
    def outputs(self) -> int:
        return self.heads * self.head_dim

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        tail = like.new_zeros(like.shape[0], self.kernel - 1, 3 * self.outputs)
        return tail, like.new_zeros(like.shape[0], self.heads, self.head_dim, self.head_dim)

    def __call__(
        self, sequences: Sequence[Tensor], parameters: Sequence[Tensor], state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (mixed, rate, decay, gate), (weight, vectors, norm) = sequences, parameters
        bias_W, log_rate_H = vectors.split([self.outputs, self.heads])
        mixed, tail = convolved(mixed, state[0], weight, None)
        q, k, v = (x.unflatten(2, (self.heads, self.head_dim)) for x in mixed.chunk(3, 2))
        steps_BLHK = F.softplus(decay + bias_W).unflatten(2, (self.heads, self.head_dim))
        log_decay = -log_rate_H.exp().unsqueeze(1) * steps_BLHK
        o, after = delta_rule(unit(q) * self.head_dim**-0.5, unit(k), v, log_decay, rate.sigmoid(), state[1])
        return normed(o, norm, self.eps).flatten(2) * gate.sigmoid(), (tail, after)
