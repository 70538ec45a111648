"""Tolerances, by precision, for the first losses and gradient norms of two correct layouts of one model."""

from __future__ import annotations

from collections.abc import Sequence

from results.statistics.errors_of_predictions import relative_difference

COMPARED_STEPS = 3
"""Only the first steps are compared: later ones drift apart because training is chaotic, not because of errors."""

TOLERANCES = {
    "fp64": (1e-9, 1e-9),
    "fp32": (1e-5, 1e-4),
    "bf16": (3e-4, 1e-3),
    "fp16": (3e-4, 1e-3),
    "fp8_tensorwise": (3e-3, 3e-2),
    "fp8_rowwise": (3e-3, 3e-2),
    "fp8_blockwise": (3e-3, 3e-2),
}
"""The largest relative differences of a loss and of a gradient norm that rounding explains (every layout adds in
another order). In bf16, 78 recorded runs of correct layouts differ by at most 8e-5 in the loss and 2e-4 in the norm.
Errors planted in a small model (`tests/launchers/attempt/test_loss_check.py`) differ more: the smallest difference is
3.6e-3 in the norm, from an optimizer that does nothing; a missing RoPE (1.5e-3 at width 512, 5e-4 at 256) can just be
detected. The tolerances of the other precisions are scaled by their rounding, not measured."""


def largest_difference(values: Sequence[float | None], reference: Sequence[float | None]) -> float | None:
    """The largest relative difference in the first steps that both sequences have; None if there are none. A value of
    None (a skipped step) is not compared."""
    pairs = zip(values[:COMPARED_STEPS], reference[:COMPARED_STEPS], strict=False)
    both = ((a, b) for a, b in pairs if a is not None and b is not None)
    return max((relative_difference(a, b) for a, b in both), default=None)
