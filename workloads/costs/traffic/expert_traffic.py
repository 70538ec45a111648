"""What layers with routed experts send, as a term of `workloads.costs.traffic.sent`. No torch here.

Of one layer and one micro-batch. T_e tokens that this rank sends copies of, k copies each, N = T_e k copies sent and M
received, E experts, c bytes of a compute value, a of one in the precision of sums, T and D as in
`workloads.costs.traffic.sent`.

ep      forward: copies (c N D), their weights (a N), outputs back (c M D); backward the same the other way round, a
        gradient for each. Learned routing exchanges counts first (8 E). Full recomputation repeats a forward up to the
        experts' outputs. With forced routing M is exact. Learned routing sends what it has learned: then M is taken as
        its mean over the group, N, so that calls are exact and the bytes of all ranks of a group together, too. A
        capacity fixes both numbers of rows
tp      with etp = tp tokens (c T D) and weights (a T k) are gathered, outputs scattered, and backward does the adjoint;
        without sequence parallelism outputs are all-reduced, and the two gradients in backward. Learned choices (8 T k)
        are gathered, too. Shared experts send what a dense feed-forward part sends; recomputation repeats their sum
tp, cp  the balance term of learned routing adds up its counts (a E for each sequence of a micro-batch)
dp, tp  once a step, where a bias balances learned routing: the loads of this rank's layers (8 E each), over all ranks
        that have tokens of their own
"""

from __future__ import annotations

from math import ceil

from workloads.costs.shape.expert_loads import rows_from, sent_tokens
from workloads.costs.traffic.sender import Sender
from workloads.spec.model_spec import MoESpec

_COUNT_BYTES = 8
"""Counts and choices are int64."""


def routed_experts(s: Sender) -> None:
    """Count what this rank's layers with routed experts send, but for what FSDP sends of their parameters."""
    e, moe = s.experiment, s.experiment.model.moe
    if moe is None or not s.num_routed:
        return
    layers = s.num_routed * e.num_microbatches
    again = s.num_routed_recomputed * e.num_microbatches if e.recompute == "full" else 0
    _exchanges(s, moe, layers, again)
    _inside_tensor_parallel(s, moe, layers, again)
    if e.routing == "learned":
        _balance(s, moe, layers + again)


def _exchanges(s: Sender, moe: MoESpec, layers: int, again: int) -> None:
    e = s.experiment
    sent, received = _rows(s, moe)
    row = s.compute * e.model.hidden_size
    s.along_experts(row * sent, 2 * layers + again)  # copies there; backward of their outputs
    s.along_experts(row * received, 2 * layers)  # outputs back; backward of the copies
    s.along_experts(s.accumulated * sent, layers + again)
    s.along_experts(s.accumulated * received, layers)
    if e.routing == "learned" and e.capacity_factor is None:
        s.along_experts(_COUNT_BYTES * moe.num_experts, layers + again)


def _rows(s: Sender, moe: MoESpec) -> tuple[int, int]:
    """(sent, received) copies of one layer and micro-batch."""
    e = s.experiment
    sent = sent_tokens(e) * moe.experts_per_token
    if e.capacity_factor is not None:
        rows = moe.num_experts * ceil(e.capacity_factor * sent / moe.num_experts)
        return rows, rows
    if e.routing == "learned" or e.ep == 1:
        return sent, sent
    own, each = s.expert_rank, moe.num_experts // e.ep
    experts = range(own * each, (own + 1) * each)
    first = s.rank - own * e.etp
    return sent, sum(rows_from(e, first + peer * e.etp, experts) for peer in range(e.ep))


def _inside_tensor_parallel(s: Sender, moe: MoESpec, layers: int, again: int) -> None:
    e = s.experiment
    stream = s.compute * s.tokens * e.model.hidden_size
    weights, choices = (bytes * s.tokens * moe.experts_per_token for bytes in (s.accumulated, _COUNT_BYTES))
    if moe.num_shared_experts:
        if e.sequence_parallel:
            s.along("tp", "all_gather", stream, 3 * layers + again)
            s.along("tp", "reduce_scatter", stream, 2 * layers + again)
        else:
            s.along("tp", "all_reduce", stream, 2 * layers + again)
    if e.etp == 1:
        return
    if not e.sequence_parallel:
        s.along("tp", "all_reduce", stream, 2 * layers)
        s.along("tp", "all_reduce", weights, layers)
        return
    s.along("tp", "all_gather", stream, 2 * layers + again)
    s.along("tp", "reduce_scatter", stream, 2 * layers)
    s.along("tp", "all_gather", weights, layers + again)
    s.along("tp", "reduce_scatter", weights, layers)
    if e.routing == "learned":
        s.along("tp", "all_gather", choices, layers + again)


def _balance(s: Sender, moe: MoESpec, forwards: int) -> None:
    e = s.experiment
    if moe.balance == "aux_loss":
        counts = s.accumulated * e.micro_batch_size * moe.num_experts
        s.along("cp", "all_reduce", counts, forwards)
        if e.sequence_parallel:
            s.along("tp", "all_reduce", counts, forwards)
    elif moe.balance == "bias":
        loads = _COUNT_BYTES * s.num_routed * moe.num_experts
        s.along_replicas("all_reduce", loads)
        s.along_shards("all_reduce", loads, 1)
        if e.etp == 1:
            s.along("tp", "all_reduce", loads)
