"""Bytes that memory moves for operations of experts that the engine leaves to torch.

SwiGLU of experts is one kernel. Their other activations, and biases of groups, are torch operations on some rows at a
time, with temporaries in fp32 (`workloads.engine.kind_ops.weighted_activations`, `group_bias`): each reads its inputs
from memory and writes its output there. The numbers below are those bytes for one element in 16 bits, summed over the
operations; a test counts them again on the engine's own code.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.spec.layer_kinds.mlp import DenseMLP

ACTIVATION_BYTES = {"clamped_silu": (90, 266), "gelu_tanh": (46, 126), "relu2": (36, 78)}
"""(forward, backward) bytes for one column of an expert's product, by activation without a kernel of its own."""
BIAS_BYTES, WEIGHTED_BIAS_BYTES = (8, 2), (16, 12)
"""(forward, backward) bytes for one column of the first product, to which a bias is added, and of the second, to which
one times the row's weight is. The rows of the bias itself stay in caches."""


class Moved(NamedTuple):
    """Bytes of experts for one row, in 16 bits."""

    activation: tuple[int, int]
    """Forward and backward."""
    biases: tuple[int, int]


def moved_bytes(expert: DenseMLP, columns: int, outputs: int) -> Moved:
    """``columns``: of an expert's product on one rank, ``outputs``: of its second product."""
    matrices = 3 if expert.gated else 2
    fused = 2 * matrices, 4 * matrices
    forward, backward = ACTIVATION_BYTES.get(expert.activation, fused)
    biases = 0, 0
    if expert.bias:
        first = columns * (2 if expert.gated else 1)
        forth, back = (
            first * of_first + outputs * of_second
            for of_first, of_second in zip(BIAS_BYTES, WEIGHTED_BIAS_BYTES, strict=True)
        )
        biases = forth, back
    return Moved((columns * forward, columns * backward), biases)
