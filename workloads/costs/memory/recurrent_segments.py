"""Bytes that the backward of one recurrent layer needs in torch operations (``recurrence=torch``), besides its inputs,
the gradients of these and that of its output. No torch here.

Counted tensor by tensor from `workloads.engine.kind_ops.segments` and the steps that it runs. A backward computes the
states before all segments, then runs every segment once more with autograd. It needs most in the second of these runs:
all that the segment's operations save exists, and of the run before it the inputs, which its graph holds, the gradients
of these, its output and the gradient of that. The last inputs of a convolution, which the next segment needs, are a
view of all its inputs. Where one segment is the whole sequence, the backward of its operations needs most.

Symbols: T tokens of a segment in all B sequences, in m chunks; n segments; X columns of the inputs, C channels of the
convolution; k and v columns of the keys and values of all heads; S numbers of the state. Numbers are in fp32, or in
fp64 for fp64 activations.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import CHUNK, SEGMENT_TOKENS, Batch, Kernels

_WIDE = 4
"""Bytes of a number in fp32."""


class _Saved(NamedTuple):
    """Numbers that the operations of one segment save, of one token unless stated otherwise."""

    columns: float
    of_chunks: int
    """Columns of what each chunk adds to a list, which then is one tensor more."""
    states: int
    """How many tensors have the states of all chunks, besides the list of these."""
    others: int
    """How many states of one chunk exist besides these and those of segments."""


def segments_working(mixer: Kernels, batch: Batch, ranks: int, c: int) -> int:
    """Bytes of one layer on one of ``ranks`` ranks that share its heads (tp times cp). ``batch``: of whole sequences;
    ``c``: bytes of an activation."""
    length = min(batch.length, max(1, SEGMENT_TOKENS // (batch.sequences * CHUNK)) * CHUNK)
    chunks, number = -(-length // CHUNK), -(-batch.length // length)
    several = number > 1
    along = mixer.context_parallel
    inputs, tokens = along.inputs // ranks, batch.sequences * length
    state, channels = _state(mixer, ranks), _channels(mixer, ranks)
    of_convolution = batch.sequences * (length + mixer.kernel - 1) * channels
    most = 0.0
    for saved in _moments(mixer, ranks, several=several, copied=1 / chunks if batch.sequences > 1 else 0.0):
        kept = chunks * (1 + saved.states) + saved.others + (number if several else 1)
        rows = tokens + (batch.sequences * CHUNK if several else 0)
        found = tokens * saved.columns + rows * saved.of_chunks + batch.sequences * state * kept
        most = max(most, found)
    copies = (0 if c >= _WIDE else 2 if several else 1) + (1 if several else 0)
    most += copies * tokens * inputs + (number + 2 if several else 1) * of_convolution
    return round(max(c, _WIDE) * (most + 3 * channels * mixer.kernel))


def _state(mixer: Kernels, ranks: int) -> int:
    """S of one sequence."""
    if isinstance(mixer, GatedDeltaRule):
        return mixer.value_heads // ranks * mixer.key_dim * mixer.value_dim
    if isinstance(mixer, KimiDelta):
        return mixer.heads // ranks * mixer.head_dim**2
    return mixer.heads // ranks * mixer.head_dim * mixer.state


def _channels(mixer: Kernels, ranks: int) -> int:
    """C."""
    if isinstance(mixer, GatedDeltaRule):
        return (2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim) // ranks
    if isinstance(mixer, KimiDelta):
        return 3 * mixer.heads * mixer.head_dim // ranks
    return (mixer.heads * mixer.head_dim + 2 * mixer.groups * mixer.state) // ranks


def _moments(mixer: Kernels, ranks: int, *, several: bool, copied: float) -> list[_Saved]:
    """What is saved when a segment's outputs are made, or its gated norm; or with one segment in the backward.
    ``copied``: the part of a segment that is a chunk, if keys are copied chunk by chunk for products, since those of
    several sequences are not next to each other; else 0."""
    if isinstance(mixer, GatedDeltaRule):
        return _gated_delta(mixer, ranks, several=several, copied=copied)
    if isinstance(mixer, KimiDelta):
        return _kimi_delta(mixer, ranks, several=several, copied=copied)
    return _mamba(mixer, ranks, several=several)


def _gated_delta(mixer: GatedDeltaRule, ranks: int, *, several: bool, copied: float) -> list[_Saved]:
    heads = mixer.value_heads // ranks
    k, v, scores = heads * mixer.key_dim, heads * mixer.value_dim, heads * CHUNK
    others = 3 if several else 0
    rest = 2 * _channels(mixer, ranks) + 6 * scores + 8 * heads + 3 * mixer.key_heads // ranks + copied * k
    rest += 2 * v if several else 0
    outputs = rest + 14 * k + 6 * v + (max(k, v) if copied else 0)
    moments = [_Saved(outputs, v, 1, others), _Saved(rest + 12 * k + 8 * v, v, 1, others)]
    return moments if several else [*moments, _Saved(rest + 10 * k + 12 * v, v, 1, 0)]


def _kimi_delta(mixer: KimiDelta, ranks: int, *, several: bool, copied: float) -> list[_Saved]:
    """Scores of blocks of eight tokens: decays of pairs and keys with these (8 columns a channel each), and for each
    block but the first keys of all tokens before it, with their decays and as the product takes them."""
    heads = mixer.heads // ranks
    width, scores = heads * mixer.head_dim, heads * CHUNK
    blocks = 2 * 8 + (7 * 3 + 2 * sum(range(1, 8))) / 8
    columns = 3 * scores + 3 * heads + (blocks + (29 if several else 30) + copied) * width
    columns += width if copied else 0
    return [_Saved(columns, width, 1, 3 if several else 0)]


def _mamba(mixer: Mamba2, ranks: int, *, several: bool) -> list[_Saved]:
    heads, groups = mixer.heads // ranks, mixer.groups // ranks
    width, scores = heads * mixer.head_dim, heads * CHUNK
    rest = 2 * _channels(mixer, ranks) + 4 * heads + 2 * scores + groups * CHUNK + 2 * heads * mixer.state
    rest += 2 * groups * (mixer.state + 1) if groups > 1 else 0  # one group's are already in order
    if not several:
        return [_Saved(rest + 14 * width, 0, 1, 0)]
    return [_Saved(rest + 9 * width + scores + 2 * heads, 0, 2, 3), _Saved(rest + 12 * width, 0, 1, 2)]
