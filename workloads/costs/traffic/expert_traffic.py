"""Messages of layers with routed experts, as a term of `workloads.costs.traffic.sent`. No torch here.

Per layer and micro-batch; expert all-to-all as in GShard (arXiv:2006.16668). Symbols: T_e tokens of which this rank
sends copies, k copies each, N = T_e k copies sent and M received, E experts, c bytes of a compute value, a bytes of a
value in the precision of sums; T as in `workloads.costs.traffic.sent`; D the width at which experts work, the hidden
size or that of their latent.

ep      forward: copies (c N D), their weights (a N), outputs back (c M D); backward: a gradient for each, in the other
        direction. Learned routing exchanges counts first (8 E). Full recomputation repeats a forward up to the
        experts' outputs, and where a norm or a projection follows what brings them back, too. With forced routing M is
        exact. With learned routing M depends on what was learned, and is set to its mean over the group, N; so calls
        are exact, and the bytes of all ranks of a group together, too. A capacity fixes both numbers of rows
tp      with etp = tp tokens (c T D) and weights (a T k) are gathered, outputs scattered, and backward does the adjoint;
        without sequence parallelism outputs are all-reduced, and the two gradients in backward. Learned choices (8 T k)
        are gathered, too. Shared experts: `workloads.costs.traffic.kind_traffic`
tp, cp  the balance loss of learned routing sums its counts (a E for each sequence of a micro-batch)
dp, tp  once a step, if a bias balances learned routing: the loads of this rank's layers (8 E each), over all ranks
        that have tokens of their own
"""

from __future__ import annotations

from math import ceil

from workloads.costs.shape.expert_loads import rows_from, sent_tokens
from workloads.costs.traffic.sender import Sender
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import MoESpec

_COUNT_BYTES = 8
"""Bytes of counts and choices, which are int64."""


def routed_experts(s: Sender) -> None:
    """Count the messages of this rank's layers with routed experts, except FSDP's messages for their parameters."""
    e, moe = s.experiment, s.experiment.model.moe
    if moe is None or not s.num_routed:
        return
    layers = s.num_routed * e.num_microbatches
    repeated = s.num_routed_repeated * e.num_microbatches
    _exchanges(s, moe, layers, repeated)
    _inside_tensor_parallel(s, moe, layers, repeated)
    if e.routing == "learned":
        _balance(s, moe, layers + repeated)


def _exchanges(s: Sender, moe: MoESpec, layers: int, repeated: int) -> None:
    e = s.experiment
    sent, received = _rows(s, moe)
    row = s.compute * _width(s)
    s.along_experts(row * sent, 2 * layers + repeated)  # dispatch of copies; backward of the combine
    outputs_again = s.num_outputs_repeated * e.num_microbatches
    s.along_experts(row * received, 2 * layers + outputs_again)  # combine of outputs; backward of the dispatch
    s.along_experts(s.accumulated * sent, layers + repeated)
    s.along_experts(s.accumulated * received, layers)
    if e.routing == "learned" and e.capacity_factor is None:
        s.along_experts(_COUNT_BYTES * moe.num_experts, layers + repeated)


def _width(s: Sender) -> int:
    """Width at which experts work: the hidden size, or that of their latent."""
    routed = [kind.mlp for kind in layers_of(s.experiment.model).kinds if isinstance(kind.mlp, RoutedMLP)]
    return routed[0].latent or s.experiment.model.hidden_size


def _rows(s: Sender, moe: MoESpec) -> tuple[int, int]:
    """(sent, received): numbers of copies of one layer and micro-batch."""
    e = s.experiment
    sent = sent_tokens(e) * moe.experts_per_token
    if e.capacity_factor is not None:
        rows = moe.num_experts * ceil(e.capacity_factor * sent / moe.num_experts)
        return rows, rows
    if e.routing == "learned" or e.ep == 1:
        return sent, sent
    expert_rank, each = s.expert_rank, moe.num_experts // e.ep
    experts = range(expert_rank * each, (expert_rank + 1) * each)
    first = s.rank - expert_rank * e.etp
    return sent, sum(rows_from(e, first + peer * e.etp, experts) for peer in range(e.ep))


def _inside_tensor_parallel(s: Sender, moe: MoESpec, layers: int, repeated: int) -> None:
    e = s.experiment
    stream = s.compute * s.tokens * _width(s)
    weights, choices = (bytes * s.tokens * moe.experts_per_token for bytes in (s.accumulated, _COUNT_BYTES))
    if e.etp == 1:
        return
    outputs_again = s.num_outputs_repeated * e.num_microbatches
    if not e.sequence_parallel:
        s.along("tp", "all_reduce", stream, 2 * layers + outputs_again)
        s.along("tp", "all_reduce", weights, layers)
        return
    s.along("tp", "all_gather", stream, 2 * layers + repeated)
    s.along("tp", "reduce_scatter", stream, 2 * layers + outputs_again)
    s.along("tp", "all_gather", weights, layers + repeated)
    s.along("tp", "reduce_scatter", weights, layers)
    if e.routing == "learned":
        s.along("tp", "all_gather", choices, layers + repeated)


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
