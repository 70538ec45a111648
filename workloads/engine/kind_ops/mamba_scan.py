"""Mamba-2 from its projection to the input of its output projection, in chunks (SSD; Dao and Gu 2024, arXiv:2405.21060,
section 6): convolution, state space, skip, gate and norm.

Shapes: B sequences, L tokens, H heads of P channels in G groups of R = H / G heads, N numbers of the state of a
channel, c tokens of a chunk, m chunks. For a token t of one head, with the state h [P, N]:

    d = softplus(step_t + bias)         h_t = exp(-exp(a) d) h_{t-1} + d x_t B_t^T        y_t = h_t C_t + D x_t

B and C are those of the head's group. Gate and norm follow Nemotron-H: ``y * silu(z)`` is normed over the channels of a
group. With l the sum of log decays from the chunk's start, a chunk is three products: of its own tokens,
``(C B^T * exp(l_t - l_s)) (d x)``; of the state before it, ``exp(l_t) C h``; and the state that it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.kind_ops.segments import convolved, from_chunks, in_chunks

CHUNK = 64
"""Tokens of a chunk: the triangle of a chunk and the two products with its state are then of similar cost."""


@dataclass(frozen=True, slots=True)
class MambaStep:
    """The operation of one tensor-parallel rank, whose heads and groups these are. Its one sequence is the projection:
    gates z [H P], x [H P], B [G N], C [G N], steps [H]. Its parameters: the convolution [H P + 2 G N, K], its bias
    (with ``bias``), a, the bias of steps and D [3 H], the norm's weight [H P]."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    eps: float
    bias: bool
    chunk: int = CHUNK

    @property
    def outputs(self) -> int:
        return self.heads * self.head_dim

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        channels = self.outputs + 2 * self.groups * self.state
        tail = like.new_zeros(like.shape[0], self.kernel - 1, channels)
        return tail, like.new_zeros(like.shape[0], self.groups, self.heads // self.groups, self.head_dim, self.state)

    def __call__(
        self, sequences: Sequence[Tensor], parameters: Sequence[Tensor], state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, *rest = parameters
        bias = rest.pop(0) if self.bias else None
        vectors, norm = rest
        decay_H, step_bias_H, skip_H = vectors.chunk(3)
        width, of_groups, tail = self.outputs, self.groups * self.state, state[0]
        z, mixed, steps = sequences[0].split([width, width + 2 * of_groups, self.heads], 2)
        mixed, tail = convolved(mixed, tail, weight, bias)
        x, b, c = mixed.split([width, of_groups, of_groups], 2)
        steps_BLH = F.softplus(steps + step_bias_H)
        x_BLHP = x.unflatten(2, (self.heads, self.head_dim))
        b_BLGN, c_BLGN = (one.unflatten(2, (self.groups, self.state)) for one in (b, c))
        y, after = self._scan(x_BLHP * steps_BLH.unsqueeze(3), b_BLGN, c_BLGN, -decay_H.exp() * steps_BLH, state[1])
        y = (y + x_BLHP * skip_H.unsqueeze(1)).flatten(2)
        return self._normed(y * F.silu(z)) * norm, (tail, after)

    def _normed(self, y: Tensor) -> Tensor:
        """Every group's channels of [B, L, H P] normed by themselves."""
        groups = y.unflatten(2, (self.groups, -1))
        return (groups * torch.rsqrt(groups.square().mean(3, keepdim=True) + self.eps)).flatten(2)

    def _scan(self, x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(y [B, L, H, P] without the skip, state after) of ``x`` [B, L, H, P], which is multiplied by its steps."""
        size, length = min(self.chunk, x.shape[1]), x.shape[1]
        x_BmGRcP = self._by_groups(in_chunks(x, size))
        b_BmGcN, c_BmGcN = in_chunks(b, size), in_chunks(c, size)
        sums = self._by_groups(in_chunks(log_decay, size)).cumsum(4)  # [B, m, G, R, c]
        pairs = sums.unsqueeze(5) - sums.unsqueeze(4)
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        decays = pairs.masked_fill(later, -torch.inf).exp()
        scores = (c_BmGcN @ b_BmGcN.transpose(3, 4)).unsqueeze(3) * decays
        y = scores @ x_BmGRcP
        to_end = (sums[..., -1:] - sums).exp().unsqueeze(5)
        added = (x_BmGRcP * to_end).transpose(4, 5) @ b_BmGcN.unsqueeze(3)  # [B, m, G, R, P, N]
        of_chunks = sums[..., -1, None, None].exp()
        before = []
        for at in range(added.shape[1]):
            before.append(state)
            state = state * of_chunks[:, at] + added[:, at]
        from_state = c_BmGcN.unsqueeze(3) @ torch.stack(before, 1).transpose(4, 5)
        y = y + from_state * sums.exp().unsqueeze(5)
        return from_chunks(y.flatten(2, 3), length), state

    def _by_groups(self, x: Tensor) -> Tensor:
        """[B, m, H, ...] as [B, m, G, R, ...]."""
        return x.unflatten(2, (self.groups, -1))
