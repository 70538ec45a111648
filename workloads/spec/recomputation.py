"""The words of ``Experiment.recompute``: which operations of a layer its backward runs again. No torch here."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

SELECTIVE = ("norm", "rope", "swiglu")
"""The cheap operations: norms' outputs, rotated queries and keys, the SwiGLU product. ``selective`` is all of them."""
DEARER = ("mla_up", "experts")
"""Operations that are matrix products. No part of ``selective``; ``selective+mla_up+experts`` is all five.

mla_up   latent attention's up-projections, from the latents (Megatron-LM recomputes them as ``mla_up_proj``)
experts  routed experts from the copies that they have received, up to what their down projections take in.
         Megatron-LM's ``moe`` recomputes the whole layer from its input, so that it routes and exchanges twice; this
         keeps the received copies and sends nothing again
"""
OPERATIONS = (*SELECTIVE, *DEARER)
"""In the order of their names in ``recompute``. A further operation is one more name here."""


def _joined(names: tuple[str, ...]) -> str:
    cheap = [name for name in SELECTIVE if name in names]
    if len(cheap) == len(SELECTIVE):
        cheap = ["selective"]
    return "+".join([*cheap, *(name for name in DEARER if name in names)])


def _choices() -> tuple[str, ...]:
    """From nothing to everything: the cheap ones by themselves, those with each of the dearer, everything."""

    def some_of(names: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [found for count in range(len(names) + 1) for found in combinations(names, count)]

    every = [_joined((*cheap, *dear)) for dear in some_of(DEARER) for cheap in some_of(SELECTIVE)]
    return ("none", *filter(None, every), "full")


CHOICES = _choices()
MUST = f"none, selective, full or some of {', '.join(OPERATIONS)}, joined by '+'"
"""What a user is told."""

if TYPE_CHECKING:
    Recompute = str
else:
    Recompute = Literal[CHOICES]


def operations_of(recompute: str) -> tuple[str, ...]:
    """The operations that a layer runs again one by one; none with ``none`` and ``full``."""
    names = recompute.split("+")
    return tuple(name for name in OPERATIONS if name in names or (name in SELECTIVE and "selective" in names))


def canonical_recompute(value: Any) -> Any:
    """``value`` with its operations in their one order, each once, and all cheap ones as ``selective``. What is no list
    of known operations comes back as it is."""
    named = value.split("+") if isinstance(value, str) else []
    if not named or not set(named) <= {"selective", *OPERATIONS}:
        return value
    return _joined(operations_of(value))
