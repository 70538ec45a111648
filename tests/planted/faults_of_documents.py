"""Faults of documents that are packed into sequences."""

from __future__ import annotations

from tests.planted.faults import DP, ENGINE, faults_of

_PACKED = {"documents": "lognormal mean=5 sigma=0.9 seed=3"}
_DEALT = {**_PACKED, "document_balance": "greedy", "dp": 2, "micro_batch_size": 2}
_GATHER = {**_PACKED, "cp": 2, "cp_kind": "allgather", "micro_batch_size": 4}
_SEEN = ENGINE + "kind_ops.document_attention:Seen.of"
_EXCHANGE = ENGINE + "collectives.document_exchange:"
_LOADS = "workloads.spec.documents.loads:"
DOCUMENTS = [
    *faults_of(
        "documents",
        (
            "neighbour_seen",
            "a document sees the last token of the one before it",
            _SEEN,
            "index_S - positions_T.view(batch, -1)",
            "(index_S - positions_T.view(batch, -1) - 1).clamp(min=0)",
            {**_PACKED, "micro_batch_size": 4},
        ),
        (
            "masks_of_one_sequence",
            "all sequences of a micro-batch have the documents of its first one",
            _SEEN,
            "index_S - positions_T.view(batch, -1)",
            "(index_S - positions_T.view(batch, -1))[:1].repeat(batch, 1)",
            {**_PACKED, "micro_batch_size": 4},
        ),
        (
            "next_document_predicted",
            "the last token of a document predicts the first one of the next",
            ENGINE + "training.data:_within_documents",
            "after == 0",
            "after < 0",
            {**_PACKED, "micro_batch_size": 4},
        ),
        (
            "sequence_dealt_twice",
            "every rank is dealt the sequences of the first one",
            _LOADS + "dealt",
            "for held in of_ranks",
            "for held in of_ranks[:1] * dp",
            _DEALT,
        ),
        (
            "document_lost",
            "the last document of a sequence is lost, and the one before it is longer",
            ENGINE + "training.data:_places",
            "for length in lengths",
            "for length in ([*lengths[:-2], sum(lengths[-2:])] if len(lengths) > 1 else lengths)",
            _DEALT,
        ),
        (
            "keys_in_order_of_ranks",
            "gathered keys stay in the order of ranks",
            _EXCHANGE + "_in_order",
            "second.flip(0)",
            "second",
            _GATHER,
        ),
        (
            "gradients_to_other_ranks",
            "gradients of keys go to the ranks of the mirrored parts",
            _EXCHANGE + "_by_rank",
            "second.flip(0)",
            "second",
            _GATHER,
        ),
    ),
    *faults_of(
        "places",
        (
            "positions_do_not_restart",
            "rotary positions go on through a sequence; scores need only differences",
            ENGINE + "layers.transformer:Chunk.forward",
            "(cos[positions_T], sin[positions_T], seen)",
            "(cos[self.index.repeat(self.batch)], sin[self.index.repeat(self.batch)], seen)",
            {**_PACKED, "micro_batch_size": 4},
        ),
        check="document_positions",
    ),
    *faults_of(
        "places",
        (
            "shortest_first",
            "sequences are dealt from the shortest to the longest",
            _LOADS + "_greedy",
            "(-work[at], at)",
            "(work[at], at)",
            DP,
        ),
        (
            "balanced_by_documents",
            "sequences are dealt by their number of documents",
            _LOADS + "squares",
            "sum(length * length for length in lengths)",
            "len(lengths)",
            DP,
        ),
        check="document_balance",
    ),
]
