"""Lists what Megatron-Core cannot run, with Transformer Engine and without it. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from workloads.rules.refusal import Refusal
from workloads.spec.engine_versions import ENGINE_VERSIONS, runs_with
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.model_spec import layers_of


def _does_not_fill(e: Experiment) -> bool:
    """Whether the micro-batches do not fill groups of pp, which Megatron-LM's interleaved schedule needs; this includes
    the last group."""
    return e.pp_schedule == "interleaved_1f1b" and (e.num_microbatches < e.pp or e.num_microbatches % e.pp > 0)


def _without_te(holds: Callable[[Experiment], bool]) -> Callable[[Experiment], bool]:
    """The condition for the version without Transformer Engine alone."""
    return lambda e: runs_with(e.engine_version) is None and holds(e)


def _with_te(holds: Callable[[Experiment], bool]) -> Callable[[Experiment], bool]:
    return lambda e: runs_with(e.engine_version) is not None and holds(e)


def _scores_lack(e: Experiment) -> bool:
    """Whether a router's weights are sigmoids that are not divided by their sum, which Megatron-Core always does for
    more than one expert a token."""
    moe = e.model.moe
    return moe is not None and moe.gate == "sigmoid" and not moe.normalize_weights and moe.experts_per_token > 1


def _has_one_expert(e: Experiment) -> bool:
    """Whether a token visits one expert whose softmax is divided by itself, so that its router would never train."""
    moe = e.model.moe
    return moe is not None and moe.gate == "softmax" and moe.normalize_weights and moe.experts_per_token == 1


def _attention(e: Experiment) -> list[Attention]:
    return [kind.mixer for kind in layers_of(e.model).kinds if isinstance(kind.mixer, Attention)]


def _has_windows(e: Experiment) -> bool:
    return any(isinstance(mixer.span, Window) for mixer in _attention(e))


def _has_sinks(e: Experiment) -> bool:
    return any(mixer.sinks for mixer in _attention(e))


def _has_expert_biases(e: Experiment) -> bool:
    return any(isinstance(kind.mlp, RoutedMLP) and kind.mlp.expert.bias for kind in layers_of(e.model).kinds)


MEGATRON = (
    Refusal("model", lambda e: e.model.mla is not None, "its adapter has no latent attention"),
    Refusal(
        "model",
        lambda e: e.model.moe is not None and e.routing == "learned" and e.model.moe.balance != "none",
        "its terms that balance experts are different ones; use balance: none",
    ),
    Refusal(
        "model",
        _has_one_expert,
        "it refuses one expert a token whose weight is divided by itself; use normalize_weights=false",
    ),
    Refusal("model", _scores_lack, "it divides the weights of a token's experts by their sum; use normalize_weights"),
    Refusal(
        "engine_version",
        lambda e: e.engine_version not in ENGINE_VERSIONS["megatron"],
        f"the adapter is for {' and '.join(ENGINE_VERSIONS['megatron'])}",
    ),
    Refusal(
        "precision",
        _without_te(lambda e: e.precision not in ("bf16", "fp32")),
        "use bf16 or fp32; its fp8 needs Transformer Engine",
    ),
    Refusal(
        "precision",
        _with_te(lambda e: e.precision not in ("bf16", "fp8_tensorwise")),
        "with Transformer Engine use bf16 or fp8_tensorwise",
    ),
    Refusal("attention", lambda e: e.attention != "auto", "it chooses the kernel itself; use auto"),
    Refusal("zero_stage", lambda e: e.zero_stage > 1, "its distributed optimizer is stage 1; use 0 or 1"),
    Refusal(
        "dp_replicate",
        lambda e: e.zero_stage == 1 and e.dp_replicate > 1,
        "its adapter shards the optimizer over all of dp; use dp_shard alone",
    ),
    Refusal("cp", _without_te(lambda e: e.cp > 1), "its context parallelism needs Transformer Engine; use cp=1"),
    Refusal(
        "cp_kind",
        _with_te(lambda e: e.cp > 1 and e.cp_kind == "ring" and _has_windows(e) and not _has_sinks(e)),
        "Transformer Engine has no ring for windows; allgather or ulysses would work",
    ),
    Refusal(
        "cp_kind",
        _with_te(lambda e: e.cp > 1 and e.cp_kind != "ulysses" and _has_sinks(e)),
        "Transformer Engine divides sequences with sinks by heads alone; ulysses would work",
    ),
    Refusal("etp", lambda e: e.etp > 1 and _has_expert_biases(e), "it does not divide experts with biases; use 1"),
    Refusal(
        "etp",
        lambda e: e.model.moe is not None and e.tp > e.etp and e.ep == 1,
        "without expert parallelism it sums gradients of whole experts over dp alone, not over tp; use etp=tp, or an "
        "ep of 2 or more",
    ),
    Refusal(
        "tp", lambda e: e.model.vocab_size % e.tp > 0, "it splits the vocabulary evenly; tp must divide vocab_size"
    ),
    Refusal(
        "sequence_parallel",
        lambda e: e.model.moe is not None and e.tp > 1 and not e.sequence_parallel,
        "it trains experts with tp only under sequence parallelism; use true",
    ),
    Refusal("capacity_factor", lambda e: e.capacity_factor is not None, "its adapter drops no tokens; use null"),
    Refusal(
        "pp_schedule",
        lambda e: e.pp > 1 and e.pp_schedule not in ("1f1b", "interleaved_1f1b"),
        "use 1f1b or interleaved_1f1b",
    ),
    Refusal(
        "num_microbatches", _does_not_fill, "its interleaved schedule processes groups of pp; use a multiple of pp"
    ),
    Refusal(
        "compile",
        _without_te(lambda e: e.compile != "none"),
        "block means its CUDA graphs, which need Transformer Engine; use none",
    ),
    Refusal(
        "compile",
        _with_te(lambda e: e.compile != "none" and e.model.moe is not None),
        "its CUDA graph of a step cannot hold the dispatch of experts, whose sizes the host reads; use none",
    ),
    Refusal(
        "compile",
        lambda e: e.compile != "none" and e.recompute != "none",
        "its CUDA graph is not tested with recomputation; use none",
    ),
    Refusal(
        "recompute",
        lambda e: e.recompute not in ("none", "full"),
        "its selective recomputation is a different one; use none or full",
    ),
    Refusal("recompute_every", lambda e: e.recompute_every > 1, "its adapter recomputes every layer; use 1"),
)
"""Refusals of Megatron-Core as `workloads.adapters.megatron` runs it."""
