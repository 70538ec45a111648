"""The words of ``Experiment.recompute``: which operations of a layer its backward runs again. No torch here."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

SELECTIVE = ("norm", "rope", "swiglu")
"""The cheap operations: outputs of norms, rotated queries and keys, the SwiGLU product. ``selective`` is all of
them."""
DEARER = ("mla_up", "experts")
"""Operations that are matrix products. They are not part of ``selective``; ``selective+mla_up+experts`` is all five.

mla_up   latent attention's up-projections, recomputed from the latents (Megatron-LM's ``mla_up_proj``)
experts  routed experts, recomputed from their received token copies, up to the input of their down projections.
         Megatron-LM's ``moe`` recomputes the whole layer from its input, including routing and the exchanges; here the
         received copies are kept and nothing is sent again
"""
OPERATIONS = (*SELECTIVE, *DEARER)
"""All operations, in the order of their names in ``recompute``. A new operation is added here."""


def _joined(names: tuple[str, ...]) -> str:
    cheap = [name for name in SELECTIVE if name in names]
    if len(cheap) == len(SELECTIVE):
        cheap = ["selective"]
    return "+".join([*cheap, *(name for name in DEARER if name in names)])


def _choices() -> tuple[str, ...]:
    """All values in increasing order: none, the cheap operations, the cheap ones with each combination of the dearer
    ones, full."""

    def some_of(names: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [chosen for count in range(len(names) + 1) for chosen in combinations(names, count)]

    every = [_joined((*cheap, *dear)) for dear in some_of(DEARER) for cheap in some_of(SELECTIVE)]
    return ("none", *filter(None, every), "full")


CHOICES = _choices()
MUST = f"none, selective, full or some of {', '.join(OPERATIONS)}, joined by '+'"
"""List of the allowed values for messages."""

if TYPE_CHECKING:
    Recompute = str
else:
    Recompute = Literal[CHOICES]


def operations_of(recompute: str) -> tuple[str, ...]:
    """Operations that a layer recomputes one by one; empty with ``none`` and ``full``."""
    names = recompute.split("+")
    return tuple(name for name in OPERATIONS if name in names or (name in SELECTIVE and "selective" in names))


def canonical_recompute(value: Any) -> Any:
    """``value`` with its operations in canonical order, each once, and all cheap ones as ``selective``. A value that is
    not a list of known operations is returned unchanged."""
    named = value.split("+") if isinstance(value, str) else []
    if not named or not set(named) <= {"selective", *OPERATIONS}:
        return value
    return _joined(operations_of(value))
