"""Feed-forward parts: gated, ungated, and routed to experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.spec.layer_kinds.weight import Held, Splits, Weight, vector, whole

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_of_chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """Two projections and an activation, or three if the activation of one gates another."""

    width: int
    activation: str
    """silu, gelu_tanh, clamped_silu, situ, relu2, xielu."""
    gated: bool = True
    bias: bool = False
    limit: float = 0.0
    """Of clamped_silu: bound of the gate from above, of the up projection on both sides. 0: the file does not say."""
    slope: float = 1.0
    """Of clamped_silu: a gate is multiplied by the sigmoid of itself times this number (gpt-oss: 1.702)."""
    offset: float = 0.0
    """Of clamped_silu: added to the clamped up projection (gpt-oss: 1)."""

    @property
    def label(self) -> str:
        return f"{'gated' if self.gated else 'ungated'} ({self.activation})"

    @property
    def splits(self) -> Splits:
        return Splits(columns=self.width)

    def weights(self, hidden: int, prefix: str = "", copies: int = 1, used: int = 1) -> tuple[Weight, ...]:
        """``copies`` and ``used``: experts, and those of one token."""
        up = self.width * (2 if self.gated else 1)
        held: Held = "experts" if copies > 1 else "split"
        parts = [
            Weight(f"{prefix}up", hidden, up, copies, used, held=held),
            Weight(f"{prefix}down", self.width, hidden, copies, used, held=held),
        ]
        whole_here: Held = held if copies > 1 else "whole"
        if self.bias:
            parts += [vector(f"{prefix}up bias", up, copies, used, held)]
            parts += [vector(f"{prefix}down bias", hidden, copies, used, whole_here)]
        if self.activation == "xielu":
            parts += [vector(f"{prefix}activation", 2, copies, used, whole_here)]
        return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMLP:
    """Experts of which each token visits some (arXiv:1701.06538), with the options of published models."""

    experts: int
    chosen: int
    """Experts that a token visits."""
    expert: DenseMLP
    shared: DenseMLP | None = None
    """What every token visits, too."""
    shared_experts: int = 0
    """Number of experts that ``shared`` stands for; its width is that of all of them."""
    shared_gate: bool = False
    """The shared part is weighted by a sigmoid of the input (Qwen)."""
    latent: int = 0
    """Width at which experts work, between two projections; 0: the hidden size."""
    latent_norm: bool = False
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    """Experts are chosen from some of this many groups."""
    correction: bool = False
    """A bias of the choice that is balanced after each step and is no parameter (arXiv:2408.15664)."""
    balance_loss: float = 0.0
    router_bias: bool = False
    router_scales: bool = False
    """The router norms its input, with a scale of every column, and each expert's weights have a scale (Gemma 4)."""
    weights_inputs: bool = False
    """An expert's weight multiplies its input instead of its output (Llama 4)."""
    hashed: bool = False
    """Experts are looked up by the token instead of chosen (the first layers of DeepSeek-V4)."""

    @property
    def label(self) -> str:
        beside = f" + {self.shared_experts or 1} shared" if self.shared is not None else ""
        inside = f" at width {self.latent}" if self.latent else ""
        return f"{self.chosen} of {self.experts} experts{beside}{inside}, {self.expert.label}"

    @property
    def splits(self) -> Splits:
        return Splits(shared_columns=self.shared.width if self.shared is not None else 0)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        parts = [whole("router", hidden, self.experts)]
        parts += self.expert.weights(self.latent or hidden, "expert ", self.experts, self.chosen)
        if self.router_bias:
            parts += [vector("router bias", self.experts)]
        if self.router_scales:
            parts += [vector("router norm", hidden), vector("router scales", self.experts)]
        if self.latent:
            parts += [whole("latent down", hidden, self.latent), whole("latent up", self.latent, hidden)]
        if self.latent_norm:
            parts += [vector("latent norm", self.latent)]
        if self.shared is not None:
            parts += self.shared.weights(hidden, "shared ")
        if self.shared_gate:
            parts += [whole("shared gate", hidden, 1)]
        return tuple(parts)


MLP = DenseMLP | RoutedMLP
