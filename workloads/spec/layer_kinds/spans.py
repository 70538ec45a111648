"""Which keys a query sees, and how many on average over a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Full:
    """Every earlier token and itself."""

    @property
    def label(self) -> str:
        return "full"

    def keys(self, seq_len: float) -> float:
        return (seq_len + 1) / 2


@dataclass(frozen=True, slots=True)
class Window:
    """The last ``size`` tokens, itself included."""

    size: int

    @property
    def label(self) -> str:
        return f"sliding {self.size}"

    def keys(self, seq_len: float) -> float:
        if self.size >= seq_len:
            return (seq_len + 1) / 2
        return self.size - self.size * (self.size - 1) / (2 * seq_len)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Earlier tokens of its own chunk of ``size`` tokens, and itself."""

    size: int

    @property
    def label(self) -> str:
        return f"chunked {self.size}"

    def keys(self, seq_len: float) -> float:
        whole, rest = divmod(seq_len, self.size)
        return (whole * self.size * (self.size + 1) + rest * (rest + 1)) / (2 * seq_len)


Span = Full | Window | Chunk
