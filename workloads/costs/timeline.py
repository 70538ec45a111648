"""What the parts of a step take at calibrated rates, in seconds: compute, exposed communication, bubble, optimizer.

Rehearsals take the communication of it, and simulations the work of every action. Its sum knows no gaps between kernels
and no host, so that it is no prediction: plans take that of `workloads.predict`, and of this the ratio of two layouts.

Exposed communication is what nothing else runs beside. The parts are taken as follows.

compute     matmul FLOPs / (peak * matmul_efficiency); attention at its own share of that; norms, RoPE, SwiGLU,
            residuals and gradient accumulation at memory bandwidth. Kernels follow each other without gaps
tp          forward: all gathers and scatters are exposed. Backward: a row-parallel layer's gather is; a column-parallel
            layer gathers its input beside the input-gradient matmul and scatters beside the weight-gradient matmul
dp          gradients hide behind their backward and gathered weights behind their forward, except for the last unit
            reduced and the first unit gathered; see `workloads.costs.step_simulation`
pp          `pipeline_time_s` of every chunk's actual times, messages included, and a bound on what the first and the
            last of a chunk's actions take longer (`step_bound_s`). A split backward's W has the weights' gradients of
            matmuls, their accumulation and their reduction, I all else: attention, norms, what is computed again
cp          a ring's messages hide behind attention; gathers and all-to-alls are exposed
ep          the rank with most tokens counts; exchanges are exposed but for shared experts beside the first of them,
            see `workloads.costs.expert_times`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workloads.cluster import ClusterSpec
from workloads.costs import fp8
from workloads.costs.activations import rank_tokens
from workloads.costs.collectives import Collective, collective_time_s
from workloads.costs.context_parallel import context_messages
from workloads.costs.expert_times import NO_EXPERTS, ExpertTimes
from workloads.costs.flops import attention_forward_flops, head_sizes
from workloads.costs.params import COMPUTE_BYTES, MASTER_BYTES, latent_up_params, matmul_of_layer
from workloads.costs.partition import experiment_chunks, experiment_stages, ranks_alike
from workloads.costs.pipeline import Simulation, Span, pipeline_time_s, simulate
from workloads.costs.rank_times import EndTimes, LayerTimes, RankTimes, Rates, chunk_times, rank_times
from workloads.costs.step_simulation import (
    StepWork,
    Timeline,
    once_s,
    simulate_step,
    steady,
    steady_pipeline_s,
    step_bound_s,
)
from workloads.experiment import Experiment
from workloads.mesh import stride
from workloads.model_spec import ModelSpec

__all__ = [
    "Simulation",
    "Span",
    "TimeEstimate",
    "Timeline",
    "estimate_idle",
    "estimate_step_s",
    "estimate_time",
    "pipeline_time_s",
    "simulate",
    "simulate_experiment",
    "step_work",
]

ATTENTION_RELATIVE_EFFICIENCY = 0.74
"""Rate of causal attention over the rate of matmuls: cuDNN forward and backward 510 TFLOP/s beside 690 for the matrix
products of a Llama-3.1-8B layer at 4096 tokens, measured on H200 with torch 2.11."""

ATTENTION_BACKWARD = 2.5
"""A flash attention backward has five matrix products (scores are computed again), its forward two
(FlashAttention-2, arXiv:2307.08691)."""


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


def estimate_time(experiment: Experiment, cluster: ClusterSpec) -> TimeEstimate | None:
    """Time of one step; None where the cluster's device has no known rate for the precision.

    Raises `InfeasibleLayout` when the layout leaves the only node of a cluster without a link between nodes. Expects an
    experiment that breaks no rule of `workloads.rules`.
    """
    found = _ranks(experiment, cluster)
    if found is None:
        return None
    alike, ranks = found
    m, work = experiment.num_microbatches, _work(experiment, cluster, *found)
    times = {kind: [steady(work, chunk.work()) for chunk in ranks[kind].chunks] for kind in ranks}
    step = step_bound_s(work, steady_pipeline_s(work, [times[kind] for kind in alike]))
    split = experiment.pp_schedule == "interleaved_zero_bubble"
    busy = {kind: m * sum(f + (i + w if split else b) for f, b, i, w in times[kind]) for kind in ranks}
    busiest = max(ranks, key=busy.__getitem__)
    compute = m * sum(chunk.forward_s + chunk.backward_s for chunk in ranks[busiest].chunks)
    once = sum(once_s(work, chunk.work()) for chunk in ranks[busiest].chunks) + work.tied_s
    optimizer = max(rank.optimizer_s for rank in ranks.values())
    return TimeEstimate(
        step_time_s=step,
        compute_s=compute,
        communication_s=busy[busiest] - compute + once,
        bubble_s=max(0.0, step - busy[busiest] - once - optimizer),
        optimizer_s=optimizer,
    )


def estimate_step_s(experiment: Experiment, cluster: ClusterSpec) -> float | None:
    """``step_time_s`` of `estimate_time` alone, for many layouts; None, and errors, as there."""
    if (found := _ranks(experiment, cluster)) is None:
        return None
    work = _work(experiment, cluster, *found)
    times = {kind: [steady(work, chunk.work()) for chunk in rank.chunks] for kind, rank in found[1].items()}
    return step_bound_s(work, steady_pipeline_s(work, [times[kind] for kind in found[0]]))


def simulate_experiment(experiment: Experiment, cluster: ClusterSpec) -> Timeline | None:
    """One step of an experiment, event by event; None, and errors, as of `estimate_time`.

    It takes a second for some hundred thousand actions, so `estimate_time`, which is called for many layouts, takes a
    bound instead.
    """
    found = _ranks(experiment, cluster)
    return simulate_step(_work(experiment, cluster, *found)) if found is not None else None


def estimate_idle(experiment: Experiment, cluster: ClusterSpec) -> tuple[float, ...] | None:
    """The share of a step in which each pipeline rank waits for another; None, and errors, as of `estimate_time`.

    Their mean is what ``pipeline_idle_s`` over ``step_time_s`` is of a measured run.
    """
    found = simulate_experiment(experiment, cluster)
    return tuple(idle / found.step_s for idle in found.idle_s) if found is not None else None


def step_work(
    experiment: Experiment, cluster: ClusterSpec, measured: Sequence[tuple[float, float, float]] | None = None
) -> StepWork | None:
    """What a step consists of, for `simulate_step`; None, and errors, as of `estimate_time`.

    ``measured``: by pipeline rank the seconds of one micro-batch's forward and backward through all its chunks, and of
    its optimizer; they stand in the place of the closed form's, chunks alike. Communication stays the closed form's.
    """
    found = _ranks(experiment, cluster)
    if found is None:
        return None
    alike, ranks = found
    work = _work(experiment, cluster, alike, ranks)
    if measured is None:
        return work
    chunks = []
    for kind, (forward, backward, _) in zip(alike, measured, strict=True):
        share = 1 / len(ranks[kind].chunks)
        own = []
        for chunk in ranks[kind].chunks:
            weight = 0.5 * share * backward
            own.append(chunk._replace(forward_s=share * forward, backward_s=2 * weight, weight_s=weight).work())
        chunks.append(tuple(own))
    return dataclasses.replace(work, chunks=tuple(chunks), optimizer_s=tuple(after for _, _, after in measured))


def _ranks(e: Experiment, cluster: ClusterSpec) -> tuple[tuple[int, ...], dict[int, RankTimes]] | None:
    """For each pipeline rank what it holds (`ranks_alike`), and the times of each."""
    rates = _rates(e, cluster)
    if rates is None:
        return None
    dense = _layer(e, cluster, rates, routed=False)
    moe = _layer(e, cluster, rates, routed=True) if e.model.moe is not None else dense
    ends = EndTimes.of(e, cluster, rates)
    alike, whole, chunks = ranks_alike(e), experiment_stages(e), experiment_chunks(e)
    ranks = {}
    for kind in dict.fromkeys(alike):
        costs = tuple(chunk_times(e, cluster, rates, held, dense, moe, ends) for held in chunks[kind])
        ranks[kind] = rank_times(e, cluster, rates, whole[kind], costs)
    return alike, ranks


def _work(e: Experiment, cluster: ClusterSpec, alike: tuple[int, ...], ranks: dict[int, RankTimes]) -> StepWork:
    works = {kind: tuple(chunk.work() for chunk in rank.chunks) for kind, rank in ranks.items()}
    latency, message = _p2p_s(e, cluster)
    return StepWork(
        schedule=e.pp_schedule,
        num_microbatches=e.num_microbatches,
        chunks=tuple(works[kind] for kind in alike),
        zero_stage=e.zero_stage,
        latency_s=latency,
        message_s=message,
        tied_s=max(rank.tied_s for rank in ranks.values()),
        optimizer_s=tuple(ranks[kind].optimizer_s for kind in alike),
    )


def _rates(e: Experiment, cluster: ClusterSpec) -> Rates | None:
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


def _layer(e: Experiment, cluster: ClusterSpec, rates: Rates, *, routed: bool) -> LayerTimes:
    """Compute and exposed communication of one layer.

    Matmuls: 2 FLOPs a parameter and token forward, 4 backward. Attention: causal half of ``4 N H T seq``. Forward
    bytes: two norms (read, write), two residual sums (2 reads, 1 write), RoPE and norms of queries and keys (each read,
    write), SwiGLU (2 reads, 1 write); twice that backward. In fp8 also casts (`workloads.costs.fp8`).
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
        if not e.sequence_parallel:  # every rank projects all tokens down
            down = model.hidden_size * (model.mla.q_lora_rank + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
            matmul += 2.0 * tokens * down * (e.tp - 1) / e.tp / rates.matmul
    passes = 6 * stream * model.hidden_size + sum(of.values())
    memory = c * passes / rates.memory + experts.swiglu_s + experts.moved_s
    products = fp8.product_times(e, rates.matmul / rates.head)
    casts = fp8.cast_traffic(e, tokens, weights // e.tp, *_product_columns(e, columns))
    forward = matmul * products[0] + experts.forward_s + attention + memory + casts[0] / rates.memory
    backward = matmul * (products[1] + products[2]) + ATTENTION_BACKWARD * attention + 2 * memory
    backward += experts.inputs_s + experts.weights_s + casts[1] / rates.memory

    tp = _tp_exposed(e, cluster, c, matmul + experts.forward_s, columns)
    again, again_exposed = 0.0, 0.0
    if e.recompute == "full":
        again, again_exposed = forward, tp.forward_s + experts.there_s
        if not routed:  # backward needs nothing of the last matmul's output, nor of the sum after it
            again -= 2.0 * tokens * columns * model.hidden_size / e.tp / rates.matmul
            again_exposed -= tp.last_sum_s
    elif e.compile == "block" and e.recompute == "selective":
        again = memory
        if e.sequence_parallel and e.tp > 1:
            again_exposed = tp.gathers_s  # scatters' outputs were kept
    else:
        if model.mla is not None:
            of["rope"] /= 2  # keys alone
        again = c * sum(of.get(name, 0.0) for name in e.recomputed_operations) / rates.memory
        if "experts" in e.recomputed_operations:  # two of three products; nothing is sent again
            again += 2.0 / 3.0 * experts.forward_s + experts.swiglu_s
        elif "swiglu" in e.recomputed_operations:
            again += experts.swiglu_s
        if "mla_up" in e.recomputed_operations:
            again += 2.0 * tokens * latent_up_params(model) / e.tp / rates.matmul
            again_exposed = tp.latents_s

    others = experts.there_s + experts.back_s
    cp_forward, cp_backward = (_cp_exposed_s(e, cluster, attention, backward=turn) for turn in (False, True))
    if e.recompute == "full":
        again_exposed += cp_forward
    exposed = tp.forward_s + others + cp_forward, tp.backward_s + others + cp_backward
    weight_s = matmul * products[2] + experts.weights_s
    return LayerTimes(forward, backward, weight_s, *exposed, again, again_exposed)


def _product_columns(e: Experiment, columns: int) -> tuple[int, int]:
    """(inputs, outputs) of a layer's matrix products on one rank in columns, routed experts apart; ``columns``: of its
    feed-forward part."""
    model, mla = e.model, e.model.mla
    h, (qk, v) = model.hidden_size, head_sizes(model)
    inputs, outputs = h, h  # into attention, and out of it
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
    """Exposed context-parallel communication of one layer. ``attention_s``: of its forward."""
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
        # Collectives are told the whole buffer, this rank's own part included.
        whole = message.bytes_each if op == "p2p" else message.bytes_each * e.cp / (e.cp - 1)
        total += message.calls * collective_time_s(op, whole, e.cp, stride(e, "cp"), cluster)
    if e.cp_kind != "ring":
        return total
    return max(0.0, total - (ATTENTION_BACKWARD if backward else 1.0) * attention_s)


def _feed_forward_columns(model: ModelSpec, routed: bool) -> int:
    """What tensor parallelism splits; routed experts are not in here."""
    if not routed or model.moe is None:
        return model.ffn_hidden_size
    return model.moe.num_shared_experts * model.moe.expert_hidden_size


class _TensorParallel(NamedTuple):
    """Exposed tensor-parallel communication of one layer, in seconds."""

    forward_s: float
    backward_s: float
    gathers_s: float
    """Of the forward, with sequence parallelism."""
    latents_s: float
    """Of these: latents, which ``mla_up`` gathers again."""
    last_sum_s: float
    """Of the forward, behind its last product."""


def _tp_exposed(e: Experiment, cluster: ClusterSpec, c: int, matmul_s: float, columns: int) -> _TensorParallel:
    """Column-parallel layers (qkv, gate_up) hold this share of the layer's matmul time, which is also the time of each
    of their two backward matmuls. With latent attention their inputs are the latents in the place of the hidden states;
    the shared key goes beside nothing.
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
    beside = matmul_s * share / len(inputs)
    if not e.sequence_parallel:
        reduce = time_of("all_reduce", h)
        backward = sum(max(0.0, time_of("all_reduce", width) - beside) for width in inputs)
        if shared:
            backward += time_of("all_reduce", shared)
        return _TensorParallel(2 * reduce, backward, 0.0, 0.0, reduce)
    gather, scatter = (time_of(op, h) for op in ("all_gather", "reduce_scatter"))
    of_latents = sum(time_of("all_gather", width) for width in latents)
    gathers = (len(inputs) - len(latents)) * gather + of_latents
    backward = 2 * gather  # behind row-parallel layers
    for width in inputs:
        backward += max(0.0, time_of("all_gather", width) - beside)
        backward += max(0.0, time_of("reduce_scatter", width) - beside)
    if shared:
        gathers += time_of("all_gather", shared)
        backward += time_of("reduce_scatter", shared)
    return _TensorParallel(gathers + 2 * scatter, backward, gathers, of_latents, scatter)


def _p2p_s(e: Experiment, cluster: ClusterSpec) -> tuple[float, float]:
    """One stage's output to the next, ``c T_s h`` bytes: start-up, and bytes over bandwidth."""
    if e.pp == 1:
        return 0.0, 0.0
    message = COMPUTE_BYTES[e.precision] * rank_tokens(e)[1] * e.model.hidden_size
    latency, whole = (collective_time_s("p2p", size, e.pp, stride(e, "pp"), cluster) for size in (0.0, message))
    return latency, whole - latency
