"""Messages of context-parallel ranks in one layer: calls and bytes of each kind. No torch here.

Per layer and micro-batch, of one rank. Symbols: T tokens of this rank (micro_batch_size * seq_len / cp); N query heads
and K key and value heads of this rank (heads / tp); H the size of queries and keys, V of values, X = H + V; c bytes of
the compute dtype; a bytes of the dtype of sums: 4 (8 in fp64), but c with cp = 2, where a sum has two terms and is
rounded once in any case. Bytes are those that one call sends to other ranks; as many are received:

| kind      | pass     | calls                      | bytes of each call                                        |
|-----------|----------|----------------------------|-----------------------------------------------------------|
| ring      | forward  | cp - 1 sends               | T K X c: keys and values                                  |
|           | backward | cp - 1 sends               | T K X c: keys and values again                            |
|           |          | cp - 1 sends               | T K X a: their gradients                                  |
| allgather | forward  | 1 all-gather               | (cp - 1) T K X c                                          |
|           | backward | 1 all-gather               | (cp - 1) T K X c                                          |
|           |          | 1 reduce-scatter           | (cp - 1) T K X a                                          |
| ulysses   | forward  | 1 all-to-all               | (cp - 1) / cp T (N H + K X) c: queries, keys and values   |
|           |          | 1 all-to-all               | (cp - 1) / cp T N V c: outputs                            |
|           | backward | both, in reverse order     | as forward                                                |

Ring: Ring Attention (arXiv:2310.01889). Ulysses: DeepSpeed-Ulysses (arXiv:2309.14509). A forward that is recomputed in
the backward (full recomputation) sends its messages again.

With latent attention keys and values are sent as every head has them. Sending the latent and the shared rotated key
instead would be C + R numbers a token instead of K X: 576 instead of 40,960 in DeepSeek-V3 without tensor parallelism,
71 times fewer. Every rank would then have to compute keys and values of all tokens itself, cp times the work of that
projection.

This is attention to all earlier tokens. A window needs the keys and values of its reach alone: each of a rank's two
pieces of a sequence gets those of the tokens before it, in one message (of a ring or not), and in the backward gives
their gradients back: a sum of two terms, in the compute dtype. Keys of one head, entries of compressed attention and
keys of an indexer are whole on every tensor-parallel rank.

Gated delta rule, KDA and Mamba-2 exchange tokens for heads whatever the kind is, as Ulysses does
(`workloads.engine.collectives.head_exchange`): one all-to-all of all inputs of the recurrence, and one of its outputs.
Lightning attention, which the engine does not run, passes the state of each sequence on, in one all-gather of all
ranks' states; its backward passes the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import ContextKind
from workloads.spec.layer_kinds.exchange import ContextParallel
from workloads.spec.layer_kinds.model import Layer

_STATE_BYTES = 4


@dataclass(frozen=True, slots=True)
class AttentionMessages:
    """Calls of one kind and size."""

    op: Literal["send", "all_gather", "reduce_scatter", "all_to_all"]
    calls: int
    bytes_each: int
    """Bytes that one call sends to other ranks."""


def context_messages_of(
    e: Experiment, kind: Layer, compute_bytes: int, sum_bytes: int, *, backward: bool
) -> list[AttentionMessages]:
    """Messages of one layer in the forward or the backward of one micro-batch, in order."""
    if e.cp == 1 or kind.mixer is None:
        return []
    along = kind.mixer.context_parallel
    if along.state:
        size = _STATE_BYTES * e.micro_batch_size * along.state // e.tp
        return [AttentionMessages("all_gather", 1, (e.cp - 1) * size)]
    tokens = e.micro_batch_size * e.seq_len // e.cp
    if along.inputs:
        each = (e.cp - 1) * tokens * compute_bytes
        both = [each * (numbers // (e.tp * e.cp)) for numbers in (along.inputs, along.outputs)]
        return [AttentionMessages("all_to_all", 1, size) for size in (both[::-1] if backward else both)]
    of_rank = along._replace(split=along.split // e.tp, queries=along.queries // e.tp, outputs=along.outputs // e.tp)
    if along.reach is not None and e.cp_kind != "ulysses":
        piece = e.seq_len // (2 * e.cp)
        reached = min(along.reach, (2 * e.cp - 1) * piece // 2) * (of_rank.split + along.whole)
        return [AttentionMessages("send", 2, e.micro_batch_size * reached * compute_bytes)] if reached else []
    sizes = {"cp": e.cp, "tokens": tokens, "compute_bytes": compute_bytes, "sum_bytes": sum_bytes}
    return context_messages(e.cp_kind, of_rank, backward=backward, **sizes)


def context_messages(
    kind: ContextKind,
    along: ContextParallel,
    *,
    backward: bool,
    cp: int,
    tokens: int,
    compute_bytes: int,
    sum_bytes: int = 4,
) -> list[AttentionMessages]:
    """The messages of the table above, of attention to all earlier tokens. ``along``: numbers a token of one rank.
    ``compute_bytes`` and ``sum_bytes`` are bytes per number, the latter in sums of more than two terms."""
    if cp == 1:
        return []
    if kind == "ulysses":
        one, inputs = (cp - 1) * tokens * compute_bytes, (along.queries + along.split) // cp + along.whole
        calls = [AttentionMessages("all_to_all", 1, size * one) for size in (inputs, along.outputs // cp)]
        return calls[::-1] if backward else calls
    sum_bytes, numbers = compute_bytes if cp == 2 else sum_bytes, tokens * (along.split + along.whole)
    if kind == "ring":
        calls = [AttentionMessages("send", cp - 1, numbers * compute_bytes)]
        return calls + [AttentionMessages("send", cp - 1, numbers * sum_bytes)] * backward
    calls = [AttentionMessages("all_gather", 1, (cp - 1) * numbers * compute_bytes)]
    return calls + [AttentionMessages("reduce_scatter", 1, (cp - 1) * numbers * sum_bytes)] * backward
