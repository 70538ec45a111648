"""Which kernel a GPU has for attention to packed documents. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.spec.documents.lengths import packed

if TYPE_CHECKING:
    from workloads.spec.experiment import Experiment

_LARGEST_HEAD, _MULTIPLE = 256, 8
"""Head sizes of FlashAttention 2's kernels in torch."""


def by_length(e: Experiment) -> bool:
    """Whether every document is a sequence of FlashAttention's kernels for sequences of variable length: they take 16
    bits, values as large as keys, and queries that are all tokens of their document. Otherwise FlexAttention runs."""
    if e.documents is None or e.precision in ("fp32", "fp64"):
        return False
    size = e.model.head_dim
    equal = e.model.mla is None or e.model.mla.v_head_dim == size
    return equal and size <= _LARGEST_HEAD and size % _MULTIPLE == 0 and (e.cp == 1 or e.cp_kind == "ulysses")


def extremes(e: Experiment) -> tuple[int, int]:
    """(most documents in a micro-batch, most tokens in a document) of all sequences of a step."""
    assert e.documents is not None
    sequences = packed(e.documents, e.seq_len, e.global_batch_size)
    return e.micro_batch_size * max(map(len, sequences)), max(map(max, sequences))
