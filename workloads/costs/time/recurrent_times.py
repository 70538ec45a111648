"""Bytes that the kernels of flash-linear-attention read and write in one recurrent layer (``recurrence=fla``), and that
exchanges of context parallelism copy.

Counted from the sources of ``fla-core`` 0.6.0 and `workloads.engine.kind_ops.fused_scan`: each kernel reads its inputs
and writes its outputs once; what all heads of a group or all blocks of one kernel read again comes from the L2 cache.
The backward's bytes include those of the forward that it computes again. The kernels take longer than these bytes, by
as much as a profile of each kind of layer has shown (`SLOWER`).

Symbols as in `workloads.spec.recurrent_kernels`: all numbers of keys [T, J, K], of keys of all value heads [T, H, K],
of values [T, H, V], states [m, H, K, V], products within chunks [T, H, 64]. Numbers of heads alone are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.spec.engine_versions import BEFORE_7
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.model import Mixer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import CHUNK, Batch, Kernels


def exchange_copies(e: Experiment, mixer: Mixer | None, c: int) -> int:
    """Bytes read and written in each pass of one layer where context-parallel ranks exchange tokens for heads: what is
    sent is copied before and after, whatever computes the recurrence. ``c``: bytes of an activation."""
    if e.cp == 1 or not isinstance(mixer, Kernels):
        return 0
    along = mixer.context_parallel
    tokens = e.micro_batch_size * e.seq_len // e.cp
    return 4 * c * tokens * (along.inputs + along.outputs) // e.tp


class Passes(NamedTuple):
    """Bytes read and written in one layer by each pass."""

    forward: float
    backward: float


SLOWER = {GatedDeltaRule: (1.42, 1.67), KimiDelta: (1.95, 2.72), Mamba2: (1.45, 1.72)}
"""How many times longer than their bytes the kernels of a layer take, beside its FLOPs, forward and backward. One layer
and 8,192 tokens on one H200: Gated DeltaNet 0.66 and 2.64 ms, KDA 1.31 and 7.02 ms, Mamba-2 0.59 and 2.59 ms, of bytes
that would take 0.40 and 1.38, 0.62 and 2.46, 0.37 and 1.40 ms (results/recorded/h200x1_recurrent_profile/NOTE.md)."""
_MAMBA_IN_OPERATIONS = (2.40, 2.18)
"""The same of Mamba-2 where torch operations repeat B and C for every head, multiply by steps and copy gates: 0.95 and
3.24 ms."""


def slowed(passes: Passes, mixer: Kernels, engine_version: str) -> Passes:
    """Bytes that memory could move while the kernels of these ``passes`` run, in a version of this engine."""
    in_operations = isinstance(mixer, Mamba2) and engine_version in BEFORE_7
    forward, backward = _MAMBA_IN_OPERATIONS if in_operations else SLOWER[type(mixer)]
    return Passes(forward * passes.forward, backward * passes.backward)


def kernel_passes(mixer: Kernels, batch: Batch, ranks: int) -> Passes:
    """Of one layer on one of ``ranks`` ranks that share its heads (tp times cp). ``batch``: of whole sequences."""
    tokens, chunks = 2 * batch.tokens, 2 * batch.chunks
    if isinstance(mixer, GatedDeltaRule):
        keys, of_values = (tokens * heads * mixer.key_dim // ranks for heads in (mixer.key_heads, mixer.value_heads))
        values = tokens * mixer.value_heads * mixer.value_dim // ranks
        states = chunks * mixer.value_heads * mixer.key_dim * mixer.value_dim // ranks
        products = tokens * mixer.value_heads * CHUNK // ranks
        # Convolutions 2 (2 J + V), lengths 4 J, inverses, solved, states, outputs, and norm with a copy of the gate.
        forward = 13 * keys + 15 * values + 2 * of_values + 2 * states + 2 * products
        # Norm 5 V; solved, states; gradients within chunks, of states, of all, of the system; of lengths, convolutions;
        # and one pass that joins them.
        backward = 35 * keys + 30 * values + 12 * of_values + 5 * states + 2 * products
        return Passes(forward, forward + backward)
    if isinstance(mixer, KimiDelta):
        width = tokens * mixer.heads * mixer.head_dim // ranks
        states = chunks * mixer.heads * mixer.head_dim * mixer.head_dim // ranks
        products = tokens * mixer.heads * CHUNK // ranks
        # In widths: convolutions 6, lengths 4, sums of decays 3, products 4, solved 7, states 6, outputs 5, norm 3.
        forward = 38 * width + 2 * states + 5 * products
        # In widths, fp32 counting twice: norm 5, sums 3, solved 9, states 6, products 3, gradients of states 6, of all
        # 19, within chunks 20, sums of decays 4 and gate 4, lengths 8, convolutions 18, joining 10.
        return Passes(forward, forward + 115 * width + 5 * states + 13 * products)
    width, of_groups = (tokens * n // ranks for n in (mixer.heads * mixer.head_dim, mixer.groups * mixer.state))
    of_heads = tokens * mixer.heads * mixer.state // ranks
    states = chunks * mixer.heads * mixer.state * mixer.head_dim // ranks
    # Convolutions 2 (W + 2 G), copies of B and C, steps 2 W, states, outputs, skip 3 W, norm with a copy of the gate.
    forward = 11 * width + 6 * of_groups + 5 * of_heads + 2 * states
    # Norm 5 W; skip 3 W; states in fp32, gradients of them, of all, of values; sums over a group's heads; steps 4 W;
    # convolutions and joining.
    backward = 27 * width + 18 * of_groups + 11 * of_heads + 10 * states
    return Passes(forward, forward + backward)
