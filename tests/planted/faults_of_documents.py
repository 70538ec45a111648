"""Faults of documents that are packed into sequences."""

from __future__ import annotations

from tests.planted.faults import DP, ENGINE, faults_of

_PACKED = {"documents": "lognormal mean=5 sigma=0.9 seed=3"}
_DEALT = {**_PACKED, "document_balance": "greedy", "dp": 2, "micro_batch_size": 2}
_GATHER = {**_PACKED, "cp": 2, "cp_kind": "allgather", "micro_batch_size": 4}
_CHUNKS = {**_GATHER, "document_balance": "greedy"}
_SEEN = ENGINE + "kind_ops.document_attention:Seen.of"
_SEEN_ORDER = ENGINE + "kind_ops.document_attention:Order.of"
_EXCHANGE = ENGINE + "collectives.document_exchange:"
_LOADS = "workloads.spec.documents.loads:"
_SHARES = "workloads.spec.documents.shares:"
DOCUMENTS = [
    *faults_of(
        "documents",
        (
            "neighbour_seen",
            "a document sees the last token of the one before it",
            _SEEN,
            "(index_BS - places_BS).int()",
            "(index_BS - places_BS - 1).clamp(min=0).int()",
            {**_PACKED, "micro_batch_size": 4},
        ),
        (
            "masks_of_one_sequence",
            "all sequences of a micro-batch have the documents of its first one",
            _SEEN,
            "(index_BS - places_BS).int()",
            "(index_BS - places_BS)[:1].repeat(len(places_BS), 1).int()",
            {**_PACKED, "micro_batch_size": 4},
        ),
        (
            "next_document_predicted",
            "the last token of a document predicts the first one of the next",
            ENGINE + "training.data:_within_documents",
            "targets.masked_fill(_are_last(places), END_OF_DOCUMENT)",
            "targets",
            {**_PACKED, "micro_batch_size": 4},
        ),
        (
            "ahead_into_the_next_document",
            "a module predicts tokens of the next document",
            ENGINE + "training.data:_later_targets",
            "moved.masked_fill(_are_last(places), NO_TARGET)",
            "moved",
            {**_PACKED, "micro_batch_size": 4, "modules": 1},
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
            ".index_select(0, order.whole_F)",
            "",
            _GATHER,
        ),
        (
            "gradients_to_other_ranks",
            "gradients of keys are put in the order of sequences again",
            _EXCHANGE + "_by_rank",
            "order.held_F",
            "order.whole_F",
            _GATHER,
        ),
        (
            "keys_of_another_sequence",
            "gathered keys of all sequences are put in the order of the first one",
            _SEEN_ORDER,
            "torch.cat([held_BS.mT for held_BS in held_RBS])",
            "torch.cat([held_BS[:1].expand_as(held_BS).mT for held_BS in held_RBS])",
            _CHUNKS,
        ),
        (
            "range_shifted",
            "the chunks of the first rank begin one token late",
            ENGINE + "training.data:held_tokens",
            "torch.arange(chunk * size, (chunk + 1) * size)",
            "(torch.arange(chunk * size, (chunk + 1) * size) + (cp_rank == 0)) % packing.seq_len",
            _CHUNKS,
        ),
        (
            "own_indices_of_the_first_rank",
            "every rank takes the indices of the first one's tokens for its own",
            _EXCHANGE + "seen_keys",
            "by_sequence[1 + axis.rank]",
            "by_sequence[1]",
            _CHUNKS,
        ),
        (
            "places_of_ranks_exchanged",
            "with Ulysses documents are those of the ranks in the opposite order",
            _EXCHANGE + "seen_keys",
            "torch.cat(by_sequence[1:], 1)",
            "torch.cat(by_sequence[:0:-1], 1)",
            {**_PACKED, "cp": 2, "cp_kind": "ulysses", "micro_batch_size": 4},
        ),
    ),
    *faults_of(
        "places",
        (
            "positions_do_not_restart",
            "rotary positions go on through a sequence; scores need only differences",
            ENGINE + "layers.transformer:Chunk.forward",
            "(cos[positions_T], sin[positions_T], seen)",
            "(*(x[self.index.repeat(len(positions_T) // len(self.index))] for x in (cos, sin)), seen)",
            {**_PACKED, "micro_batch_size": 4},
        ),
        check="document_positions",
    ),
    *faults_of(
        "places",
        (
            "shortest_first",
            "sequences are dealt from the shortest to the longest",
            _SHARES + "greedy",
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
        (
            "chunks_in_order",
            "chunks of sequences are dealt without their attention",
            _SHARES + "shares",
            "greedy(range(len(work)), work,",
            "greedy(range(len(work)), [0] * len(work),",
            DP,
        ),
        check="document_balance",
    ),
]
