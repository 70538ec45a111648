"""Rates of the kernels of attention, over that of attention in `workloads.costs.time.layer_times.Rates`."""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import rank_tokens
from workloads.spec.documents.kernels import by_length
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.layer_kinds.spans import Chunk, Window


class KernelRate(NamedTuple):
    """A kernel's rate, forward and backward, over that of `workloads.costs.time.layer_times.Rates`."""

    share: float
    """For many rows (a head of a token), each of which sees many keys."""
    tokens: float
    """Tokens by which a sequence or document seems longer, because of blocks that are used in part and of what a row
    costs besides its scores."""
    rows: float = 0.0
    """Rows of a call that as much work would have as the last programs of a call, those of its longest document, take
    while all others have ended."""

    def at(self, length: float) -> float:
        """Relative rate for sequences of ``length`` tokens."""
        return self.share / (1 + self.tokens / length)

    def of_documents(self, length: float, seq_len: int, rows: float) -> float:
        """Relative rate for documents in sequences of ``seq_len`` tokens, in a call of so many ``rows``. ``length``:
        `Experiment.slowest_length`. A document that fills its sequence leaves no last programs alone."""
        alone = self.rows / rows * max(0.0, 1 - length / seq_len)
        return self.share / (1 + self.tokens / length + alone)


WHOLE, WHOLE_64 = KernelRate(1.013, 370), KernelRate(0.946, 1020)
"""Causal attention of cuDNN to whole sequences, with heads of 128, and of 64 or less, forward and backward on one H200.
Heads of 128 as recorded steps say (``attention`` and ``short`` of sweep/conf/codebase/ultrasweep.yaml): calls alone are
up to a tenth faster, with all of a device's power. Heads of 64 are from calls alone (docs/lab/measurements_0.3.0.md,
kernels of attention to packed documents)."""

FLASH4_RELATIVE, FLASH4_RELATIVE_64 = 1.09, 1.23
"""Rate of FlashAttention-4 over that of cuDNN, forward and backward: with heads of 128, and of 64 or less, at 4,096
tokens on H200 (results/recorded/h200_flash4/NOTE.md)."""

FLEX, FLEX_64 = KernelRate(0.846, 1153, 140_000), KernelRate(0.652, 1748, 234_000)
"""FlexAttention on packed documents, for heads as above; measured in calls alone."""

FLEX_FORWARD_64 = 1.45
"""Its forward with heads of 64, over 2 of the 7 matrix products of forward and backward; measured so, too. The other
kernels' forwards take 0.8 to 1.0 of it, and are taken to have all of it."""

BY_LENGTH, BY_LENGTH_64 = KernelRate(0.697, 1013, 52_000), KernelRate(0.64, 1394, 51_000)
"""FlashAttention's kernels for sequences of variable length, which take whole sequences
(`workloads.spec.documents.kernels`); measured so, too."""

BY_LENGTH4, BY_LENGTH4_64 = KernelRate(1.155, 940), KernelRate(1.316, 1210)
"""The same for FlashAttention-4's: from documents of mean 400 and 1,500 in 4,096 and 16,384 tokens on H200, and from
three lists of documents in 16,384 tokens (results/recorded/h200x2_documents/NOTE.md)."""

WINDOWS = ((64, KernelRate(0.475, 614)), (128, KernelRate(0.69, 818)), (1024, KernelRate(0.58, 590)))
"""FlashAttention 2 on a window, by the largest head; a row is twice as long as the keys that it sees. From windows of
128 to 1,024 in 4,096 tokens on H200, forward and backward, with which those in 2,048 and 8,192 tokens agree within 7 %
(docs/lab/measurements_0.3.0.md)."""

WIDE_HEADS = ((128, 1.0), (256, 0.86), (1024, 0.108))
"""Rate of full attention, by the largest head, over that with heads of 128 above: cuDNN takes heads of at most 256;
beyond them memory-efficient attention runs, on keys and values that are repeated for every head of queries. Measured as
windows."""

SINKS = (11, 12)
"""Passes over the output of attention that sinks take in time, forward and backward: torch operations on rows of
another order than memory's. Measured as windows, with 64 heads of 64."""


def attention_relative(e: Experiment) -> float:
    """Rate of the layout's attention kernel over that of the usual one."""
    if e.attention != "flash4":
        return 1.0
    return FLASH4_RELATIVE_64 if e.model.head_dim <= 64 else FLASH4_RELATIVE


def kernel_relative(e: Experiment, kind: Layer) -> float:
    """Rate of what a layer's mixer computes beyond its products, forward and backward, over that of `Rates`."""
    mixer = kind.mixer
    if isinstance(mixer, Recurrent):
        return 1.0
    usual = attention_relative(e)
    if isinstance(mixer, LatentAttention) and mixer.indexer is None:
        return _documents(e, mixer) if e.documents is not None else usual * WHOLE.at(e.seq_len)
    if not isinstance(mixer, Attention):
        return usual
    if e.documents is not None:
        return _documents(e, mixer)
    if isinstance(mixer.span, Window) and mixer.span.size < e.seq_len:
        window = next(rate for size, rate in WINDOWS if mixer.head_dim <= size)
        return usual * window.at(2 * mixer.span.keys(e.seq_len))
    length = min(e.seq_len, mixer.span.size) if isinstance(mixer.span, Chunk) else e.seq_len
    wide = 1.0
    if e.model.layers is not None:  # not in the dense model beside them, whose form knows smaller heads alone
        wide = next(share for size, share in WIDE_HEADS if mixer.head_dim <= size)
    return usual * wide * (WHOLE_64 if _has_small_heads(mixer) else WHOLE).at(length)


def _documents(e: Experiment, mixer: Attention | LatentAttention) -> float:
    if not by_length(e):
        rates = FLEX, FLEX_64
    elif e.attention == "flash4":
        rates = BY_LENGTH4, BY_LENGTH4_64
    else:
        rates = BY_LENGTH, BY_LENGTH_64
    # with Ulysses a rank has all tokens of some heads, which are as many rows
    rows = rank_tokens(e)[0] * mixer.heads / e.tp
    return rates[_has_small_heads(mixer)].of_documents(e.slowest_length, e.seq_len, rows)


def forward_part(e: Experiment, kind: Layer) -> float:
    """Seconds of attention's forward over those of 2 of the 7 matrix products of both passes."""
    mixer = kind.mixer
    flex = e.documents is not None and not by_length(e)
    return FLEX_FORWARD_64 if flex and isinstance(mixer, Attention) and _has_small_heads(mixer) else 1.0


def _has_small_heads(mixer: Attention | LatentAttention) -> bool:
    return isinstance(mixer, Attention) and mixer.head_dim <= 64


def sink_passes(e: Experiment, kind: Layer, c: int) -> tuple[float, float]:
    """Bytes that memory could move while sinks join the sum of a layer's softmax, forward and backward."""
    mixer = kind.mixer
    if not isinstance(mixer, Attention) or not mixer.sinks:
        return 0.0, 0.0
    outputs = float(c * rank_tokens(e)[0] * mixer.heads * mixer.value_dim // e.tp)
    return SINKS[0] * outputs, SINKS[1] * outputs
