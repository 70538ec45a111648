"""Which kernel a GPU has for attention to packed documents. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.spec.documents.lengths import packed

if TYPE_CHECKING:
    from workloads.spec.experiment import Experiment


def by_length(e: Experiment) -> bool:
    """Whether every document is a sequence of FlashAttention's kernels for sequences of variable length: torch's, or
    those of FlashAttention-4. Otherwise FlexAttention runs. On a CPU both are the plain formulas."""
    return e.documents is not None and e.attention in ("flash", "flash4")


def gathers_documents(e: Experiment) -> bool:
    """Whether ranks gather the keys of packed documents; then attention runs its forward again in its backward."""
    return e.documents is not None and e.cp > 1 and e.cp_kind == "allgather"


def extremes(e: Experiment) -> tuple[int, int]:
    """(most documents in a micro-batch, most tokens in a document) of all sequences of a step."""
    assert e.documents is not None
    sequences = packed(e.documents, e.seq_len, e.global_batch_size)
    return e.micro_batch_size * max(map(len, sequences)), max(map(max, sequences))
