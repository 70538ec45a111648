"""Seconds of recurrent layers that run in plain torch operations (``recurrence=torch``) on GPUs.

`workloads.engine.kind_ops.segments` computes such a layer a few hundred tokens at a time, in fp32: its forward once,
and in the backward the states of all segments once more, then every segment with autograd. So there are thousands of
short operations, whose number and bytes count, not their FLOPs.

Operations and numbers were counted by running one segment on tensors without data, over 24 shapes of each kind
(`tests/workloads/costs/time/test_recurrent_operations.py` counts again), and are within 14 % of each count. Symbols as
in `workloads.spec.recurrent_kernels`; n: chunks of one sequence in a segment.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta
from workloads.spec.recurrent_kernels import CHUNK, SEGMENT_TOKENS, Batch, Kernels

REPLAYED_S = 4.7e-6
"""Least seconds of an operation inside a CUDA graph: 4.4 and 5.0 microseconds in captured steps of the same models
(results/recorded/h200x1_recurrent_captured/NOTE.md)."""
LAUNCHED_S = 23e-6
"""Seconds in which a host launches an operation: two models' eager steps on one H200, 23.4 and 23.9 microseconds
(results/recorded/h200x1_recurrent_eager/NOTE.md)."""
_FP32 = 4


class Pass(NamedTuple):
    """One pass of a segment."""

    operations: float
    numbers: float
    """Numbers in fp32 that they read and write."""


class TorchPasses(NamedTuple):
    """Seconds of one layer."""

    forward_s: float
    backward_s: float


def segment_passes(mixer: Kernels, batch: Batch, ranks: int) -> tuple[Pass, Pass]:
    """(forward, forward and backward with autograd) of one segment, ``batch``, on one of ``ranks`` ranks that share the
    heads."""
    n, tokens = batch.chunks // batch.sequences, batch.tokens
    if isinstance(mixer, GatedDeltaRule):
        keys, of_values = (tokens * heads * mixer.key_dim / ranks for heads in (mixer.key_heads, mixer.value_heads))
        values = tokens * mixer.value_heads * mixer.value_dim / ranks
        products = tokens * mixer.value_heads * CHUNK / ranks
        states = batch.chunks * mixer.value_heads * mixer.key_dim * mixer.value_dim / ranks
        return (
            Pass(66 + 7 * n, 59 * keys + 22 * of_values + 48 * values + 27 * products + 19 * states),
            Pass(206 + 26 * n, 218 * keys + 61 * of_values + 157 * values + 106 * products + 61 * states),
        )
    if isinstance(mixer, KimiDelta):
        width, products = (tokens * mixer.heads * columns / ranks for columns in (mixer.head_dim, CHUNK))
        states = batch.chunks * mixer.heads * mixer.head_dim * mixer.head_dim / ranks
        return (
            Pass(129 + 7 * n, 279 * width + 15 * products + 10 * states),
            Pass(451 + 27 * n, 1019 * width + 56 * products + 55 * states),
        )
    channels = tokens * mixer.heads * mixer.head_dim / ranks
    of_groups = tokens * mixer.groups * mixer.state / ranks
    products = tokens * mixer.heads * CHUNK / ranks
    states = batch.chunks * mixer.heads * mixer.head_dim * mixer.state / ranks
    return (
        Pass(50 + 2 * n, 57 * channels + 50 * of_groups + 11 * products + 14 * states),
        Pass(158 + 10 * n, 193 * channels + 177 * of_groups + 33 * products + 32 * states),
    )


def torch_passes(mixer: Kernels, batch: Batch, ranks: int, bandwidth: float, *, captured: bool) -> TorchPasses:
    """Seconds of one layer of a whole micro-batch ``batch``. ``bandwidth``: bytes per second of the device's memory;
    ``captured``: the step is a CUDA graph, so that no operation waits for the host."""
    length = min(batch.length, max(1, SEGMENT_TOKENS // (batch.sequences * CHUNK)) * CHUNK)
    segments = -(-batch.length // length)
    forward, both = segment_passes(mixer, Batch(batch.sequences, length), ranks)
    least = REPLAYED_S if captured else LAUNCHED_S

    def seconds(one: Pass) -> float:
        return max(one.operations * least, one.operations * REPLAYED_S + _FP32 * one.numbers / bandwidth)

    again = (segments - 1) * seconds(forward) + segments * seconds(both)
    return TorchPasses(segments * seconds(forward), again)
