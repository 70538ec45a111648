"""Bytes that packed documents add to a rank: positions, rotary tables, and masks.

Every rank holds the rotary tables of all places of a sequence and all indices of one, and with every micro-batch a
position of each token, with context parallelism also one of each token of all ranks
(`workloads.engine.training.data.Batch`). A chunk with layers gathers its tokens' rows of the tables and makes the mask
for each micro-batch; both stay until the first layer's backward is done. Where keys are gathered, so does the order in
which they are put, and its inverse. With Ulysses queries are those of whole sequences. FlexAttention's mask has, for
blocks of 128 queries by 128 keys, the partly and the wholly seen blocks of keys by block of queries, and the same by
block of keys, as numbers of 32 bits (`workloads.engine.kind_ops.flex_attention`).
"""

from __future__ import annotations

from workloads.costs.memory.activations import rank_tokens
from workloads.spec.documents.kernels import by_length
from workloads.spec.experiment import Experiment
from workloads.spec.kind_weights import rotations

_INDEX_BYTES, _LISTED_BYTES, _TABLE_BYTES = 8, 4, 4
_BLOCK = 128


def input_bytes(e: Experiment) -> int:
    """Bytes of token ids, targets and positions of every micro-batch, and of rotary tables (sine and cosine, fp32)."""
    tokens, own = rank_tokens(e)[0], e.seq_len // e.cp
    columns = sum(one.columns for one in rotations(e.model))
    modules = e.model.mtp_modules
    if e.documents is None:
        parts = 2 + modules
        return parts * _INDEX_BYTES * tokens * e.num_microbatches + _TABLE_BYTES * own * columns
    parts = 3 + (e.cp if e.cp > 1 else 0) + modules
    of_batches = parts * _INDEX_BYTES * tokens * e.num_microbatches
    return of_batches + _TABLE_BYTES * e.seq_len * columns + _LISTED_BYTES * e.seq_len


def packed_bytes(e: Experiment) -> int:
    """Bytes of the tables and the mask of one micro-batch in a chunk; 0 without documents."""
    if e.documents is None:
        return 0
    tokens, own = rank_tokens(e)[0], e.seq_len // e.cp
    tables = _TABLE_BYTES * tokens * sum(one.columns for one in rotations(e.model))
    queries, ordered = tokens, 0
    if e.cp > 1 and e.cp_kind == "ulysses":
        queries, own = e.micro_batch_size * e.seq_len, e.seq_len
    elif e.cp > 1:
        ordered = e.micro_batch_size * e.seq_len
    # the first token of each query's document, and the query's own index where it is not the same in all sequences
    bounds = _LISTED_BYTES * queries * (2 if ordered else 1)
    if by_length(e):
        return tables + bounds + _LISTED_BYTES * (queries + 2)
    by_query, by_key = -(-own // _BLOCK), -(-e.seq_len // _BLOCK)
    lists = 2 * _LISTED_BYTES * e.micro_batch_size * (2 * by_query * by_key + by_query + by_key)
    return tables + bounds + 2 * _INDEX_BYTES * ordered + lists
