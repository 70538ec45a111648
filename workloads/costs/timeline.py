"""Step time in closed form, in seconds: work over calibrated rates, exposed communication, bubble, optimizer.

Exposed communication is what nothing else runs beside. The parts are taken as follows.

compute     matmul FLOPs / (peak * matmul_efficiency); attention at its own share of that; norms, RoPE, SwiGLU,
            residuals and gradient accumulation at memory bandwidth. Kernels follow each other without gaps
tp          forward: all gathers and scatters are exposed. Backward: a row-parallel layer's gather is; a column-parallel
            layer gathers its input beside the input-gradient matmul and scatters beside the weight-gradient matmul
dp          gradients of one micro-batch hide behind its backward and gathered weights behind its forward, except for
            the last unit reduced and the first unit gathered. ZeRO 3 gathers in both directions, every micro-batch
pp          `pipeline_time_s` of the stages' actual times
cp          a ring's messages hide behind attention; gathers and all-to-alls are exposed
ep          experts' all-to-all is exposed
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.cluster import ClusterSpec
from workloads.costs.activations import rank_tokens
from workloads.costs.collectives import Collective, collective_time_s
from workloads.costs.context_parallel import context_messages
from workloads.costs.flops import attention_forward_flops, head_sizes
from workloads.costs.memory import COMPUTE_BYTES, MASTER_BYTES, parameter_shard_bytes
from workloads.costs.params import local_params, matmul_of_layer
from workloads.costs.partition import StageParams, experiment_stages
from workloads.costs.pipeline import Simulation, Span, pipeline_time_s, simulate
from workloads.experiment import Experiment, ModelSpec
from workloads.mesh import data_degrees, stride

__all__ = ["Simulation", "Span", "TimeEstimate", "estimate_time", "pipeline_time_s", "simulate"]

ATTENTION_RELATIVE_EFFICIENCY = 0.74
"""Rate of causal attention over the rate of matmuls: cuDNN forward and backward 510 TFLOP/s beside 690 for the matrix
products of a Llama-3.1-8B layer at 4096 tokens, measured on H200 with torch 2.11."""

ATTENTION_BACKWARD = 2.5
"""A flash attention backward has five matrix products (scores are computed again), its forward two
(FlashAttention-2, arXiv:2307.08691)."""

OPTIMIZER_PASSES = 10
"""How often each master-sized value is read or written: norm 1 read, clipping 1 read and 1 write, AdamW 4 reads
(weight, gradient, two moments) and 3 writes."""


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Where one optimizer step's time goes, in seconds, seen from the busiest stage. The parts add up."""

    step_time_s: float
    compute_s: float
    communication_s: float
    """Exposed: not hidden behind compute."""
    bubble_s: float
    """The busiest stage's waiting for other stages."""
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer and one micro-batch on one rank, in seconds."""

    forward_s: float
    backward_s: float
    """Without recomputation."""
    forward_exposed_s: float
    backward_exposed_s: float
    again_s: float
    """Recomputation, where the layer is recomputed."""
    again_exposed_s: float


@dataclass(frozen=True, slots=True)
class _Rates:
    matmul: float
    """FLOP/s of the blocks' matrix products."""
    head: float
    """FLOP/s of the head's, which stay in bf16 in fp8 runs."""
    attention: float
    memory: float
    """Bytes per second."""


def estimate_time(experiment: Experiment, cluster: ClusterSpec) -> TimeEstimate | None:
    """Time of one step; None where the cluster's device has no known rate for the precision.

    Raises `InfeasibleLayout` when the layout leaves the only node of a cluster without a link between nodes. Expects an
    experiment that breaks no rule of `workloads.rules`.
    """
    e = experiment
    rates = _rates(e, cluster)
    if rates is None:
        return None
    dense = _layer(e, cluster, rates, routed=False)
    moe = _layer(e, cluster, rates, routed=True) if e.model.moe is not None else dense
    ends = _Ends.of(e, cluster, rates)
    m, p2p = e.num_microbatches, _p2p_s(e, cluster)

    costs: dict[StageParams, _Stage] = {}
    held = experiment_stages(e)
    for stage in held:
        if stage not in costs:
            costs[stage] = _stage(e, cluster, rates, stage, dense, moe, ends)
    forward = [costs[s].forward_s + costs[s].forward_exposed_s for s in held]
    backward = [costs[s].backward_s + costs[s].backward_exposed_s for s in held]
    total = pipeline_time_s(e.pp_schedule, forward, backward, m, p2p, e.virtual_stages)

    busiest = max(range(e.pp), key=lambda s: forward[s] + backward[s])
    stage_cost = costs[held[busiest]]
    compute = m * (stage_cost.forward_s + stage_cost.backward_s)
    exposed = m * (stage_cost.forward_exposed_s + stage_cost.backward_exposed_s)
    once = max(cost.once_exposed_s for cost in costs.values())
    optimizer = max(cost.optimizer_s for cost in costs.values())
    return TimeEstimate(
        step_time_s=total + once + optimizer,
        compute_s=compute,
        communication_s=exposed + once,
        bubble_s=max(0.0, total - compute - exposed),
        optimizer_s=optimizer,
    )


def _rates(e: Experiment, cluster: ClusterSpec) -> _Rates | None:
    device, share = cluster.device, cluster.matmul_efficiency
    peak = device.peak_of(e.precision)
    head = device.peak_of("bf16" if e.precision.startswith("fp8") else e.precision)
    if peak is None or head is None or share is None or device.memory_bandwidth is None:
        return None
    return _Rates(
        matmul=peak * share,
        head=head * share,
        attention=head * share * ATTENTION_RELATIVE_EFFICIENCY,
        memory=device.memory_bandwidth,
    )


def _layer(e: Experiment, cluster: ClusterSpec, rates: _Rates, *, routed: bool) -> _Layer:
    """Compute and exposed communication of one layer.

    Matmuls: 2 FLOPs a parameter and token forward, 4 backward. Attention: causal half of ``4 N H T seq``. Forward
    bytes: two norms (read, write), two residual sums (2 reads, 1 write), RoPE and norms of queries and keys (each read,
    write), SwiGLU (2 reads, 1 write); twice that backward.
    """
    model, c = e.model, COMPUTE_BYTES[e.precision]
    tokens, stream = rank_tokens(e)
    matmul = 2.0 * tokens * matmul_of_layer(model, routed=routed) / e.tp / rates.matmul
    attention = 0.5 * tokens * attention_forward_flops(model, e.seq_len) / e.tp / rates.attention
    columns = _feed_forward_columns(model, routed)
    qk, _ = head_sizes(model)
    rotated = (model.num_heads + model.num_kv_heads) * qk
    rotated_passes = 4 if model.qk_norm and model.mla is None else 2
    of = {
        "norm": 4.0 * stream * model.hidden_size,
        "rope": rotated_passes * rotated * tokens / e.tp,
        "swiglu": 3.0 * columns * tokens / e.tp,
    }
    passes = 6 * stream * model.hidden_size + sum(of.values())
    memory = c * passes / rates.memory
    forward = matmul + attention + memory
    backward = 2 * matmul + ATTENTION_BACKWARD * attention + 2 * memory

    tp_forward, tp_backward = _tp_exposed(e, cluster, c, matmul, columns)
    again, again_exposed = 0.0, 0.0
    if e.recompute == "full":
        again, again_exposed = forward, tp_forward
        if not routed:  # backward needs nothing of the last matmul's output, nor of the sum after it
            again -= 2.0 * tokens * columns * model.hidden_size / e.tp / rates.matmul
            # Of two gathers and two scatters, or of two all-reduces.
            again_exposed -= tp_forward / (4 if e.sequence_parallel else 2)
    elif e.compile == "block" and e.recompute == "selective":
        again = memory
        if e.sequence_parallel and e.tp > 1:
            again_exposed = tp_forward / 2  # gathers come again, scatters' outputs were kept
    else:
        again = c * sum(of[name] for name in e.recomputed_operations) / rates.memory

    others = 0.0
    if routed and e.ep > 1 and model.moe is not None:
        sent = c * tokens * model.moe.experts_per_token * model.hidden_size
        others += 2 * collective_time_s("all_to_all", sent, e.ep, stride(e, "cp"), cluster)
    cp_forward, cp_backward = (_cp_exposed_s(e, cluster, attention, backward=turn) for turn in (False, True))
    if e.recompute == "full":
        again_exposed += cp_forward
    exposed = tp_forward + others + cp_forward, tp_backward + others + cp_backward
    return _Layer(forward, backward, *exposed, again, again_exposed)


def _cp_exposed_s(e: Experiment, cluster: ClusterSpec, attention_s: float, *, backward: bool) -> float:
    """Exposed context-parallel communication of one layer. ``attention_s``: of its forward."""
    if e.cp == 1:
        return 0.0
    sent = context_messages(
        e.cp_kind,
        backward=backward,
        cp=e.cp,
        tokens=rank_tokens(e)[0],
        heads=e.model.num_heads // e.tp,
        kv_heads=e.model.num_kv_heads // e.tp,
        head_dim=sum(head_sizes(e.model)) // 2,
        compute_bytes=COMPUTE_BYTES[e.precision],
        sum_bytes=MASTER_BYTES[e.precision],
    )
    total = 0.0
    for message in sent:
        op: Collective = "p2p" if message.op == "send" else message.op
        # Collectives are told the whole buffer, this rank's own part included.
        whole = message.bytes_each if op == "p2p" else message.bytes_each * e.cp / (e.cp - 1)
        total += message.calls * collective_time_s(op, whole, e.cp, stride(e, "cp"), cluster)
    if e.cp_kind != "ring":
        return total
    return max(0.0, total - (ATTENTION_BACKWARD if backward else 1.0) * attention_s)


def _feed_forward_columns(model: ModelSpec, routed: bool) -> int:
    if not routed or model.moe is None:
        return model.ffn_hidden_size
    return (model.moe.experts_per_token + model.moe.num_shared_experts) * model.moe.expert_hidden_size


def _tp_exposed(e: Experiment, cluster: ClusterSpec, c: int, matmul_s: float, columns: int) -> tuple[float, float]:
    """Exposed tensor-parallel communication of one layer, forward and backward.

    Column-parallel layers (qkv, gate_up) hold this share of the layer's matmul time, which is also the time of each of
    their two backward matmuls.
    """
    if e.tp == 1:
        return 0.0, 0.0
    model = e.model
    message = float(c * rank_tokens(e)[0] * model.hidden_size)
    attention_columns = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    into = attention_columns + 2 * columns
    share = into / (into + model.num_heads * model.head_dim + columns)
    beside = matmul_s * share / 2  # one of two column-parallel layers
    if not e.sequence_parallel:
        reduce = collective_time_s("all_reduce", message, e.tp, 1, cluster)
        return 2 * reduce, 2 * max(0.0, reduce - beside)
    gather = collective_time_s("all_gather", message, e.tp, 1, cluster)
    scatter = collective_time_s("reduce_scatter", message, e.tp, 1, cluster)
    hidden_in_part = max(0.0, gather - beside) + max(0.0, scatter - beside)
    return 2 * (gather + scatter), 2 * (gather + hidden_in_part)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Embedding and head, one micro-batch, in seconds."""

    head_forward_s: float
    head_backward_s: float
    exposed_s: float
    """The vocabulary-parallel collective on either end, forward or backward."""

    @classmethod
    def of(cls, e: Experiment, cluster: ClusterSpec, rates: _Rates) -> _Ends:
        """Gradients are computed in the forward (three products); under GPipe in its backward, logits again."""
        model, c = e.model, COMPUTE_BYTES[e.precision]
        tokens = rank_tokens(e)[0]
        product = 2.0 * tokens * model.vocab_size * model.hidden_size / e.tp / rates.head
        forward, backward = (1, 3) if e.pp_schedule == "gpipe" else (3, 0)
        op: Collective = "all_gather" if e.sequence_parallel else "all_reduce"
        exposed = collective_time_s(op, float(c * tokens * model.hidden_size), e.tp, 1, cluster)
        return cls(forward * product, backward * product, exposed)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One micro-batch of one stage, and what happens once a step, in seconds."""

    forward_s: float
    backward_s: float
    forward_exposed_s: float
    backward_exposed_s: float
    once_exposed_s: float
    optimizer_s: float


def _stage(
    e: Experiment, cluster: ClusterSpec, rates: _Rates, held: StageParams, dense: _Layer, moe: _Layer, ends: _Ends
) -> _Stage:
    c, g = COMPUTE_BYTES[e.precision], MASTER_BYTES[e.precision]
    d, r = held.dense_layers, held.moe_layers
    layers, experts = local_params(e, held.layers)
    edge = (held.embedding + held.head) // e.tp + held.final_norm
    params = layers + experts + edge
    shard_bytes = parameter_shard_bytes(e, layers + edge, experts)

    forward = d * dense.forward_s + r * moe.forward_s
    # Adding a gradient to what earlier micro-batches left, or copying it for reduction: read c, read and write g.
    backward = d * dense.backward_s + r * moe.backward_s + (c + 2 * g) * params / rates.memory
    backward += held.dense_recomputed * dense.again_s + held.moe_recomputed * moe.again_s
    forward_exposed = d * dense.forward_exposed_s + r * moe.forward_exposed_s
    backward_exposed = d * dense.backward_exposed_s + r * moe.backward_exposed_s
    backward_exposed += held.dense_recomputed * dense.again_exposed_s + held.moe_recomputed * moe.again_exposed_s
    if held.has_head:
        forward, backward = forward + ends.head_forward_s, backward + ends.head_backward_s
    edges = ends.exposed_s * ((held.embedding > 0) + held.has_head)

    # Expert weights are fewer on each data-parallel group of their own; taken here as travelling with the others.
    unit = max(1, held.num_layers)
    copies, shards = data_degrees(e)
    apart = e.tp * shards if shards > 1 else e.tp  # global ranks between two replicas
    gather = collective_time_s("all_gather", c * params, shards, e.tp, cluster)
    scatter = collective_time_s("reduce_scatter", g * params, shards, e.tp, cluster)
    replicas = collective_time_s("all_reduce", shard_bytes, copies, apart, cluster)
    once = 0.0
    if e.zero_stage == 3:
        forward_exposed += max(0.0, gather - forward) + gather / unit
        backward_exposed += max(0.0, gather + scatter - backward)
    else:
        once += max(0.0, gather - forward) + gather / unit
        if e.zero_stage == 2:
            backward_exposed += max(0.0, scatter - backward)
    last = replicas + (scatter if e.zero_stage <= 1 else 0.0)
    once += max(0.0, last - backward) + (scatter + replicas) / unit
    once += _tied_s(e, cluster, held, g)
    return _Stage(
        forward_s=forward,
        backward_s=backward,
        forward_exposed_s=forward_exposed + edges,
        backward_exposed_s=backward_exposed + edges,
        once_exposed_s=once,
        optimizer_s=(OPTIMIZER_PASSES + 1 + c / g) * shard_bytes / rates.memory,  # and casting the new weights
    )


def _p2p_s(e: Experiment, cluster: ClusterSpec) -> float:
    """One stage's output to the next: ``c T_s h``."""
    if e.pp == 1:
        return 0.0
    message = COMPUTE_BYTES[e.precision] * rank_tokens(e)[1] * e.model.hidden_size
    return collective_time_s("p2p", message, e.pp, stride(e, "pp"), cluster)


def _tied_s(e: Experiment, cluster: ClusterSpec, held: StageParams, g: int) -> float:
    """Summing the two copies of a tied embedding over the first and the last stage."""
    if not e.model.tie_embeddings or e.pp == 1 or not held.has_head or held.head == 0:
        return 0.0
    distance = stride(e, "pp") * (e.pp - 1)
    return collective_time_s("all_reduce", g * held.head / e.tp / data_degrees(e)[1], 2, distance, cluster)
