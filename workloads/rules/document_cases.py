"""Rules about packed documents, and about the kernels of attention to them."""

from __future__ import annotations

DOCUMENT_CASES = (
    (
        "documents",
        "documents and not numbers_describe",
        "documents with the layers of {model}, which differ by kind: attention of windows, chunks and recurrent layers "
        "to packed documents is not planned; use documents=null, or a model of one kind of attention",
    ),
    (
        "documents_attention",
        "documents and attention not in ('auto', 'flash', 'flash4')",
        "documents with attention={attention}: it knows no documents here; use attention=auto (FlexAttention), "
        "flash or flash4",
    ),
    (
        "documents_attention",
        "documents and attention in ('flash', 'flash4') and cp > 1 and cp_kind != 'ulysses'",
        "documents with attention={attention} and cp_kind={cp_kind}: its kernels take queries of whole documents; use "
        "attention=auto, or cp_kind=ulysses",
    ),
    (
        "documents_attention",
        "documents and attention in ('flash', 'flash4') and (cp == 1 or cp_kind == 'ulysses') and "
        "(query_size != value_size or query_size % 8)",
        "documents with attention={attention}: its kernels take keys and values of one size, a multiple of 8, "
        "{model} has {query_size} and {value_size}; use attention=auto",
    ),
)
"""(name, condition that breaks the rule, sentence); at most one of a name is broken at a time."""
