"""A weight of a layer, and what a layer computes beyond products with its weights.

Sums over these are the closed forms of parameters and FLOPs (`workloads.spec.layer_kinds.model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

Use = Literal["matrix", "convolution", "vector"]
"""What a token does with a weight. ``matrix``: a product, two FLOPs a number; ``convolution``: the same, but short and
along the sequence; ``vector``: norms, biases, scales, whose FLOPs are not counted."""
Held = Literal["split", "whole", "experts"]
"""How the ranks of a layout hold a weight: divided over tensor-parallel ranks, whole on each of them, or divided over
expert-parallel ranks and those that split an expert."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: ``copies`` (experts) of inputs x outputs numbers, of which a token uses ``used``."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1
    use: Use = "matrix"
    held: Held = "split"

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.copies

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.inputs * self.outputs * self.used

    @property
    def forward_flops(self) -> int:
        return 0 if self.use == "vector" else 2 * self.active


ROW_PARALLEL = ("o", "out", "down", "shared down")
"""Weights whose inputs tensor-parallel ranks divide; of other weights that are split they divide the outputs."""


def vector(name: str, size: int, copies: int = 1, used: int = 1, held: Held = "whole") -> Weight:
    """A norm, bias or scale."""
    return Weight(name, 1, size, copies, used, "vector", held)


def whole(name: str, inputs: int, outputs: int) -> Weight:
    """A matrix that every tensor-parallel rank holds: of latents, routers, indexers."""
    return Weight(name, inputs, outputs, held="whole")


def convolution(name: str, channels: int, kernel: int) -> Weight:
    """A causal convolution along the sequence, of each channel by itself."""
    return Weight(name, kernel, channels, use="convolution")


class Splits(NamedTuple):
    """Numbers that tensor parallelism must divide; 0: the part has none of this sort."""

    heads: int = 0
    kv_heads: int = 0
    recurrent_heads: int = 0
    columns: int = 0
    """Of a dense MLP."""
    shared_columns: int = 0
    """Of what every token visits beside the experts."""

    def both(self, other: Splits) -> Splits:
        """What both parts allow: greatest common divisors, of which 0 takes nothing."""
        return Splits(*(gcd(a, b) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Mixing:
    """FLOPs of one token, on average over a sequence, beyond products with weights."""

    trained: float
    """Forward FLOPs of what has a backward of twice as many."""
    untrained: float = 0.0
    """Forward FLOPs of what takes no gradient in a plain step: the scores of an indexer."""

    @property
    def forward(self) -> float:
        return self.trained + self.untrained

    @property
    def training(self) -> float:
        """Forward and backward, without recomputation."""
        return 3 * self.trained + self.untrained


NO_MIXING = Mixing(0.0)
