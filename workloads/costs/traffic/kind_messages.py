"""Messages of context-parallel ranks in one layer of a kind. No torch here.

Attention to all earlier tokens sends as `workloads.costs.traffic.context_parallel` says. A window needs the keys and
values of its reach alone: each of a rank's two pieces of a sequence gets those of the tokens before it, in one message
(of a ring or not), and gives their gradients back. Keys of one head, entries of compressed attention and keys of an
indexer are whole on every tensor-parallel rank. A recurrent mixer passes the state of each sequence on, in one
all-gather of all ranks' states; its backward passes the gradients.
"""

from __future__ import annotations

from workloads.costs.traffic.context_parallel import AttentionMessages, context_messages
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.model import Layer

_STATE_BYTES = 4


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
    if along.reach is not None and e.cp_kind != "ulysses":
        numbers, piece = along.split // e.tp + along.whole, e.seq_len // (2 * e.cp)
        reached = e.micro_batch_size * min(along.reach, (2 * e.cp - 1) * piece // 2) * numbers
        sends = [AttentionMessages("send", 2, reached * compute_bytes)]
        return sends + [AttentionMessages("send", 2, reached * sum_bytes)] * backward
    if e.cp_kind == "ulysses":
        one = (e.cp - 1) * tokens * compute_bytes
        inputs = (along.queries + along.split) // e.tp // e.cp + along.whole
        calls = [AttentionMessages("all_to_all", 1, size * one) for size in (inputs, along.outputs // e.tp // e.cp)]
        return calls[::-1] if backward else calls
    return context_messages(
        e.cp_kind,
        backward=backward,
        cp=e.cp,
        tokens=tokens,
        heads=1,
        kv_heads=1,
        head_dim=along.split // e.tp + along.whole,
        value_dim=0,
        compute_bytes=compute_bytes,
        sum_bytes=sum_bytes,
    )
