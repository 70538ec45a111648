"""What the ranks of a layout exchange in one part of a layer, in numbers a token."""

from __future__ import annotations

from typing import NamedTuple


class TensorParallel(NamedTuple):
    """Along tp, in the forward; backward exchanges as much again."""

    gathered: tuple[int, ...]
    """Widths of the inputs of column-parallel products."""
    shared: int = 0
    """What is computed for a rank's own tokens and used by all heads: rotated keys of latent attention, keys and
    entries of one head, an indexer's choice."""
    normed: int = 0
    """Sums over the columns of all ranks, in the precision of sums: one for each norm over all heads."""


class ContextParallel(NamedTuple):
    """Along cp."""

    split: int = 0
    """Keys and values, divided over tensor-parallel ranks."""
    whole: int = 0
    """Keys and values of one head, and keys of an indexer, which each tensor-parallel rank sends whole."""
    queries: int = 0
    """Queries, which Ulysses sends, divided over tensor-parallel ranks."""
    outputs: int = 0
    """Outputs, which Ulysses sends back."""
    reach: int | None = None
    """Earlier tokens that a query sees; None: all. Only these are sent."""
    inputs: int = 0
    """Inputs of a recurrence, divided over tensor-parallel ranks: ranks exchange tokens for heads, whatever the kind,
    and ``outputs`` back."""
    state: int = 0
    """Numbers of the state that a sequence passes on, divided over tensor-parallel ranks."""


NOTHING = ContextParallel()
