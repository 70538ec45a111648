"""Bytes of activations that one layer and the head keep for backward, tensor by tensor, as the engine's ops save them.

T tokens of a micro-batch on one rank, T_s = T / tp of them between tensor-parallel regions with sequence parallelism
(else T), c bytes of the compute dtype, h hidden, N query and K key/value heads of head size H, F feed-forward columns.
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
"""Norm statistics and softmax normalizers are fp32."""

LOSS_CHUNK_TOKENS = 4096
"""Tokens whose logits exist at one time in the chunked cross-entropy of the engine."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Bytes of what one layer's forward makes, for one micro-batch on one rank."""

    input: int
    """Block input, saved by the first norm: ``c T_s h``."""
    attention_norm: int
    """Normed input (column-parallel layers save the rows they gather from) and its statistics: ``c T_s h + 4 T_s``."""
    projected: int
    """Fused query, key and value projection, kept alive by the values: ``c T (N + 2K) H / tp``. With latent attention
    keys without position and values, of sizes P and V: ``c T N (P + V) / tp``."""
    latents: int
    """What norms inside attention read where it lies. Latent attention: both latents and the shared key,
    ``c T_s (C_q + C_kv + R)``. Ulysses with ``qk_norm``: the projection, which otherwise is free once it was sent."""
    latent_norms: int
    """Latent attention: normed latents and their statistics, ``c T_s (C_q + C_kv)`` and ``4 T_s`` for each."""
    qk_statistics: int
    """With ``qk_norm``: one number for every head of queries and keys, ``4 T (N + K) / tp``. What is normed lies in the
    projection."""
    rotated: int
    """Queries and keys after RoPE, saved by attention: ``c T (N + K) H / tp``; with latent attention both have N heads
    of P + R numbers."""
    softmax: int
    """Log-sum-exp of every row, ``4 T N / tp``; with ``attention=math`` the whole probabilities, ``c T seq N / tp``."""
    attention_output: int
    """Input of the output projection: ``c T N H / tp``."""
    residual: int
    """Residual stream after attention, saved by the second norm: ``c T_s h``."""
    ffn_norm: int
    """As attention_norm."""
    dispatched: int
    """Experts only: the router's scores, the received copies of tokens and their weights
    (`workloads.costs.memory.expert_activations`)."""
    gate_up: int
    """Both SwiGLU inputs: ``2 c T F / tp``. With experts those of shared ones and of the received copies."""
    product: int
    """SwiGLU output, input of the down projection: ``c T F / tp``. With experts as above."""

    @property
    def total(self) -> int:
        return sum(_TENSORS(self))


_TENSORS: Callable[[LayerTensors], tuple[int, ...]] = attrgetter(*(field.name for field in fields(LayerTensors)))


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch on one rank."""

    saved: int
    """Held from forward to backward by every micro-batch in flight."""
    working: int
    """Needed beside ``saved`` while the layer's own backward runs: what is computed again, and gradients."""
    beside_experts: int = 0
    """Of a layer with experts, beside ``saved`` when the gradients of its experts are reduced: what is computed again
    and gradients, without what the experts' backward has freed."""


@lru_cache(maxsize=65536)
def layer_tensors(
    model: ModelSpec, routed: bool, tokens: int, stream_tokens: int, seq_len: int, tp: int, c: int, math: bool
) -> LayerTensors:
    """What one layer's forward makes, in bytes. The formulas are those of `LayerTensors`.

    ``routed``: a layer with experts, here without what routed experts themselves make; ``tokens`` is T,
    ``stream_tokens`` T_s, ``seq_len`` the keys that a query sees, ``c`` the bytes of the compute dtype; ``math``:
    attention keeps its probabilities.
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


def _tensors_of(e: Experiment, routed: bool, c: int) -> LayerTensors:
    """`layer_tensors` of this experiment's layers.

    In fp8 inputs of matrix products are smaller (`workloads.costs.shape.fp8`). Ulysses keeps queries, keys and values
    once, as they were received: the rotated queries and keys are free when they have been sent, and so is the
    projection, unless norms of queries and keys take it in. The output is kept twice, before it is sent back and after.
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
        own = t.product - of_experts
        kept = fp8.kept_inputs(e, t.attention_norm, t.latent_norms, t.ffn_norm, routed=routed, c=c)
        attention_norm, latent_norms, ffn_norm = kept
        product = fp8.cast_bytes(e, own // c) + of_experts
        t = replace(t, attention_norm=attention_norm, latent_norms=latent_norms, ffn_norm=ffn_norm, product=product)
    if e.cp > 1 and e.cp_kind == "ulysses":
        received = t.projected if e.model.mla is None else t.rotated + t.attention_output
        normed = t.projected if e.model.mla is None and e.model.qk_norm else t.latents
        return replace(t, projected=received, latents=normed, rotated=0, attention_output=2 * t.attention_output)
    return t


def _made_again(e: Experiment, t: LayerTensors, c: int) -> dict[str, int]:
    """Bytes that each operation of ``recompute`` need not keep. With latent attention ``rope`` makes keys and keeps the
    shared one rotated; ``mla_up`` makes queries, where they have a latent, and what keys and values are views of. What
    Ulysses has received is not made again."""
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
    """Of `LayerTensors.latent_norms` what products take in."""
    mla = e.model.mla
    return t.latent_norms - STATISTICS_BYTES * rank_tokens(e)[1] * (2 if mla and mla.q_lora_rank else 1) if mla else 0


def layer_bytes(experiment: Experiment, *, routed: bool, c: int, recomputed: bool = True) -> LayerBytes:
    """Saved and working bytes of one layer under the experiment's recompute policy. ``recomputed``: whether the policy
    meets the layer (``recompute_every``).

    Saved, by ``recompute``:

    none       all of `LayerTensors`, as of every layer that is not recomputed. A compiled block keeps the inputs of its
               two column-parallel layers as gathered, where eager ones keep this rank's part.
    selective  all but what backward makes again: normed inputs (statistics of norms stay), rotated queries and keys,
               and the SwiGLU product; with some of them named (norm, rope, swiglu) all but those; with ``experts``
               also but gate_up and product of routed experts. In a compiled block with tp > 1 the residual after
               attention is made again too, and the outputs of the two row-parallel layers and their partial sums (full
               T) stay until they are used.
    full       the block input.

    Working: the backward peaks in the feed-forward half. It holds the gradients of the stream (``c T_s h``) and of the
    down weight (``c h F / tp``), and in turn

    1. the gathered stream (``c T h``, tp > 1) and the product's gradient;
    2. the gradient of gate_up, while the product's gradient takes the place of the product;
    3. the gradients of gate_up, of its gathered input and of its weight, and that input; product and gate_up are free.

    The largest of the three counts, and what recomputation makes again comes on top. In fp8: `fp8.working_bytes`. With
    latent attention its own backward may need more: see `_attention_working`.
    """
    e, model = experiment, experiment.model
    tokens, stream_tokens = rank_tokens(e)
    t = _tensors_of(e, routed, c)
    stream, gathered = c * stream_tokens * model.hidden_size, c * tokens * model.hidden_size if e.tp > 1 else 0
    if routed:
        return _routed_bytes(e, t, c, stream, gathered, recomputed=recomputed)
    down_weight = c * model.ffn_hidden_size // e.tp * model.hidden_size
    steps = (
        gathered + t.product,
        t.gate_up,
        2 * gathered + 2 * down_weight - t.product,
    )
    working = stream + down_weight + max(steps)
    in_fp8 = fp8.is_fp8(e)
    if in_fp8:
        remade = recomputed and "swiglu" in e.recomputed_operations
        working = fp8.working_bytes(e, stream, tokens, model.ffn_hidden_size // e.tp, c, remade=remade)
    compiled = e.compiles(routed=False, recomputed=recomputed)
    kept = 2 * (gathered - stream) if compiled and e.tp > 1 and e.sequence_parallel else 0
    if e.recompute == "none" or not recomputed:
        own = _attention_working(e, t, c, down_weight, t.total)
        return LayerBytes(saved=t.total + kept, working=max(working, own))
    if e.recompute == "full":
        own = _attention_working(e, t, c, down_weight, t.input)
        return LayerBytes(saved=t.input, working=max(t.total + kept - t.input + working, own))
    if not compiled or e.tp == 1:  # compiled: so a run of h100x2_validation_gradients
        of, named = _made_again(e, t, c), e.recomputed_operations
        saved = t.total - sum(of.get(name, 0) for name in named)
        product = t.product if "swiglu" in named and not in_fp8 else 0
        own = _attention_working(e, t, c, down_weight, saved) - ("norm" in named) * (of["norm"] - stream)
        return LayerBytes(saved=saved, working=max(product + working, own))
    again = t.attention_norm + t.qk_statistics + t.rotated + t.residual + t.ffn_norm + t.product
    stay = 2 * (stream + gathered)
    return LayerBytes(saved=t.total - again + stay, working=again + working - stay)


def _routed_bytes(
    e: Experiment, t: LayerTensors, c: int, stream: int, gathered: int, *, recomputed: bool
) -> LayerBytes:
    """`layer_bytes` of a layer with experts, of which compilation is taken to change nothing: its experts never are."""
    x = expert_tensors(e, rank_tokens(e)[1], c)
    gathered = gathered if e.etp > 1 else 0
    reducing = stream + x.rows - (x.weights + x.rows + x.gate_up + x.product)
    if e.recompute == "none" or not recomputed:
        saved, again, working = t.total, 0, expert_working(e, x, gathered)
    elif e.recompute == "full":
        saved = t.input
        again = t.total - saved
        working = again + expert_working(e, x, gathered)
    else:
        made, named = _made_again(e, t, c), e.recomputed_operations
        saved, again = t.total - sum(made.get(name, 0) for name in named), 0
        if "experts" in named:
            again = x.gate_up + x.product
            saved -= x.gate_up if "swiglu" in named else again
        elif "swiglu" in named:
            again = x.product
        working = expert_working(e, x, gathered, again)
    own = _attention_working(e, t, c, 0, saved)
    return LayerBytes(saved, max(stream + working, own), again + reducing)


def _attention_working(e: Experiment, t: LayerTensors, c: int, down_weight: int, saved: int) -> int:
    """What the backward of latent attention itself needs beside ``saved``. 0 for grouped-query attention, whose
    gradients are smaller than what the feed-forward half has freed by then.

    All that attention has made is there, saved or made again, the gradients of queries, keys, values and outputs, of
    the stream, and of the weights whose backward is over: three of the feed-forward part, and the output projection.
    """
    mla, (tokens, stream_tokens) = e.model.mla, rank_tokens(e)
    if mla is None:
        return 0
    heads = c * tokens * e.model.num_heads // e.tp
    out_weight = c * e.model.hidden_size * e.model.num_heads * mla.v_head_dim // e.tp
    made = t.input + t.attention_norm + t.latents + t.latent_norms + t.projected + t.rotated + t.softmax
    gradients = heads * 2 * (mla.qk_head_dim + mla.v_head_dim) + c * stream_tokens * e.model.hidden_size
    return made + t.attention_output + gradients + 3 * down_weight + out_weight - saved


def first_half_bytes(experiment: Experiment, c: int) -> int:
    """How much more than in a whole backward a dense layer needs while the first half of a split one goes through it:
    the SwiGLU product stays beside its gradient, for the second half, and there is no gradient of the down weight yet.
    In fp8 what stays is the cast that is counted anyway, or what was made again and is not cast yet."""
    e = experiment
    t = _tensors_of(e, False, c)
    if fp8.is_fp8(e):
        return _uncast(e, t, c, "swiglu", routed=False) + _uncast(e, t, c, "norm", routed=False) // 2
    down_weight = c * e.model.ffn_hidden_size // e.tp * e.model.hidden_size
    return max(0, t.product - down_weight)


def _uncast(e: Experiment, t: LayerTensors, c: int, operation: str, *, routed: bool) -> int:
    """How much more the results of a recomputed operation take between the halves of a split backward than in fp8, in
    which they would be kept otherwise: their products cast them in the second half."""
    if not fp8.keeps_fp8(e) or operation not in e.recomputed_operations:
        return 0
    if operation == "swiglu":  # routed experts keep theirs in 16 bits in any case; shared ones are not counted here
        return 0 if routed else c * rank_tokens(e)[0] * e.model.ffn_hidden_size // e.tp - t.product
    if e.tp > 1:  # their products keep what they gather, in 16 bits
        return 0
    stream_tokens = rank_tokens(e)[1]
    return 2 * (c * e.model.hidden_size + STATISTICS_BYTES) * stream_tokens - t.attention_norm - t.ffn_norm


def deferred_bytes(experiment: Experiment, *, routed: bool, c: int) -> int:
    """What one layer holds for one micro-batch between the two halves of a split backward.

    The inputs of its matrix products (the two normed streams, normed latents, the attention output, the SwiGLU product)
    and the gradients of their outputs (queries, keys and values; gate and up; the two row-parallel sums, ``c T h``
    each), in fp8 where the weights' gradients are products in fp8. Of experts the received copies, and their outputs'
    gradients in the place of the second sum (beside it with shared experts).
    """
    e, model = experiment, experiment.model
    tokens, stream_tokens = rank_tokens(e)
    t = _tensors_of(e, routed, c)
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
    """(T, T_s): a micro-batch's tokens on one rank, inside and between tensor-parallel regions."""
    tokens = experiment.micro_batch_size * experiment.seq_len // experiment.cp
    return tokens, tokens // experiment.tp if experiment.sequence_parallel else tokens


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """Bytes of the final norm, the head and the loss, for one micro-batch on one rank of the last stage."""

    saved: int
    """Held from forward to backward by every micro-batch in flight on the last stage."""
    working: int
    """Alive at the end of its forward, ``saved`` included."""


def head_bytes(experiment: Experiment, c: int) -> HeadBytes:
    """Final norm and chunked linear cross-entropy over the local vocabulary, V / tp rows.

    Saved: the norm's input and statistics, and the gradients of the hidden states (``c T h``) and of the weight
    (``c V h / tp``), which the forward has computed already. GPipe holds every micro-batch and therefore saves the
    normed (gathered) input and one normalizer a token instead of the gradients.

    Working: the norm's input and statistics, the normed input, the gradient of the hidden states, and the larger of

    1. one chunk of logits (their gradient takes their place) and the weight's gradient, which is accumulated in fp32
       when there are several chunks;
    2. that fp32 gradient and its copy in the compute dtype, when there are several chunks.
    """
    model = experiment.model
    tokens, stream_tokens = rank_tokens(experiment)
    full = c * tokens * model.hidden_size
    rows = model.vocab_size // experiment.tp
    chunks = -(-tokens // LOSS_CHUNK_TOKENS)
    logits = c * -(-tokens // chunks) * rows
    gradient = c * rows * model.hidden_size
    accumulator = gradient if chunks == 1 else max(c, STATISTICS_BYTES) * rows * model.hidden_size
    weight = max(logits + accumulator, accumulator + gradient if chunks > 1 else 0)
    norm_input = (c * model.hidden_size + STATISTICS_BYTES) * stream_tokens
    working = norm_input + full + full + weight
    if experiment.pp_schedule == "gpipe":
        return HeadBytes(saved=norm_input + full + STATISTICS_BYTES * tokens, working=working)
    return HeadBytes(saved=norm_input + full + gradient, working=working)
