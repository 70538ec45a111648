"""Step time of many rows at one time, in closed form, with parameters that a fit may adjust.

For one micro-batch, T tokens a rank, P matrix parameters, s sequence length, h hidden size, t the tensor-parallel
degree, m micro-batches, p stages of v chunks. FLOPs are counted as in PaLM (arXiv:2204.02311, appendix B), the pipeline
as in Megatron-LM (arXiv:2104.04473, section 2.2):

matmul      2 T P / t FLOPs forward and twice that backward, at a share of peak that falls for short and narrow
            products: time times (1 + tokens/T) (1 + width t/h); full recomputation repeats the forward, in some code
            bases without the down projection
rest        a power-limited device that waits for other stages clocks higher while it works: the time of products and
            attention is multiplied by (work / (work + wait)) to a power
attention   4 T s Q / t FLOPs with Q columns of the queries, half of them under a causal mask; 3.5 times that forward
            and backward (FlashAttention-2, arXiv:2307.08691); slower for heads smaller than 128
memory      passes of norms, residuals, RoPE and SwiGLU over memory bandwidth; the loss over its logits in fp32
host        a layer never takes less time than the host needs to launch it, plus a part once a step; casts to fp8,
            routed experts and latent attention add a share of kernels; tensor parallelism, ZeRO 3, recomputation and
            each turn of a ring of keys and values add seconds; full recomputation repeats a forward's part of them; the
            sum is multiplied by the host's pace, which follows from the launch time of one operation; of passes that
            are a CUDA graph there is none
tp          two gathers and two scatters forward, as many backward, of T h values each, and the inputs gathered again
pp          the slowest stage paces the steady state: sum of all stages + (m - 1) slowest; no fill if the pace is that
            of a host that runs ahead of messages; the fill is divided by v chunks if m is p or more, with fewer
            micro-batches by less, in proportion to (m - 1) / (p - 1); stages at the ends have fewer messages
dp          gradients are reduced during the last backward; the excess over it, and a share of the rest, is exposed;
            shards of two devices have the rate of such pairs
optimizer   its bytes over memory bandwidth, and a fixed time a step; of the other stages' bytes those of copies before
            the first forward and in the last backward, which come one after another

Ranks are ordered tensor-parallel first, then context, data and pipeline. The group of an axis therefore has as many
members on a node as its stride allows; simultaneous groups share the node's links.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from workloads.predict.cells import deterministic
from workloads.predict.facts import Facts
from workloads.predict.network_terms import bandwidth, hop_s, slowest_rate
from workloads.predict.points import Floats, Points
from workloads.predict.profiles import BUCKET_OF_RANK

SHARPNESS = 6.0
"""Exponent of the smooth maximum of device and host: at equal times a layer takes 12 % more than either."""
LEAST_OF_LAYERS = 0.2
"""Minimum share of the layers' time that remains if factors for their work scale the whole step."""
LAST_BACKWARD = 2 / 3
"""Share of a micro-batch's time on the other stages that follows the last work launched by a host which runs ahead.
With full recomputation 3/4 would be nearer."""
LAST_INPUTS = 1 / 3
"""`LAST_BACKWARD` for schedules that compute input gradients before weight gradients."""


WIDE_EAGER, WIDE_COMPILED = 46.0, 16.0
"""Bytes a token and hidden unit, forward, by which the small operations of a layer with fp32 residuals move more: two
norms and two additions with operands twice as large (16), and in eager mode a cast of the input of five products (read
in fp32, written in 16 bits: 30)."""


class TimeTerms(NamedTuple):
    """Seconds of a step. The first three add up to the step."""

    pipeline: Floats
    """Time of all micro-batches through all stages."""
    seen: Floats
    """Exposed gradient and weight traffic."""
    after: Floats
    """Optimizer and fixed time per step."""
    busy: Floats
    """Part of ``pipeline`` in which the busiest stage works."""
    issued: Floats
    """Host time of the busiest stage's micro-batches, plus device time of the gradients sent back afterwards: a lower
    bound for every schedule."""
    fixed: Floats
    """Part of ``after`` that no layout changes."""


def step_time(points: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Seconds of one step. ``p``: values of `workloads.predict.parameters.TIME`."""
    parts = step_parts(points, facts, p)
    step: Floats = parts.pipeline + parts.seen + parts.after
    return step


def step_parts(points: Points, facts: Facts, p: Mapping[str, float]) -> TimeTerms:
    """Components of `step_time`. ``p``: values of `workloads.predict.parameters.TIME`."""
    x, stages = points, facts.stages
    tokens, tp = x.tokens, x.tp
    memory = x.memory_bandwidth * p["memory"]
    launched = _launched(x)
    device, products, host = _layer(x, facts, p)
    slow = p["slow_host"] * facts.slow_host * np.log2(np.clip(tp, 1.0, x.node)) ** p["slow_growth"]
    slow = slow * np.maximum(1.0, tp / x.node) ** p["slow_between"]
    host = (host**SHARPNESS + slow**SHARPNESS) ** (1 / SHARPNESS)

    head_flops = 3 * 2 * tokens * x.vocabulary_params / tp
    head = head_flops / (x.clock * x.peak * p["matmul"]) * (1 + p["tokens"] / tokens)
    loss = np.where(x.deterministic > 0, deterministic.LOSS, p["loss"]) * tokens * x.vocab / tp / memory
    if "compiled_loss" in p:
        loss = loss * np.where(facts.compiled > 0, p["compiled_loss"], 1.0)
    # Factors that scale the whole step afterwards are for its layers only, so the head is divided by them here. In a
    # pipeline the head is not, since stages were divided according to its actual work.
    scaled = np.where(x.pp == 1, x.scaled, 1.0)
    of_layers = np.maximum(LEAST_OF_LAYERS, 1 + (1 - 1 / scaled) * (head + loss) / (x.layers * device))
    device, products, head, loss = device * of_layers, products * of_layers, head / scaled, loss / scaled

    sizes = stages.layers * (x.layer_params / tp)[:, None]
    sizes = (
        sizes + (stages.first + stages.head * (1 - x.tied * (x.pp == 1))[:, None]) * (x.vocabulary_params / tp)[:, None]
    )
    summed = facts.added * (2 + 2 * facts.gradient_bytes) / x.memory_bandwidth
    accumulated = p["accumulate"] * summed[:, None] * sizes
    if "cast" in p:
        accumulated = accumulated + (p["cast"] * facts.autocasts / x.memory_bandwidth)[:, None] * sizes
    # Half of a message's seconds pass at its sender and half at its receiver: four halves a chunk and micro-batch, two
    # less at either end of the pipeline. While it fills, a receiver has nothing else to do, and one half counts.
    messages = (2 * x.vpp[:, None] - stages.first - stages.head) * _message(x, facts, p)[:, None]
    looked_up = (x.deterministic > 0) * deterministic.LOOKUP_S * tokens * (1 - 1 / tp)
    per_stage = accumulated + (launched * p["micro_fixed"] / x.scaled)[:, None] + messages
    per_stage = per_stage + looked_up[:, None] * stages.first
    m = x.micro_batches
    chunked = fill_share(x.vpp, m, x.pp)

    def of_stages(layer: Floats, head: Floats) -> tuple[Floats, Floats]:
        """(slowest, fill) of one micro-batch: seconds of the slowest stage, and of the others."""
        seconds = stages.layers * layer[:, None] + stages.head * (head + loss)[:, None] + per_stage
        seconds = seconds * (stages.number > 0)
        slowest: Floats = seconds.max(axis=1)
        through = (seconds - messages / 2) * (stages.number > 0)
        pacing = np.take_along_axis(through, seconds.argmax(axis=1)[:, None], axis=1)[:, 0]
        return slowest, ((through * stages.number).sum(axis=1) - pacing) * chunked

    slowest, fill = of_stages(device, head)
    faster = (m * slowest / (m * slowest + fill)) ** p["rest"]
    device = device - products * (1 - faster)
    slowest, fill = of_stages(device, head * faster)
    on_devices = m * slowest + fill
    slowest, whole_fill = of_stages((device**SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS), head * faster)
    busy = m * slowest
    ahead = np.maximum(on_devices, busy + LAST_BACKWARD * fill)
    pipeline = np.where(facts.runs_ahead > 0, ahead, busy + whole_fill)
    issued = m * of_stages(host, head * faster)[0] + LAST_INPUTS * fill

    largest = sizes.max(axis=1)
    seen = _data_parallel(x, facts, p, largest, slowest)
    shards = np.where(x.zero >= 1, x.dp * x.cp, 1.0)
    others = facts.once_bytes * ((sizes * stages.number).sum(axis=1) - largest)
    optimizer = p["optimizer"] * (facts.optimizer_bytes * largest + others) / shards / x.memory_bandwidth
    fixed = launched * p["step_fixed"]
    return TimeTerms(pipeline, seen, optimizer + fixed, busy, issued, fixed)


def host_bound(points: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Degree to which a layer is host-bound, from 0 to 1."""
    device, _, host = _layer(points, facts, p)
    share: Floats = host**SHARPNESS / (device**SHARPNESS + host**SHARPNESS)
    return share


def _scaled(x: Points, p: Mapping[str, float]) -> Floats:
    """Factor on the rate of products below 16 bits for what their scales cost."""
    scaled: Floats = np.where(x.fp8 > 2, p["block_formats"], np.where(x.fp8 > 1, p["fp8_scales"], 1.0))
    return scaled


def low_rate(x: Points, p: Mapping[str, float]) -> Floats:
    """Rate of products below 16 bits with their casts, over that of the products alone; 1 for rows in 16 bits."""
    with_casts: Floats = np.where(x.fp8 > 0, p["fp8"] * _scaled(x, p), 1.0)
    return with_casts


def product_rate(x: Points, p: Mapping[str, float]) -> Floats:
    """FLOP/s of large products in the row's precision, with their casts."""
    low = x.peak_matmul / x.peak * low_rate(x, p)
    rate: Floats = x.clock * x.peak * np.where(x.fp8 > 0, low, np.where(x.fp16 > 0, p["fp16"], 1.0)) * p["matmul"]
    return rate


def fill_share(chunks: Floats, micro_batches: Floats, stages: Floats) -> Floats:
    """Share of a pipeline's fill that remains with so many chunks of a stage."""
    share: Floats = 1 - (1 - 1 / chunks) * np.minimum(1.0, (micro_batches - 1) / np.maximum(stages - 1, 1))
    return share


def _layer(x: Points, facts: Facts, p: Mapping[str, float]) -> tuple[Floats, Floats, Floats]:
    """Seconds of a layer and micro-batch, forward and backward: (device including exposed communication, its matrix
    products and attention alone, host)."""
    tokens, tp, h = x.tokens, x.tp, x.hidden
    kind = x.recompute
    memory = x.memory_bandwidth * p["memory"]
    whole = np.where(kind == 2, x.recomputed, 0.0)
    passes = 3.0 + whole
    spared = whole * facts.stops_early * x.hidden * x.ffn

    slower = (1 + p["tokens"] / tokens) * (1 + p["width"] * tp / h)
    peak = x.clock * x.peak
    rate = product_rate(x, p)
    matmul = 2 * tokens * (passes * x.layer_params - spared) / tp / rate * slower
    head_dim = x.queries / x.heads
    attention_rate = x.kernel * peak * p["attention"] * np.minimum(1.0, head_dim / 128) ** p["head_size"]
    attention_rate = attention_rate / np.where(np.log2(head_dim) % 1 == 0, 1.0, p["odd_head"])
    turns = 3.5 + whole
    attention_rate = attention_rate / (1 + p["short"] / x.seq)
    flops = 4 * tokens * x.seq * x.queries / tp
    attention = np.where(facts.unfused > 0, passes * flops / rate, 0.5 * turns * flops / attention_rate)

    shared = np.where(facts.sequence_parallel > 0, tp, 1.0)
    values = (
        10 * tokens * h / shared
        + (4 * (1 + x.kv_heads / x.heads) * x.queries + (2 * x.matrices - 3) * x.ffn) * tokens / tp
    )
    moved = 3 * 2 * values * (1 + np.where(kind == 1, 0.5 * x.recomputed, whole) / 3)
    if "passes" in p:
        moved = moved * np.where(facts.compiled > 0, p["compiled_passes"], p["passes"])
        # A residual stream in fp32 is twice as large, and eager layers cast the input of every product by itself.
        wide = np.where(facts.compiled > 0, WIDE_COMPILED, WIDE_EAGER) * facts.autocasts * tokens * h / shared
        moved = moved + 3 * wide * (1 + whole / 3)
    # Scores, probabilities and dropout of unfused attention: five passes forward, ten backward.
    moved = moved + facts.unfused * 15 * 2 * x.mbs * x.heads / tp * x.seq**2 / x.cp
    moved = moved + (x.deterministic > 1) * deterministic.STORED * x.mbs * x.heads / tp * x.seq**2 / x.cp
    device = (
        matmul
        + attention
        + moved / memory
        + p["gap"] * (1 - x.captured)
        + _tensor_parallel(x, facts, p)
        + _context_parallel(x, p)
    )
    fp8 = (x.fp8 > 0).astype(float)
    more = p["host_fp8"] * fp8 + p["host_experts"] * x.routed + p["host_latents"] * x.latents
    more = more + p["host_fp8_experts"] * fp8 * (x.routed > 0)
    exchanges = np.where(x.ring > 0, x.cp - 1, x.cp > 1)
    # Full recomputation repeats a forward with its casts, its messages of tensor parallelism and its turns of a ring.
    repeated = (kind == 2) * x.again
    kernels = (
        p["host"] * (1 + more) + p["host_selective"] * (kind == 1) * x.again + p["host_full"] * repeated * (1 + more)
    )
    around = (
        p["host_tp"] * (tp > 1) * (1 + (4.0 - facts.stops_early) / 10 * repeated)
        + p["host_zero3"] * ((x.zero == 3) & (x.dp > 1))
        + p["host_cp"] * exchanges * (1 + repeated / 3)
        + p["host_waits"] * x.waits
        + p["host_step"] / x.micro_batches
    )
    if "compiled_host" in p:
        # A compiler fuses the kernels of a layer; collectives and what follows them are launched as before.
        kernels = kernels * np.where(facts.compiled > 0, p["compiled_host"], 1.0)
        scaling = p["fp8_sharded"] * ((x.fp8 > 0) & (x.zero > 0))
        around = around + scaling
        device = device + scaling
    pace = x.pace * x.launch ** p["host_launch"] * (1 - facts.captured)
    return device, matmul + attention, pace * (kernels + around) / x.scaled


def _launched(x: Points) -> Floats:
    """0 in whole steps that are a graph, whose kernels follow one another without waiting; else 1. Recorded steps in
    fp8 show no such gain (docs/lab/measurements_0.3.0.md); why is not measured."""
    return np.where(x.fp8 > 0, 1.0, 1 - x.captured)


def _tensor_parallel(x: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Exposed seconds per layer and micro-batch, forward and backward."""
    repeated = np.where(x.recompute == 2, (4.0 - facts.stops_early) * x.recomputed, 0.0)
    collectives = np.where(facts.sequence_parallel > 0, 10.0, 8.0) + repeated
    rate = bandwidth(x, x.tp, np.ones_like(x.tp), p)
    start = p["tp_start"] * (x.tp - 1) + p["tp_between"] * np.maximum(0.0, x.tp / x.node - 1)
    # Two devices have fewer channels between them than eight, and their messages are short.
    pair = (x.tp == 2) & (x.node >= 2)
    rate = np.where(pair, np.fmin(rate, x.pair), rate)
    start = np.where(pair, np.fmax(start, x.hop_pair), start)
    each = 2 * x.tokens * x.hidden * (x.tp - 1) / x.tp / rate
    return np.where(x.tp > 1, collectives * (each + start) * p["tp_exposed"], 0.0)


def _context_parallel(x: Points, p: Mapping[str, float]) -> Floats:
    keys = 2 * 2 * x.tokens * x.queries * x.kv_heads / x.heads / x.tp
    each = keys * (x.cp - 1) / bandwidth(x, x.cp, x.tp, p)
    return np.where(x.cp > 1, 3 * p["context"] * (each + p["tp_start"] * (x.cp - 1)), 0.0)


def _message(x: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Seconds of one message between two stages; zero without a pipeline."""
    stride = x.gpus / x.pp
    inside = x.pp * stride <= x.node
    link = slowest_rate(x, x.pp * stride) * p["p2p"]
    size = 2 * x.tokens * x.hidden / np.where(facts.sequence_parallel > 0, x.tp, 1.0)
    start = np.where((facts.slow_messages > 0) & ~inside, p["slow_message"], p["message"])
    return np.where(x.pp > 1, start + (1 - facts.overlaps_messages) * size / link, 0.0)


def _data_parallel(x: Points, facts: Facts, p: Mapping[str, float], largest: Floats, slowest: Floats) -> Floats:
    """Exposed seconds per step of reducing gradients and gathering weights."""
    ranks = x.dp * x.cp
    sharded = x.zero >= 1
    rate = bandwidth(x, ranks, x.tp, p)
    rate = np.where(sharded & (ranks == 2) & (2 * x.tp <= x.node), np.fmin(rate, x.pair), rate)
    share = (ranks - 1) / ranks
    reduce = share * facts.gradient_bytes * largest / rate * np.where(sharded, p["sharded"], 2.0)
    gather = np.where(sharded, share * 2 * largest / rate * p["sharded"], 0.0)
    m = x.micro_batches
    often = np.where(x.zero == 3, facts.gathers, x.zero >= 2) > 0
    reduce = reduce * np.where(often, m, 1.0)
    ring = _ring_start(x, facts, p) * _reductions(x, facts, largest)
    doublings = np.log2(np.maximum(ranks, 1.0))
    reduce = reduce + np.where(sharded, ring, p["dp_start"] * doublings * _reductions(x, facts, largest))
    gather = gather + np.where(sharded, ring, 0.0)
    hidable = p["hidable"] * slowest * 2 / 3 * np.where(often, m, 1.0)
    # ZeRO 3 gathers in both directions of every micro-batch, overlapping with the previous layers.
    ahead = gather * 2 * m * facts.gathers
    over = np.maximum(0.0, reduce + ahead - hidable * np.where(facts.gathers > 0, 1.5, 1.0))
    hidden = reduce + ahead - over
    once = np.where(facts.gathers > 0, 0.0, gather * p["gather_exposed"])
    return np.where(ranks > 1, over + once + hidden * (p["dp_exposed"] + p["slow_down"]), 0.0)


def _reductions(x: Points, facts: Facts, largest: Floats) -> Floats:
    """Number of collectives in which a stage reduces its gradients. ``largest``: its parameters."""
    layers = x.layers / x.pp
    bucket = np.maximum(facts.bucket, BUCKET_OF_RANK * x.dp * x.cp)
    return np.where(facts.bucket > 0, np.clip(largest / bucket, 1.0, layers), layers)


def _ring_start(x: Points, facts: Facts, p: Mapping[str, float]) -> Floats:
    """Seconds to start a ring over the data-parallel ranks: ``ring_start`` for each hop as far as rows reach
    (`Profile.fitted_ring`), and for each further one its link's latency (`workloads.costs.traffic.collectives`)."""
    ranks = x.dp * x.cp
    known = facts.fitted_ring
    further = hop_s(x, ranks, x.tp) * np.maximum(0.0, ranks - known)
    started: Floats = p["ring_start"] * np.minimum(ranks, known) + further
    return started
