"""What each training engine beside our own can be asked for; everything else is refused at planning. No torch here.

A refusal names the field, its value and what would work. An engine that would do something else in silence (another
precision, another sharding) is refused too: a row must be of what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workloads.experiment import ENGINE, ENGINES, Experiment


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that an engine cannot do."""

    field: str
    holds: Callable[[Experiment], bool]
    why: str
    """Ends the sentence "torchtitan 0.2.2+1 cannot run tp=2: ..."."""


def _head_size(e: Experiment) -> bool:
    return e.model.head_dim * e.model.num_heads != e.model.hidden_size


TORCHTITAN = (
    Refusal("model", lambda e: e.model.moe is not None, "its adapter builds dense layers only"),
    Refusal("model", lambda e: e.model.mla is not None, "its adapter has no latent attention"),
    Refusal("model", lambda e: e.model.tie_embeddings, "its Llama has an output projection of its own; untie them"),
    Refusal("model", lambda e: e.model.qk_norm, "its Llama does not normalise queries and keys"),
    Refusal("model", _head_size, "head_dim must be hidden_size / num_heads in its Llama"),
    Refusal(
        "engine_version", lambda e: e.engine_version != ENGINES["torchtitan"], "this adapter is of another version"
    ),
    Refusal("precision", lambda e: e.precision not in ("bf16", "fp32"), "use bf16 or fp32"),
    Refusal("attention", lambda e: e.attention != "auto", "it picks the kernel itself; use auto"),
    Refusal("sequence_parallel", lambda e: e.tp > 1 and not e.sequence_parallel, "it is always on with tp"),
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 0 and e.dp > 1 and e.world_size > e.dp,
        "its DDP stands alone; shard with zero_stage 3 beside tp or cp, 1 or 3 beside pp",
    ),
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 1 and e.pp == 1,
        "it reduces gradients after every micro-batch; use 2 or 3, or pp",
    ),
    Refusal(
        "zero_stage",
        lambda e: e.zero_stage == 2 and e.pp > 1,
        "its schedules reduce gradients once a step; use 1 or 3",
    ),
    Refusal(
        "tp",
        lambda e: e.tp > 1 and e.zero_stage == 0 and e.precision != "fp32",
        "without FSDP it would compute in fp32; shard over dp, or use precision=fp32",
    ),
    Refusal(
        "pp",
        lambda e: e.pp > 1 and e.zero_stage == 0 and e.precision != "fp32",
        "without FSDP it would compute in fp32; shard over dp, or use precision=fp32",
    ),
    Refusal("cp", lambda e: e.cp > 1, "its adapter does not drive context parallelism; use cp=1"),
    Refusal("pp_schedule", lambda e: e.pp_schedule == "interleaved_zero_bubble", "its adapter was never run with it"),
    Refusal("pp_schedule", lambda e: e.pp_schedule == "dualpipe_v", "its adapter was never run with it"),
    Refusal("compile", lambda e: e.compile != "none" and e.pp_schedule == "zero_bubble_v", "they do not go together"),
    Refusal("recompute", lambda e: e.recompute not in ("none", "full"), "its selective is another; use none or full"),
    Refusal("recompute_every", lambda e: e.recompute_every > 1, "it recomputes every layer; use 1"),
)
"""Of torchtitan 0.2.2 as `workloads.adapters.torchtitan` drives it."""


def _does_not_fill(e: Experiment) -> bool:
    """Its interleaved schedule takes micro-batches in groups of as many as ranks; the last group must be whole, too."""
    return e.pp_schedule == "interleaved_1f1b" and (e.num_microbatches < e.pp or e.num_microbatches % e.pp > 0)


MEGATRON = (
    Refusal("model", lambda e: e.model.moe is not None, "its adapter builds dense layers only"),
    Refusal("model", lambda e: e.model.mla is not None, "its adapter has no latent attention"),
    Refusal("model", lambda e: e.model.tie_embeddings, "its adapter gives the head weights of its own; untie them"),
    Refusal("model", lambda e: e.model.qk_norm, "its adapter does not normalise queries and keys"),
    Refusal("engine_version", lambda e: e.engine_version != ENGINES["megatron"], "this adapter is of another version"),
    Refusal(
        "precision", lambda e: e.precision not in ("bf16", "fp32"), "use bf16 or fp32; its fp8 needs Transformer Engine"
    ),
    Refusal("attention", lambda e: e.attention != "auto", "its adapter takes torch's fused attention; use auto"),
    Refusal("zero_stage", lambda e: e.zero_stage > 1, "its distributed optimizer is stage 1; use 0 or 1"),
    Refusal(
        "dp_replicate",
        lambda e: e.zero_stage == 1 and e.dp_replicate > 1,
        "its adapter shards the optimizer over all of dp; use dp_shard alone",
    ),
    Refusal("cp", lambda e: e.cp > 1, "its context parallelism needs Transformer Engine; use cp=1"),
    Refusal("tp", lambda e: e.model.vocab_size % e.tp > 0, "it splits the vocabulary evenly; tp must divide it"),
    Refusal(
        "pp_schedule",
        lambda e: e.pp > 1 and e.pp_schedule not in ("1f1b", "interleaved_1f1b"),
        "it has 1f1b and interleaved_1f1b",
    ),
    Refusal("num_microbatches", _does_not_fill, "its interleaved schedule takes them in groups of pp; use a multiple"),
    Refusal("compile", lambda e: e.compile != "none", "its adapter compiles no layers"),
    Refusal("recompute", lambda e: e.recompute not in ("none", "full"), "its selective is another; use none or full"),
    Refusal("recompute_every", lambda e: e.recompute_every > 1, "its adapter recomputes every layer; use 1"),
)
"""Of Megatron-Core 0.16.1 as `workloads.adapters.megatron` drives it."""

REFUSALS: Mapping[str, tuple[Refusal, ...]] = {ENGINE: (), "torchtitan": TORCHTITAN, "megatron": MEGATRON}


ON_CUDA_ALONE = ("megatron",)
"""Engines that no other device will do for."""


def is_own(experiment: Experiment) -> bool:
    """Whether closed forms, rehearsals and probes speak of this experiment: they know no engine but this project's."""
    return experiment.engine == ENGINE


def refused(experiment: Experiment, backend: str = "cuda") -> list[str]:
    """Why the experiment's engine cannot run it on devices of ``backend``, one sentence a field; empty when it can."""
    if is_own(experiment):
        return []
    name = f"{experiment.engine} {experiment.engine_version}"
    if experiment.engine not in REFUSALS:
        return [f"engine={experiment.engine} is not one of {', '.join(REFUSALS)}"]
    found = [entry for entry in REFUSALS[experiment.engine] if entry.holds(experiment)]
    said = [f"{name} cannot run {entry.field}={_value(experiment, entry.field)}: {entry.why}" for entry in found]
    if backend != "cuda" and experiment.engine in ON_CUDA_ALONE:
        said.append(f"{name} cannot run on backend={backend}: its buffers and its clipping are on CUDA devices")
    return said


def _value(experiment: Experiment, field: str) -> object:
    return experiment.model.name if field == "model" else getattr(experiment, field)
