"""Lists what torchtitan cannot run, by its version. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

from workloads.rules.refusal import Refusal
from workloads.rules.torchtitan_kinds import kinds_family
from workloads.spec.engine_versions import ENGINE_VERSIONS, ENGINES
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec


def torchtitan_model(model: ModelSpec) -> Literal["llama3", "qwen3", "deepseek_v3"]:
    """The torchtitan model that can have this shape: Llama 3, Qwen3 for features that its Llama 3 lacks, or DeepSeek-V3
    for latent attention."""
    if model.mla is not None:
        return "deepseek_v3"
    own_head_size = model.head_dim * model.num_heads != model.hidden_size
    return "qwen3" if model.moe is not None or model.tie_embeddings or model.qk_norm or own_head_size else "llama3"


_TORCHTITAN_PRECISIONS = ("bf16", "fp32", "fp8_tensorwise", "fp8_rowwise")
_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")


def _is_fp8(e: Experiment) -> bool:
    return e.precision.startswith("fp8")


def _qwen3(e: Experiment) -> bool:
    return torchtitan_model(e.model) == "qwen3"


def _without_fsdp(e: Experiment) -> bool:
    return e.zero_stage == 0


def _uneven_tied_rows(e: Experiment) -> bool:
    return e.model.tie_embeddings and e.zero_stage > 0 and e.model.vocab_size % (e.dp_shard * e.cp * e.tp) > 0


def _breaks_rounds(e: Experiment) -> bool:
    """Whether torch's interleaved schedules refuse the number of micro-batches: it splits them into max(1,
    micro-batches // pp) rounds of equal size."""
    has_rounds = e.pp_schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
    return has_rounds and e.num_microbatches % max(1, e.num_microbatches // e.pp) > 0


def _divides(axis: str, e: Experiment) -> bool:
    """Whether an axis divides a model of gpt-oss's or Llama 4's kinds of layers."""
    return kinds_family(e.model) is not None and getattr(e, axis) > 1


def _mixture(e: Experiment) -> bool:
    return e.model.moe is not None


def _other_choice(e: Experiment) -> bool:
    """Whether its forced choice, in turn over all tokens of a micro-batch, differs from ours, which begins anew with
    every sequence."""
    moe = e.model.moe
    copies = e.seq_len * moe.experts_per_token if moe is not None else 0
    return moe is not None and e.micro_batch_size > 1 and copies % moe.num_experts > 0


def _other_choice_of_chunks(e: Experiment) -> bool:
    """The same over the two parts of each sequence that a context-parallel rank has."""
    moe = e.model.moe
    if moe is None or e.cp == 1 or e.routing != "balanced":
        return False
    return e.seq_len // (2 * e.cp) * moe.experts_per_token % moe.num_experts > 0


_MIXTURES = (
    Refusal(
        "routing",
        lambda e: _mixture(e) and e.routing == "skewed",
        "the only load that it can force on experts is an even one; use balanced",
    ),
    Refusal(
        "routing",
        lambda e: _mixture(e) and e.routing == "learned" and e.model.moe is not None and e.model.moe.balance != "none",
        "it balances experts by no loss, and by biases that it centres after each step; use balanced, or a model whose "
        "experts are not balanced",
    ),
    Refusal(
        "micro_batch_size",
        lambda e: _mixture(e) and e.routing == "balanced" and _other_choice(e),
        "it deals experts out over the whole micro-batch; use 1, or a seq_len of which all experts get equally many "
        "copies",
    ),
    Refusal(
        "capacity_factor",
        lambda e: _mixture(e) and e.capacity_factor is not None,
        "its experts drop no tokens; use null",
    ),
    Refusal(
        "precision",
        lambda e: _mixture(e) and e.precision == "fp32",
        "on CUDA its experts multiply in bf16 whatever it is told; use bf16",
        on="cuda",
    ),
    Refusal(
        "precision",
        lambda e: _mixture(e) and _is_fp8(e),
        "its adapter is not tested with experts in fp8; use bf16",
    ),
    *(
        Refusal(axis, partial(_divides, axis), f"its adapter runs models with experts by dp and ep alone; use {axis}=1")
        for axis in ("tp", "cp", "pp")
    ),
    Refusal(
        "ep",
        lambda e: _mixture(e) and e.ep > 1 and (e.zero_stage not in (2, 3) or e.dp_shard % e.ep > 0),
        "it sends tokens between ranks of dp that FSDP shards over; use zero_stage 2 or 3 and a divisor of dp_shard",
    ),
    Refusal(
        "compile",
        lambda e: _mixture(e) and e.compile != "none" and e.engine_version != ENGINES["torchtitan"],
        "its adapter is not tested with compiled experts; use none",
    ),
)
"""What of models with experts no version runs through its adapter."""
_EXPERTS_03 = (
    Refusal(
        "tp",
        lambda e: _mixture(e) and kinds_family(e.model) is None and e.tp > 1,
        "without ep the input of its experts gets no gradient, and with ep it sends tokens between tp ranks; use tp=1",
    ),
    Refusal(
        "ep",
        lambda e: _mixture(e) and e.ep > 1 and e.cp > 1 and kinds_family(e.model) is None,
        "with cp it sends tokens between cp ranks; use ep=1 or cp=1",
    ),
    Refusal(
        "seq_len",
        _other_choice_of_chunks,
        "with cp it deals experts out over each rank's tokens; use a seq_len of which every 2 * cp-th part gives all "
        "experts equally many copies, or learned routing",
    ),
    Refusal(
        "precision",
        lambda e: e.model.mla is not None and e.model.moe is None and _is_fp8(e),
        "its adapter is not tested with latent attention in fp8; use bf16",
    ),
)
"""What of Qwen3 with experts and of DeepSeek-V3 torchtitan 0.3.0 does not run through its adapter."""
_OTHER_SHARDING = (
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 1 and e.pp == 1,
        "without pp it reduces gradients after every micro-batch; use 2 or 3, or pp > 1",
    ),
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 2 and e.pp > 1,
        "with pp > 1 it reduces gradients once a step; use 1 or 3",
    ),
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 3 and e.pp_schedule in _SPLIT_BACKWARD,
        "FSDP frees parameters between the two passes of a split backward, and gradients are lost; use 1",
    ),
)
"""What every version would shard or reduce otherwise than the stage says."""

TORCHTITAN = (
    *_MIXTURES,
    Refusal(
        "model",
        lambda e: e.model.mla is None and e.model.moe is not None and kinds_family(e.model) is None,
        "of models with experts its adapter builds gpt-oss and Llama 4 alone; that of 0.3.0 builds Qwen3, too",
    ),
    Refusal(
        "model",
        lambda e: e.model.mla is not None,
        "its adapter has no latent attention; that of 0.3.0 builds DeepSeek-V3",
    ),
    Refusal(
        "model",
        _uneven_tied_rows,
        "FSDP pads the tied embedding and head separately, so they would diverge; dp_shard * cp * tp must divide "
        "vocab_size",
    ),
    Refusal(
        "engine_version",
        lambda e: e.engine_version != ENGINES["torchtitan"],
        f"the adapters are for {', '.join(ENGINE_VERSIONS['torchtitan'])}",
    ),
    Refusal(
        "precision", lambda e: e.precision not in _TORCHTITAN_PRECISIONS, f"use {', '.join(_TORCHTITAN_PRECISIONS)}"
    ),
    Refusal("precision", _is_fp8, "its float8 products need CUDA devices of capability 8.9; use bf16", off="cuda"),
    Refusal(
        "precision",
        lambda e: e.precision == "fp8_rowwise" and _without_fsdp(e),
        "without FSDP its recipe multiplies bf16 by fp32; shard over dp or cp, or use fp8_tensorwise",
    ),
    Refusal("precision", lambda e: _is_fp8(e) and e.tp > 1, "fp8 is not tested with tp > 1; use tp=1 or bf16"),
    Refusal(
        "precision",
        lambda e: e.precision == "fp32" and (e.cp > 1 or (_qwen3(e) and e.tp > 1)),
        "its attention with cp > 1, and that of its Qwen3 with tp > 1, has no fp32 kernels on CUDA; use bf16",
        on="cuda",
    ),
    Refusal("attention", lambda e: e.attention != "auto", "it chooses the kernel itself; use auto"),
    Refusal(
        "sequence_parallel", lambda e: e.tp > 1 and not e.sequence_parallel, "it is always on with tp > 1; use true"
    ),
    Refusal(
        "seq_len",
        lambda e: e.seq_len % (2 * e.tp * e.cp) > 0,
        "it must be a multiple of 2 * tp * cp",
    ),
    Refusal(
        "zero_stage",
        lambda e: _without_fsdp(e) and e.dp > 1 and e.world_size > e.dp,
        "its DDP cannot be combined with tp, cp or pp; use zero_stage 3 with tp or cp, 1 or 3 with pp",
    ),
    Refusal(
        "zero_stage",
        lambda e: _without_fsdp(e) and e.dp == 1 and e.cp > 1,
        "it always shards over cp; use 2 or 3, with pp > 1 use 1 or 3",
    ),
    *_OTHER_SHARDING,
    Refusal(
        "tp",
        lambda e: e.tp > 1 and _without_fsdp(e) and e.precision != "fp32",
        "without FSDP it would compute in fp32; shard over dp with zero_stage above 0, or use precision=fp32",
    ),
    Refusal(
        "pp",
        lambda e: e.pp > 1 and _without_fsdp(e) and e.precision != "fp32",
        "without FSDP it would compute in fp32; shard over dp with zero_stage above 0, or use precision=fp32",
    ),
    Refusal(
        "pp",
        lambda e: e.pp > 1 and _qwen3(e),
        "only its Qwen3 can build this model, and Qwen3 has no pipeline; use pp=1",
    ),
    Refusal(
        "cp",
        lambda e: e.cp > 1 and e.tp > 1 and _qwen3(e),
        "only its Qwen3 can build this model, and Qwen3 supports cp only without tp; use tp=1",
    ),
    Refusal(
        "cp_kind", lambda e: e.cp_kind == "ulysses", "it exchanges keys and values, not heads; use ring or allgather"
    ),
    Refusal(
        "pp_schedule",
        lambda e: e.pp_schedule == "interleaved_zero_bubble",
        "its adapter is not tested with this schedule; use another",
    ),
    Refusal(
        "num_microbatches",
        lambda e: e.pp_schedule == "dualpipe_v" and e.num_microbatches < 2 * e.pp,
        "its DualPipeV needs at least one per stage, 2 * pp",
    ),
    Refusal(
        "num_microbatches", _breaks_rounds, "its interleaved schedule needs rounds of equal size; use a multiple of pp"
    ),
    Refusal(
        "compile",
        lambda e: e.compile != "none" and e.pp_schedule in _SPLIT_BACKWARD,
        "it cannot compile with a schedule that splits backwards; use none",
    ),
    Refusal(
        "recompute",
        lambda e: e.recompute not in ("none", "full"),
        "its selective recomputation is a different one; use none or full",
    ),
    Refusal("recompute_every", lambda e: e.recompute_every > 1, "it recomputes every layer; use 1"),
)
"""Refusals of torchtitan 0.2.2 as `workloads.adapters.torchtitan` runs it."""


FLEX_BLOCK = 128
"""Tokens in a block of the mask of torch's flex attention. Context parallelism divides sequences into whole blocks."""


def _uneven_tokens(e: Experiment) -> bool:
    divided = e.tp if e.sequence_parallel else 1
    return e.seq_len % math.lcm(divided * (2 * e.cp if e.cp > 1 else 1), FLEX_BLOCK * e.cp if e.cp > 1 else 1) > 0


_ALIKE = ("recompute", "recompute_every", "attention", "num_microbatches", "compile")
TORCHTITAN_03 = (
    *_MIXTURES,
    *_EXPERTS_03,
    Refusal(
        "precision",
        lambda e: e.precision not in ("bf16", "fp32", "fp8_rowwise"),
        "use bf16, fp32 or fp8_rowwise; its tensor-wise fp8 is gone",
    ),
    Refusal("precision", _is_fp8, "its float8 products need CUDA devices of capability 8.9; use bf16", off="cuda"),
    Refusal("precision", lambda e: _is_fp8(e) and e.tp > 1, "fp8 is not tested with tp > 1; use tp=1 or bf16"),
    Refusal(
        "seq_len", _uneven_tokens, f"it must be a multiple of tp, with cp > 1 of 2 * tp * cp and {FLEX_BLOCK} * cp"
    ),
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 0 and e.cp > 1,
        "it always shards over cp; use 2 or 3, with pp > 1 use 1 or 3",
    ),
    *_OTHER_SHARDING,
    Refusal("pp", lambda e: e.pp > 1 and e.model.tie_embeddings, "it cannot tie embeddings across stages; use pp=1"),
    Refusal(
        "cp_kind",
        lambda e: e.cp > 1 and e.cp_kind != "allgather",
        "it gathers all keys and values, its option for a ring is gone; use allgather",
    ),
    *(refusal for refusal in TORCHTITAN if refusal.field in _ALIKE),
)
"""Refusals of torchtitan 0.3.0 as `workloads.adapters.torchtitan03` runs it."""

NEWER_REFUSALS: Mapping[str, tuple[Refusal, ...]] = {"0.3.0+1": TORCHTITAN_03}
"""By version of torchtitan."""
