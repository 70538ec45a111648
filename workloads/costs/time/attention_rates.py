"""Rates of the kernels of attention, over the rate of cuDNN's on whole sequences with heads of 128."""

from __future__ import annotations

from workloads.costs.memory.activations import rank_tokens
from workloads.spec.documents.kernels import by_length
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.spans import Window

FLASH4_RELATIVE, FLASH4_RELATIVE_64 = 1.09, 1.23
"""Rate of FlashAttention-4 over that of cuDNN, forward and backward: with heads of 128, and of 64 or less, at 4,096
tokens on H200 (results/recorded/h200_flash4/NOTE.md)."""

DOCUMENTS_RELATIVE, DOCUMENTS_RELATIVE_64 = 0.4, 0.24
"""Rate of FlexAttention on packed documents over that of cuDNN on whole sequences, for heads as above: what explains
measured steps of Llama 8B and 1B on H200 (results/recorded/h200x2_updates_drawn/NOTE.md, h200x1_packed/NOTE.md). Blocks
of 128 queries and keys that documents use in part are in it."""

BY_LENGTH, BY_LENGTH_64 = (0.545, 950), (0.62, 1300)
"""The same for FlashAttention's kernels for sequences of variable length, which take whole sequences
(`workloads.spec.documents.kernels`): their rate on one long document, and the tokens by which every document seems
longer, because of blocks that are used in part and of what a query costs besides its scores. Read from documents of
mean 400 and 1,500 in 4,096 and 16,384 tokens on H200 (docs/grids.md, Packed documents)."""

BY_LENGTH4, BY_LENGTH4_64 = (1.06, 940), (1.07, 1210)
"""The same for FlashAttention-4's, over its rate on whole sequences: from those, and from three lists of documents in
16,384 tokens on H200 (results/recorded/h200x2_documents/NOTE.md)."""

WINDOWS = ((64, (0.475, 614)), (128, (0.69, 818)), (1024, (0.58, 590)))
"""Attention to a window, by the largest head: the rate of FlashAttention 2 over that of cuDNN on whole sequences with
heads of 128, if every query saw many keys, and the keys by which each row seems longer, halves of them on either side,
because of blocks that are used in part. From windows of 128 to 1,024 in 4,096 tokens on H200, forward and backward,
with which those in 2,048 and 8,192 tokens agree within 7 % (docs/lab/measurements_0.3.0.md)."""

WIDE_HEADS = ((128, 1.0), (256, 0.81), (1024, 0.1))
"""Rate of full attention, by the largest head, over that with heads of 128: cuDNN takes heads of at most 256; beyond
them memory-efficient attention runs, on keys and values that are repeated for every head of queries. Measured as
above."""

SINKS = (11, 12)
"""Passes over the output of attention that sinks take in time, forward and backward: torch operations on rows of
another order than memory's. Measured as above, with 64 heads of 64."""


def attention_relative(e: Experiment) -> float:
    """Rate of the layout's attention kernel over that of the usual one."""
    if e.attention != "flash4":
        return 1.0
    return FLASH4_RELATIVE_64 if e.model.head_dim <= 64 else FLASH4_RELATIVE


def documents_relative(e: Experiment) -> float:
    """Rate of attention on packed documents over that on whole sequences."""
    if e.documents is None:
        return 1.0
    if by_length(e):
        if e.attention == "flash4":
            rate, more = BY_LENGTH4_64 if e.model.head_dim <= 64 else BY_LENGTH4
        else:
            rate, more = BY_LENGTH_64 if e.model.head_dim <= 64 else BY_LENGTH
        return rate / (1 + more / e.slowest_length)
    return DOCUMENTS_RELATIVE_64 if e.model.head_dim <= 64 else DOCUMENTS_RELATIVE


def kind_relative(e: Experiment, kind: Layer) -> float:
    """Rate of the kernel of a layer's attention over that of full attention with heads of 128; 1 in models that numbers
    describe, since the dense model that stands beside one of layers must not have it."""
    mixer = kind.mixer
    if e.model.layers is None or not isinstance(mixer, Attention):
        return 1.0
    if isinstance(mixer.span, Window) and mixer.span.size < e.slowest_length:
        rate, more = next(found for size, found in WINDOWS if mixer.head_dim <= size)
        return rate / (1 + more / (2 * mixer.span.keys(e.slowest_length)))
    return next(found for size, found in WIDE_HEADS if mixer.head_dim <= size)


def sink_passes(e: Experiment, kind: Layer, c: int) -> tuple[float, float]:
    """Bytes that memory could move while sinks join the sum of a layer's softmax, forward and backward."""
    mixer = kind.mixer
    if not isinstance(mixer, Attention) or not mixer.sinks:
        return 0.0, 0.0
    outputs = float(c * rank_tokens(e)[0] * mixer.heads * mixer.value_dim // e.tp)
    return SINKS[0] * outputs, SINKS[1] * outputs
