"""Bytes that the kernels of flash-linear-attention read and write in one recurrent layer (``recurrence=fla``).

Counted from the sources of ``fla-core`` 0.6.0 and `workloads.engine.kind_ops.fused_scan`: each kernel reads its inputs
and writes its outputs once; what all heads of a group or all blocks of one kernel read again comes from the L2 cache.
The kernels of chunks have few FLOPs a byte, so these bytes are most of their time; nothing is fitted. The backward's
bytes include those of the forward that it computes again.

Symbols as in `workloads.spec.recurrent_kernels`: all numbers of keys [T, J, K], of keys of all value heads [T, H, K],
of values [T, H, V], states [m, H, K, V], products within chunks [T, H, 64]. Numbers of heads alone are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta
from workloads.spec.recurrent_kernels import CHUNK, Batch, Kernels


class Passes(NamedTuple):
    """Bytes read and written in one layer by each pass."""

    forward: int
    backward: int


def kernel_passes(mixer: Kernels, batch: Batch, tp: int) -> Passes:
    """Of one layer on one of ``tp`` ranks."""
    tokens, chunks = 2 * batch.tokens, 2 * batch.chunks
    if isinstance(mixer, GatedDeltaRule):
        keys, of_values = (tokens * heads * mixer.key_dim // tp for heads in (mixer.key_heads, mixer.value_heads))
        values = tokens * mixer.value_heads * mixer.value_dim // tp
        states = chunks * mixer.value_heads * mixer.key_dim * mixer.value_dim // tp
        products = tokens * mixer.value_heads * CHUNK // tp
        # Convolutions 2 (2 J + V), lengths 4 J, inverses, solved, states, outputs, and norm with a copy of the gate.
        forward = 13 * keys + 15 * values + 2 * of_values + 2 * states + 2 * products
        # Norm 5 V; solved, states; gradients within chunks, of states, of all, of the system; of lengths, convolutions;
        # and one pass that joins them.
        backward = 35 * keys + 30 * values + 12 * of_values + 5 * states + 2 * products
        return Passes(forward, forward + backward)
    if isinstance(mixer, KimiDelta):
        width = tokens * mixer.heads * mixer.head_dim // tp
        states = chunks * mixer.heads * mixer.head_dim * mixer.head_dim // tp
        products = tokens * mixer.heads * CHUNK // tp
        # In widths: convolutions 6, lengths 4, sums of decays 3, products 4, solved 7, states 6, outputs 5, norm 3.
        forward = 38 * width + 2 * states + 5 * products
        # In widths, fp32 counting twice: norm 5, sums 3, solved 9, states 6, products 3, gradients of states 6, of all
        # 19, within chunks 20, sums of decays 4 and gate 4, lengths 8, convolutions 18, joining 10.
        return Passes(forward, forward + 115 * width + 5 * states + 13 * products)
    width, of_groups = (tokens * n // tp for n in (mixer.heads * mixer.head_dim, mixer.groups * mixer.state))
    of_heads = tokens * mixer.heads * mixer.state // tp
    states = chunks * mixer.heads * mixer.state * mixer.head_dim // tp
    # Convolutions 2 (W + 2 G), copies of B and C, steps 2 W, states, outputs, skip 3 W, norm with a copy of the gate.
    forward = 11 * width + 6 * of_groups + 5 * of_heads + 2 * states
    # Norm 5 W; skip 3 W; states in fp32, gradients of them, of all, of values; sums over a group's heads; steps 4 W;
    # convolutions and joining.
    backward = 27 * width + 18 * of_groups + 11 * of_heads + 10 * states
    return Passes(forward, forward + backward)
