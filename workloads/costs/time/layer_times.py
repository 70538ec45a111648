"""Seconds of one micro-batch in one layer on one rank: compute and exposed communication.

`workloads.costs.time.timeline` states the assumptions.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.activations import rank_tokens
from workloads.costs.shape import fp8
from workloads.costs.shape.flops import attention_forward_flops, head_sizes
from workloads.costs.shape.params import COMPUTE_BYTES, MASTER_BYTES, latent_up_params, matmul_of_layer
from workloads.costs.time.expert_times import NO_EXPERTS, ExpertTimes
from workloads.costs.time.rank_times import LayerTimes, Rates
from workloads.costs.traffic.collectives import Collective, collective_time_s, contention_of, together_s
from workloads.costs.traffic.context_parallel import context_messages
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import stride
from workloads.spec.model_spec import ModelSpec

ATTENTION_RELATIVE_EFFICIENCY = 0.74
"""Rate of causal attention over the rate of matmuls: cuDNN forward and backward reach 510 TFLOP/s, the matrix products
of a Llama-3.1-8B layer 690, at 4096 tokens on H200 with torch 2.11."""

ATTENTION_BACKWARD = 2.5
"""Backward over forward FLOPs of flash attention: five matrix products (scores are recomputed) instead of two
(FlashAttention-2, arXiv:2307.08691)."""


def rates_of(e: Experiment, cluster: ClusterSpec) -> Rates | None:
    device, share = cluster.device, cluster.matmul_efficiency
    peak = device.peak_of(e.precision)
    head = device.peak_of("bf16" if e.precision.startswith("fp8") else e.precision)
    if peak is None or head is None or share is None or device.memory_bandwidth is None:
        return None
    return Rates(
        matmul=peak * share,
        head=head * share,
        attention=head * share * ATTENTION_RELATIVE_EFFICIENCY,
        memory=device.memory_bandwidth,
    )


def layer_times(e: Experiment, cluster: ClusterSpec, rates: Rates, *, routed: bool) -> LayerTimes:
    """Compute and exposed communication of one layer, in seconds. ``rates``: FLOP/s and bytes per second.

    Matmuls: 2 FLOPs per parameter and token forward, 4 backward; attention: half (causal) of ``4 N H T seq`` (PaLM,
    arXiv:2204.02311, appendix B, counts the whole). Forward memory passes: two norms (read, write), two residual sums
    (2 reads, 1 write), RoPE and norms of queries and keys (read, write each), SwiGLU (2 reads, 1 write); twice that
    backward. In fp8 also casts (`workloads.costs.shape.fp8`).
    """
    model, c = e.model, COMPUTE_BYTES[e.precision]
    tokens, stream = rank_tokens(e)
    experts = ExpertTimes.of(e, cluster, rates) if routed else NO_EXPERTS
    weights = matmul_of_layer(model, routed=routed)
    if routed and model.moe is not None:
        weights -= model.moe.experts_per_token * 3 * model.hidden_size * model.moe.expert_hidden_size
    matmul = 2.0 * tokens * weights / e.tp / rates.matmul
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
    if model.mla is not None:
        of["norm"] += 2.0 * stream * (model.mla.q_lora_rank + model.mla.kv_lora_rank)
        if not e.sequence_parallel:  # every rank computes the down-projections of all tokens
            down = model.hidden_size * (model.mla.q_lora_rank + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
            matmul += 2.0 * tokens * down * (e.tp - 1) / e.tp / rates.matmul
    passes = 6 * stream * model.hidden_size + sum(of.values())
    memory = c * passes / rates.memory + experts.swiglu_s + experts.permute_s
    products = fp8.product_times(e, rates.matmul / rates.head)
    casts = fp8.cast_traffic(e, tokens, weights // e.tp, *_product_columns(e, columns))
    forward = matmul * products[0] + experts.forward_s + attention + memory + casts[0] / rates.memory
    backward = matmul * (products[1] + products[2]) + ATTENTION_BACKWARD * attention + 2 * memory
    backward += experts.inputs_s + experts.weights_s + casts[1] / rates.memory

    tp = _tp_exposed(e, cluster, c, matmul + experts.forward_s, columns)
    recompute_s, recompute_exposed_s = 0.0, 0.0
    if e.recompute == "full":
        recompute_s, recompute_exposed_s = forward, tp.forward_s + experts.dispatch_s
        if not routed:  # backward needs neither the last matmul's output nor the sum after it
            recompute_s -= 2.0 * tokens * columns * model.hidden_size / e.tp / rates.matmul
            recompute_exposed_s -= tp.last_sum_s
    elif e.recompute == "selective" and e.compiles(routed=routed, recomputed=True):
        recompute_s = memory
        if e.sequence_parallel and e.tp > 1:
            recompute_exposed_s = tp.gathers_s  # the outputs of reduce-scatters were saved
    else:
        if model.mla is not None:
            of["rope"] /= 2  # only keys are recomputed
        recompute_s = c * sum(of.get(name, 0.0) for name in e.recomputed_operations) / rates.memory
        if "experts" in e.recomputed_operations:  # two of three products; no rows are exchanged for it
            recompute_s += 2.0 / 3.0 * experts.forward_s + experts.swiglu_s
        elif "swiglu" in e.recomputed_operations:
            recompute_s += experts.swiglu_s
        if "mla_up" in e.recomputed_operations:
            recompute_s += 2.0 * tokens * latent_up_params(model) / e.tp / rates.matmul
            recompute_exposed_s = tp.latents_s

    others = experts.dispatch_s + experts.combine_s
    cp_forward, cp_backward = (_cp_exposed_s(e, cluster, attention, backward=turn) for turn in (False, True))
    if e.recompute == "full":
        recompute_exposed_s += cp_forward
    exposed = tp.forward_s + others + cp_forward, tp.backward_s + others + cp_backward
    weight_s = matmul * products[2] + experts.weights_s
    return LayerTimes(forward, backward, weight_s, *exposed, recompute_s, recompute_exposed_s)


def _product_columns(e: Experiment, columns: int) -> tuple[int, int]:
    """(inputs, outputs): columns of a layer's matrix products on one rank, without routed experts. ``columns``: those
    of its feed-forward part."""
    model, mla = e.model, e.model.mla
    h, (qk, v) = model.hidden_size, head_sizes(model)
    inputs, outputs = h, h  # the input of attention, and its output
    if mla is None:
        of_heads = model.num_heads + 2 * model.num_kv_heads
        inputs, outputs = inputs + model.num_heads * v // e.tp, outputs + of_heads * qk // e.tp
    else:
        inputs += (mla.q_lora_rank or h) + mla.kv_lora_rank + model.num_heads * v // e.tp
        outputs += mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        outputs += model.num_heads * (qk + mla.qk_nope_head_dim + v) // e.tp
    if columns:
        inputs, outputs = inputs + h + columns // e.tp, outputs + h + 2 * columns // e.tp
    return inputs, outputs


def _cp_exposed_s(e: Experiment, cluster: ClusterSpec, attention_s: float, *, backward: bool) -> float:
    """Exposed context-parallel communication of one layer, in seconds. ``attention_s``: attention's forward."""
    if e.cp == 1:
        return 0.0
    qk, v = head_sizes(e.model)
    sent = context_messages(
        e.cp_kind,
        backward=backward,
        cp=e.cp,
        tokens=rank_tokens(e)[0],
        heads=e.model.num_heads // e.tp,
        kv_heads=e.model.num_kv_heads // e.tp,
        head_dim=qk,
        value_dim=v,
        compute_bytes=COMPUTE_BYTES[e.precision],
        sum_bytes=MASTER_BYTES[e.precision],
    )
    total = 0.0
    for message in sent:
        op: Collective = "p2p" if message.op == "send" else message.op
        # Collectives are given the whole buffer, including this rank's own part.
        whole = message.bytes_each if op == "p2p" else message.bytes_each * e.cp / (e.cp - 1)
        total += message.calls * collective_time_s(op, whole, e.cp, stride(e, "cp"), cluster)
    if e.cp_kind != "ring":
        return total
    return max(0.0, total - (ATTENTION_BACKWARD if backward else 1.0) * attention_s)


def _feed_forward_columns(model: ModelSpec, routed: bool) -> int:
    """Feed-forward columns that tensor parallelism splits, without routed experts."""
    if not routed or model.moe is None:
        return model.ffn_hidden_size
    return model.moe.num_shared_experts * model.moe.expert_hidden_size


class _TensorParallel(NamedTuple):
    """Exposed tensor-parallel communication of one layer, in seconds."""

    forward_s: float
    backward_s: float
    gathers_s: float
    """All-gathers of the forward, with sequence parallelism."""
    latents_s: float
    """Part of ``gathers_s`` for latents, which ``mla_up`` gathers again."""
    last_sum_s: float
    """Sum after the last product of the forward."""


def _tp_exposed(e: Experiment, cluster: ClusterSpec, c: int, matmul_s: float, columns: int) -> _TensorParallel:
    """Exposed tensor-parallel communication of one layer (sequence parallelism as in arXiv:2205.05198, section 4.2).

    ``share``: part of the layer's matmul time in column-parallel layers (qkv, gate_up); it is also the time of each of
    their two backward matmuls, which hide communication. With latent attention their inputs are the latents instead of
    the hidden states; nothing hides the communication of the shared key.
    """
    if e.tp == 1:
        return _TensorParallel(0.0, 0.0, 0.0, 0.0, 0.0)
    model, mla = e.model, e.model.mla

    def time_of(op: Collective, numbers: int) -> float:
        return collective_time_s(op, float(c * rank_tokens(e)[0] * numbers), e.tp, 1, cluster)

    h, shared = model.hidden_size, 0 if mla is None else mla.qk_rope_head_dim
    latents = [] if mla is None else [width for width in (mla.q_lora_rank, mla.kv_lora_rank) if width]
    if mla is None:
        attention_columns = float((model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    else:
        queries = 0 if mla.q_lora_rank else model.num_heads * mla.qk_head_dim
        attention_columns = latent_up_params(model) / h + queries
    inputs = [h, *latents] if mla is not None and mla.q_lora_rank else [h, h, *latents]
    into = attention_columns + 2 * columns
    share = into / (into + model.num_heads * head_sizes(model)[1] + columns)
    overlapping_s = matmul_s * share / len(inputs)
    beside = contention_of(e.tp, 1, cluster)

    def longer_s(op: Collective, numbers: int) -> float:
        """Seconds by which a collective delays the product that hides it."""
        return float(together_s(overlapping_s, time_of(op, numbers), contention=beside) - overlapping_s)

    if not e.sequence_parallel:
        reduce = time_of("all_reduce", h)
        backward = sum(longer_s("all_reduce", width) for width in inputs)
        if shared:
            backward += time_of("all_reduce", shared)
        return _TensorParallel(2 * reduce, backward, 0.0, 0.0, reduce)
    gather, scatter = (time_of(op, h) for op in ("all_gather", "reduce_scatter"))
    of_latents = sum(time_of("all_gather", width) for width in latents)
    gathers = (len(inputs) - len(latents)) * gather + of_latents
    backward = 2 * gather  # of row-parallel layers
    for width in inputs:
        backward += longer_s("all_gather", width) + longer_s("reduce_scatter", width)
    if shared:
        gathers += time_of("all_gather", shared)
        backward += time_of("reduce_scatter", shared)
    return _TensorParallel(gathers + 2 * scatter, backward, gathers, of_latents, scatter)
