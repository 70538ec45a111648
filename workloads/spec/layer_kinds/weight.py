"""A weight of a layer, and what a layer computes beyond products with its weights.

Sums over these are the closed forms of parameters and FLOPs (`workloads.spec.layer_kinds.model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Use = Literal["matrix", "convolution", "vector"]
"""What a token does with a weight. ``matrix``: a product, two FLOPs a number; ``convolution``: the same, but short and
along the sequence; ``vector``: norms, biases, scales, whose FLOPs are not counted."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: ``copies`` (experts) of inputs x outputs numbers, of which a token uses ``used``."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1
    use: Use = "matrix"

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


def vector(name: str, size: int, copies: int = 1, used: int = 1) -> Weight:
    """A norm, bias or scale."""
    return Weight(name, 1, size, copies, used, "vector")


def convolution(name: str, channels: int, kernel: int) -> Weight:
    """A causal convolution along the sequence, of each channel by itself."""
    return Weight(name, kernel, channels, use="convolution")


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
