"""Bytes of activations that one layer and the head save for backward, tensor by tensor, as the engine's ops save them.

Symbols: T tokens of a micro-batch on one rank; T_s = T / tp of them between tensor-parallel regions with sequence
parallelism (else T_s = T); c bytes per element of the compute dtype; h hidden size; N query and K key/value heads of
head size H; F feed-forward columns; seq sequence length. Latent attention: ranks C_q and C_kv of the latents; P, R and
V sizes per head of keys without position, of keys with position and of values.

The accounting follows Korthikanti et al. 2022 (arXiv:2205.05198, eq. 1-6), with this engine's operators in place of a
GPT layer's. Latent attention is that of DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter

from workloads.costs.memory.expert_activations import expert_tensors, expert_working
from workloads.costs.shape import fp8
from workloads.costs.shape.flops import head_sizes
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

STATISTICS_BYTES = 4
"""Bytes per element of norm statistics and softmax normalizers, which are fp32."""

LOSS_CHUNK_TOKENS = 4096
"""Number of tokens whose logits exist at one time in the engine's chunked cross-entropy."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Bytes of the tensors that one layer's forward creates, for one micro-batch on one rank."""

    input: int
    """Block input, saved by the first norm: ``c T_s h``."""
    attention_norm: int
    """Normed input and its statistics: ``c T_s h + 4 T_s``. Column-parallel layers save this rank's part, not the
    gathered one."""
    projected: int
    """Fused query, key and value projection, kept alive by the values: ``c T (N + 2K) H / tp``. With latent attention:
    keys without position, and values, ``c T N (P + V) / tp``."""
    latents: int
    """Inputs of the norms inside attention. Latent attention: both latents and the shared key,
    ``c T_s (C_q + C_kv + R)``. Ulysses with ``qk_norm``: the projection, which is otherwise freed once it is sent."""
    latent_norms: int
    """Latent attention: normed latents and their statistics, ``c T_s (C_q + C_kv)`` and ``4 T_s`` for each."""
    qk_statistics: int
    """Statistics of ``qk_norm``, one per query and key head: ``4 T (N + K) / tp``. Its input is ``projected``."""
    rotated: int
    """Queries and keys after RoPE, saved by attention: ``c T (N + K) H / tp``. With latent attention both have N heads
    of P + R numbers."""
    softmax: int
    """Log-sum-exp of every row, ``4 T N / tp``; with ``attention=math`` all probabilities, ``c T seq N / tp``."""
    attention_output: int
    """Input of the output projection: ``c T N H / tp``."""
    residual: int
    """Residual stream after attention, saved by the second norm: ``c T_s h``."""
    ffn_norm: int
    """Normed input of the feed-forward part and its statistics: ``c T_s h + 4 T_s``, as ``attention_norm``."""
    dispatched: int
    """Layers with experts only: router scores, received token copies and their weights
    (`workloads.costs.memory.expert_activations`).
    """
    gate_up: int
    """Both SwiGLU inputs: ``2 c T F / tp``. With experts: those of shared experts and of the received copies."""
    product: int
    """SwiGLU output, input of the down projection: ``c T F / tp``. In layers with experts: as ``gate_up``."""

    @property
    def total(self) -> int:
        return sum(_TENSORS(self))


_TENSORS: Callable[[LayerTensors], tuple[int, ...]] = attrgetter(*(field.name for field in fields(LayerTensors)))


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch on one rank."""

    saved: int
    """Bytes held from forward to backward by every micro-batch in flight."""
    working: int
    """Bytes needed in addition to ``saved`` while the layer's backward runs: recomputed tensors and gradients."""
    reducing_experts: int = 0
    """Layers with experts: bytes needed in addition to ``saved`` while expert gradients are reduced: recomputed tensors
    and gradients, minus the tensors that the experts' backward has freed."""


@lru_cache(maxsize=65536)
def layer_tensors(
    model: ModelSpec, routed: bool, tokens: int, stream_tokens: int, seq_len: int, tp: int, c: int, math: bool
) -> LayerTensors:
    """Bytes of each tensor that one layer's forward creates, by the formulas of `LayerTensors`.

    ``routed``: whether the layer has experts (tensors of its routed experts are not included); ``tokens``: T;
    ``stream_tokens``: T_s; ``seq_len``: number of keys that a query attends to; ``c``: bytes per element of the compute
    dtype; ``math``: whether attention saves its probabilities.
    """
    h, heads, kv = model.hidden_size, model.num_heads, model.num_kv_heads
    qk, v = head_sizes(model)
    mla = model.mla
    qk_heads = heads + kv if model.qk_norm else 0
    latents = latent_norms = 0
    if mla is None:
        projected, rotated = (heads + 2 * kv) * qk // tp, (heads + kv) * qk // tp
    else:
        projected, rotated = heads * (mla.qk_nope_head_dim + v) // tp, 2 * heads * qk // tp
        normed = c * stream_tokens * (mla.q_lora_rank + mla.kv_lora_rank)
        latents = normed + c * stream_tokens * mla.qk_rope_head_dim
        latent_norms = normed + STATISTICS_BYTES * stream_tokens * (2 if mla.q_lora_rank else 1)
    columns = model.ffn_hidden_size
    if routed and model.moe is not None:
        columns = model.moe.num_shared_experts * model.moe.expert_hidden_size
    stream = c * stream_tokens * h
    norm = stream + STATISTICS_BYTES * stream_tokens
    return LayerTensors(
        input=stream,
        attention_norm=norm,
        projected=c * tokens * projected,
        latents=latents,
        latent_norms=latent_norms,
        qk_statistics=STATISTICS_BYTES * tokens * qk_heads // tp,
        rotated=c * tokens * rotated,
        softmax=tokens * heads // tp * (c * seq_len if math else STATISTICS_BYTES),
        attention_output=c * tokens * heads * v // tp,
        residual=stream,
        ffn_norm=norm,
        dispatched=0,
        gate_up=2 * c * tokens * columns // tp,
        product=c * tokens * columns // tp,
    )


def tensors_of(e: Experiment, routed: bool, c: int) -> LayerTensors:
    """`layer_tensors` of this experiment's layers, with fp8, experts and Ulysses applied.

    In fp8 the saved inputs of matrix products are smaller (`workloads.costs.shape.fp8`). Ulysses saves queries, keys
    and values once, as received: the rotated queries and keys are freed when sent, and so is the projection unless it
    is the input of query and key norms. The attention output is saved twice, before and after it is sent back.
    """
    tokens, stream_tokens = rank_tokens(e)
    t = layer_tensors(e.model, routed, tokens, stream_tokens, e.seq_len, e.tp, c, e.attention == "math")
    of_experts = 0
    if routed:
        x = expert_tensors(e, stream_tokens, c)
        of_experts = x.product
        dispatched = x.router + x.weights + x.rows
        t = replace(t, dispatched=dispatched, gate_up=t.gate_up + x.gate_up, product=t.product + x.product)
    if fp8.keeps_fp8(e):
        dense_product = t.product - of_experts
        kept = fp8.kept_inputs(e, t.attention_norm, t.latent_norms, t.ffn_norm, routed=routed, c=c)
        attention_norm, latent_norms, ffn_norm = kept
        product = fp8.cast_bytes(e, dense_product // c) + of_experts
        t = replace(t, attention_norm=attention_norm, latent_norms=latent_norms, ffn_norm=ffn_norm, product=product)
    if e.cp > 1 and e.cp_kind == "ulysses":
        received = t.projected if e.model.mla is None else t.rotated + t.attention_output
        normed = t.projected if e.model.mla is None and e.model.qk_norm else t.latents
        return replace(t, projected=received, latents=normed, rotated=0, attention_output=2 * t.attention_output)
    return t


def recomputable_bytes(e: Experiment, t: LayerTensors, c: int) -> dict[str, int]:
    """Bytes that each operation of ``recompute`` need not save. With latent attention ``rope`` recomputes keys and
    saves the shared key rotated; ``mla_up`` recomputes queries (if they have a latent) and the tensor that keys and
    values are views of. Tensors received by Ulysses are not recomputed."""
    mla, (tokens, stream_tokens) = e.model.mla, rank_tokens(e)
    norms = t.attention_norm + t.ffn_norm - 2 * STATISTICS_BYTES * stream_tokens
    if mla is None:
        return {"norm": norms, "rope": t.rotated, "swiglu": t.product}
    keys, up = t.rotated // 2, t.projected + (t.rotated // 2 if mla.q_lora_rank else 0)
    received = e.cp > 1 and e.cp_kind == "ulysses"
    return {
        "norm": norms + _normed_latents(e, t),
        "rope": 0 if received else keys - c * tokens * mla.qk_rope_head_dim,
        "swiglu": t.product,
        "mla_up": 0 if received else up,
    }


def _normed_latents(e: Experiment, t: LayerTensors) -> int:
    """Bytes of `LayerTensors.latent_norms` that are inputs of matrix products, statistics excluded."""
    mla = e.model.mla
    return t.latent_norms - STATISTICS_BYTES * rank_tokens(e)[1] * (2 if mla and mla.q_lora_rank else 1) if mla else 0


def layer_bytes(
    experiment: Experiment, *, routed: bool, c: int, recomputed: bool = True, w: int | None = None
) -> LayerBytes:
    """Saved and working bytes of one layer under the experiment's recompute policy. ``recomputed``: whether the policy
    applies to this layer (``recompute_every``). ``w``: bytes that an element of a dense weight's gradient takes while
    the layer's backward runs, in place of c where products add to sums (`Shared.w`).

    Saved bytes by ``recompute`` (arXiv:2205.05198, section 5, for selective recomputation):

    none       all of `LayerTensors`, as in every layer that is not recomputed. A compiled block saves the inputs of its
               two column-parallel layers gathered; an eager block saves this rank's part.
    selective  all but the recomputed tensors: normed inputs (norm statistics stay), rotated queries and keys, and the
               SwiGLU product. If operations are named (norm, rope, swiglu), only those are recomputed; ``experts`` also
               recomputes gate_up and product of routed experts. In a compiled block with tp > 1 the residual after
               attention is recomputed too, and the outputs of the two row-parallel layers and their partial sums (full
               T) stay until they are used.
    full       the block input.

    Working bytes: the backward peaks in the feed-forward half. It holds the gradients of the stream (``c T_s h``) and
    of the down weight (``c h F / tp``), and in turn

    1. the gathered stream (``c T h``, tp > 1) and the product's gradient;
    2. the gradient of gate_up, while the product's gradient takes the place of the product;
    3. the gradients of gate_up, of its gathered input and of its weight, and that input; product and gate_up are free.

    The largest of the three counts; recomputed tensors are added. In fp8 see `fp8.working_bytes`. The backward of
    latent attention may need more: see `_attention_working`.
    """
    e, model = experiment, experiment.model
    tokens, stream_tokens = rank_tokens(e)
    t = tensors_of(e, routed, c)
    stream, gathered = c * stream_tokens * model.hidden_size, c * tokens * model.hidden_size if e.tp > 1 else 0
    w = c if w is None else w
    if routed:
        return _routed_bytes(e, t, c, stream, gathered, recomputed=recomputed, w=w)
    down_weight = w * model.ffn_hidden_size // e.tp * model.hidden_size
    steps = (
        gathered + t.product,
        t.gate_up,
        2 * gathered + 2 * down_weight - t.product,
    )
    working = stream + down_weight + max(steps)
    in_fp8 = fp8.is_fp8(e)
    if in_fp8:
        recomputes_product = recomputed and "swiglu" in e.recomputed_operations
        working = fp8.working_bytes(
            e, stream, tokens, model.ffn_hidden_size // e.tp, c, recomputes_product=recomputes_product, w=w
        )
    compiled = e.compiles(routed=False, recomputed=recomputed)
    kept = 2 * (gathered - stream) if compiled and e.tp > 1 and e.sequence_parallel else 0
    if e.recompute == "none" or not recomputed:
        in_attention = _attention_working(e, t, c, w, down_weight, t.total)
        return LayerBytes(saved=t.total + kept, working=max(working, in_attention))
    if e.recompute == "full":
        in_attention = _attention_working(e, t, c, w, down_weight, t.input)
        return LayerBytes(saved=t.input, working=max(t.total + kept - t.input + working, in_attention))
    if not compiled or e.tp == 1:  # compiled dense blocks: as measured in a run of h100x2_validation_gradients
        recomputable, named = recomputable_bytes(e, t, c), e.recomputed_operations
        saved = t.total - sum(recomputable.get(name, 0) for name in named)
        product = t.product if "swiglu" in named and not in_fp8 else 0
        in_attention = _attention_working(e, t, c, w, down_weight, saved) - ("norm" in named) * (
            recomputable["norm"] - stream
        )
        return LayerBytes(saved=saved, working=max(product + working, in_attention))
    recomputed_bytes = t.attention_norm + t.qk_statistics + t.rotated + t.residual + t.ffn_norm + t.product
    stay = 2 * (stream + gathered)
    return LayerBytes(saved=t.total - recomputed_bytes + stay, working=recomputed_bytes + working - stay)


def _routed_bytes(
    e: Experiment, t: LayerTensors, c: int, stream: int, gathered: int, *, recomputed: bool, w: int
) -> LayerBytes:
    """`layer_bytes` of a layer with experts. Compilation is assumed to change nothing: experts are never compiled."""
    x = expert_tensors(e, rank_tokens(e)[1], c)
    gathered = gathered if e.etp > 1 else 0
    reducing = stream + x.rows - (x.weights + x.rows + x.gate_up + x.product)
    if e.recompute == "none" or not recomputed:
        saved, recomputed_bytes, working = t.total, 0, expert_working(e, x, gathered)
    elif e.recompute == "full":
        saved = t.input
        recomputed_bytes = t.total - saved
        working = recomputed_bytes + expert_working(e, x, gathered)
    else:
        recomputable, named = recomputable_bytes(e, t, c), e.recomputed_operations
        saved, recomputed_bytes = t.total - sum(recomputable.get(name, 0) for name in named), 0
        if "experts" in named:
            recomputed_bytes = x.gate_up + x.product
            saved -= x.gate_up if "swiglu" in named else recomputed_bytes
        elif "swiglu" in named:
            recomputed_bytes = x.product
        working = expert_working(e, x, gathered, recomputed_bytes)
    in_attention = _attention_working(e, t, c, w, 0, saved)
    return LayerBytes(saved, max(stream + working, in_attention), recomputed_bytes + reducing)


def _attention_working(e: Experiment, t: LayerTensors, c: int, w: int, down_weight: int, saved: int) -> int:
    """Bytes that the backward of latent attention needs in addition to ``saved``. 0 for grouped-query attention, whose
    gradients are smaller than the tensors that the feed-forward half has freed by then.

    All tensors of attention exist then, saved or recomputed, with the gradients of queries, keys, values and outputs,
    of the stream, and of the weights whose backward is over: three of the feed-forward part, and the output projection.
    """
    mla, (tokens, stream_tokens) = e.model.mla, rank_tokens(e)
    if mla is None:
        return 0
    heads = c * tokens * e.model.num_heads // e.tp
    out_weight = w * e.model.hidden_size * e.model.num_heads * mla.v_head_dim // e.tp
    attention_tensors = t.input + t.attention_norm + t.latents + t.latent_norms + t.projected + t.rotated + t.softmax
    gradients = heads * 2 * (mla.qk_head_dim + mla.v_head_dim) + c * stream_tokens * e.model.hidden_size
    return attention_tensors + t.attention_output + gradients + 3 * down_weight + out_weight - saved


def first_half_bytes(experiment: Experiment, c: int, w: int) -> int:
    """Extra working bytes of a dense layer in the input-gradient pass of a split backward, compared with a whole
    backward: the SwiGLU product is kept for the weight-gradient pass, and the down weight has no gradient yet. In fp8
    the remaining tensor is either the fp8 copy, already counted, or the recomputed 16-bit product."""
    e = experiment
    t = tensors_of(e, False, c)
    if fp8.is_fp8(e):
        return _uncast(e, t, c, "swiglu", routed=False) + _uncast(e, t, c, "norm", routed=False) // 2
    down_weight = w * e.model.ffn_hidden_size // e.tp * e.model.hidden_size
    return max(0, t.product - down_weight)


def _uncast(e: Experiment, t: LayerTensors, c: int, operation: str, *, routed: bool) -> int:
    """Extra bytes of a recomputed operation's outputs between the two passes of a split backward: they stay in 16 bits
    until the weight-gradient pass casts them, where saved ones would be in fp8."""
    if not fp8.keeps_fp8(e) or operation not in e.recomputed_operations:
        return 0
    if operation == "swiglu":  # routed experts save theirs in 16 bits anyway; shared experts are not counted here
        return 0 if routed else c * rank_tokens(e)[0] * e.model.ffn_hidden_size // e.tp - t.product
    if e.tp > 1:  # products save their gathered inputs, in 16 bits
        return 0
    stream_tokens = rank_tokens(e)[1]
    return 2 * (c * e.model.hidden_size + STATISTICS_BYTES) * stream_tokens - t.attention_norm - t.ffn_norm


def deferred_bytes(experiment: Experiment, *, routed: bool, c: int) -> int:
    """Bytes that one layer holds for one micro-batch between the input-gradient and the weight-gradient pass of a split
    backward (zero bubble, arXiv:2401.10241).

    These are the inputs of its matrix products (the two normed streams, normed latents, the attention output, the
    SwiGLU product) and the gradients of their outputs (queries, keys and values; gate and up; the two row-parallel
    sums, ``c T h`` each), in fp8 if weight gradients are fp8 products. Experts hold the received copies, and the
    gradients of their outputs instead of the second sum (in addition to it with shared experts).
    """
    e, model = experiment, experiment.model
    tokens, stream_tokens = rank_tokens(e)
    t = tensors_of(e, routed, c)
    attention_output = c * tokens * model.num_heads * head_sizes(model)[1] // e.tp
    norms = t.attention_norm + t.ffn_norm - 2 * STATISTICS_BYTES * stream_tokens
    norms += _uncast(e, t, c, "norm", routed=routed) // e.recompute_every
    product = t.product + _uncast(e, t, c, "swiglu", routed=routed) // e.recompute_every
    projected, wide = t.projected, 0
    if model.mla is not None:  # gradients of the up-projections, and of the down-projections
        of_heads = model.mla.qk_head_dim + model.mla.qk_nope_head_dim + model.mla.v_head_dim
        projected = t.latents + c * tokens * model.num_heads * of_heads // e.tp
        wide = t.latents if e.precision == "fp8_blockwise" else 0
    sums, copies = 2 * c * tokens * model.hidden_size, 0
    if routed and model.moe is not None:
        x = expert_tensors(e, stream_tokens, c)
        copies = x.rows
        sums = (2 if model.moe.num_shared_experts else 1) * c * tokens * model.hidden_size + copies
        wide += x.gate_up + copies
    gradients = projected + t.gate_up + sums
    if fp8.keeps_fp8(e):
        gradients = fp8.cast_bytes(e, (gradients - wide) // c) + wide
    return norms + _normed_latents(e, t) + attention_output + product + copies + gradients


def rank_tokens(experiment: Experiment) -> tuple[int, int]:
    """(T, T_s): tokens of a micro-batch on one rank, inside and between tensor-parallel regions."""
    tokens = experiment.micro_batch_size * experiment.seq_len // experiment.cp
    return tokens, tokens // experiment.tp if experiment.sequence_parallel else tokens


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """Bytes of the final norm, the head and the loss, for one micro-batch on one rank of the last stage."""

    saved: int
    """Bytes held from forward to backward by every micro-batch in flight on the last stage."""
    working: int
    """Bytes alive at the end of the head's forward, ``saved`` included."""


def head_bytes(experiment: Experiment, c: int) -> HeadBytes:
    """Bytes of the final norm and the chunked linear cross-entropy over the local vocabulary, V / tp rows.

    Saved: the norm's input and statistics, and the gradients of the hidden states (``c T h``) and of the weight
    (``c V h / tp``), which the forward computes already. GPipe holds every micro-batch and therefore saves the normed
    (gathered) input and one normalizer per token instead of the gradients.

    Working: the norm's input and statistics, the normed input, the gradient of the hidden states, and the larger of

    1. one chunk of logits (overwritten by their gradient) and the weight's gradient, accumulated in fp32 if there are
       several chunks;
    2. that fp32 gradient and its copy in the compute dtype, if there are several chunks.

    With ``gradient_accumulation_fusion`` the weight's gradient is its sum over micro-batches, not counted here.
    """
    model = experiment.model
    tokens, stream_tokens = rank_tokens(experiment)
    full = c * tokens * model.hidden_size
    rows = model.vocab_size // experiment.tp
    chunks = -(-tokens // LOSS_CHUNK_TOKENS)
    logits = c * -(-tokens // chunks) * rows
    gradient = 0 if experiment.gradient_accumulation_fusion else c * rows * model.hidden_size
    accumulator = gradient if chunks == 1 or not gradient else max(c, STATISTICS_BYTES) * rows * model.hidden_size
    weight = max(logits + accumulator, accumulator + gradient if chunks > 1 else 0)
    norm_input = (c * model.hidden_size + STATISTICS_BYTES) * stream_tokens
    working = norm_input + full + full + weight
    if experiment.pp_schedule == "gpipe":
        return HeadBytes(saved=norm_input + full + STATISTICS_BYTES * tokens, working=working)
    return HeadBytes(saved=norm_input + full + gradient, working=working)
