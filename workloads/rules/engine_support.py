"""What each training engine beside our own can be asked for; everything else is refused at planning. No torch here.

A refusal names the field, its value and what would work. An engine that would do something else in silence (another
precision, another sharding) is refused too: a row must be of what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from workloads.spec.experiment import ENGINE, ENGINES, Experiment
from workloads.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that an engine cannot do."""

    field: str
    holds: Callable[[Experiment], bool]
    why: str
    """Ends the sentence "torchtitan 0.2.2+2 cannot run tp=2: ..."."""
    on: str | None = None
    """Only on devices of this backend."""
    off: str | None = None
    """On all devices but those of this backend."""

    def speaks_of(self, backend: str) -> bool:
        return self.on in (None, backend) and self.off != backend


def torchtitan_model(model: ModelSpec) -> Literal["llama3", "qwen3"]:
    """Which of its dense models has the shape: its Llama, or its Qwen3 with what Llama lacks."""
    own_head_size = model.head_dim * model.num_heads != model.hidden_size
    return "qwen3" if model.tie_embeddings or model.qk_norm or own_head_size else "llama3"


_TORCHTITAN_PRECISIONS = ("bf16", "fp32", "fp8_tensorwise", "fp8_rowwise")
_SPLIT_BACKWARD = ("zero_bubble_v", "dualpipe_v")


def _is_fp8(e: Experiment) -> bool:
    return e.precision.startswith("fp8")


def _qwen3(e: Experiment) -> bool:
    return torchtitan_model(e.model) == "qwen3"


def _without_fsdp(e: Experiment) -> bool:
    return e.zero_stage == 0


def _uneven_tied_rows(e: Experiment) -> bool:
    return e.model.tie_embeddings and e.zero_stage > 0 and e.model.vocab_size % (e.dp_shard * e.cp * e.tp) > 0


def _breaks_rounds(e: Experiment) -> bool:
    """torch's interleaved schedule takes micro-batches in whole rounds, as many of them as fit into ranks."""
    return e.pp_schedule == "interleaved_1f1b" and e.num_microbatches % max(1, e.num_microbatches // e.pp) > 0


TORCHTITAN = (
    Refusal("model", lambda e: e.model.moe is not None, "its adapter builds dense layers only"),
    Refusal("model", lambda e: e.model.mla is not None, "its adapter has no latent attention"),
    Refusal(
        "model",
        _uneven_tied_rows,
        "FSDP pads the rows of embedding and head apart: they would drift; dp_shard * cp * tp must divide vocab_size",
    ),
    Refusal(
        "engine_version", lambda e: e.engine_version != ENGINES["torchtitan"], "this adapter is of another version"
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
    Refusal("precision", lambda e: _is_fp8(e) and e.tp > 1, "it was never run with tp; use tp=1 or bf16"),
    Refusal(
        "precision",
        lambda e: e.precision == "fp32" and (e.cp > 1 or (_qwen3(e) and e.tp > 1)),
        "its attention over cp, and of its Qwen3 over tp, has no fp32 kernels on CUDA; use bf16",
        on="cuda",
    ),
    Refusal("attention", lambda e: e.attention != "auto", "it picks the kernel itself; use auto"),
    Refusal("sequence_parallel", lambda e: e.tp > 1 and not e.sequence_parallel, "it is always on with tp"),
    Refusal(
        "seq_len",
        lambda e: e.seq_len % (2 * e.tp * e.cp) > 0,
        "it must be a multiple of 2 * tp * cp",
    ),
    Refusal(
        "zero_stage",
        lambda e: _without_fsdp(e) and e.dp > 1 and e.world_size > e.dp,
        "its DDP stands alone; shard with zero_stage 3 beside tp or cp, 1 or 3 beside pp",
    ),
    Refusal(
        "zero_stage",
        lambda e: _without_fsdp(e) and e.dp == 1 and e.cp > 1,
        "it shards over cp in any case; use 2 or 3, with pp 1 or 3",
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
        "zero_stage",
        lambda e: e.zero_stage == 3 and e.pp_schedule in _SPLIT_BACKWARD,
        "FSDP frees parameters between the halves of a backward, and gradients are lost; use 1",
    ),
    Refusal(
        "tp",
        lambda e: e.tp > 1 and _without_fsdp(e) and e.precision != "fp32",
        "without FSDP it would compute in fp32; shard over dp, or use precision=fp32",
    ),
    Refusal(
        "pp",
        lambda e: e.pp > 1 and _without_fsdp(e) and e.precision != "fp32",
        "without FSDP it would compute in fp32; shard over dp, or use precision=fp32",
    ),
    Refusal(
        "pp", lambda e: e.pp > 1 and _qwen3(e), "its Qwen3, which alone has such a model, has no pipeline; use pp=1"
    ),
    Refusal(
        "cp",
        lambda e: e.cp > 1 and e.tp > 1 and _qwen3(e),
        "its Qwen3, which alone has such a model, takes cp without tp alone; use tp=1",
    ),
    Refusal(
        "cp_kind", lambda e: e.cp_kind == "ulysses", "it exchanges keys and values, never heads; use ring or allgather"
    ),
    Refusal("pp_schedule", lambda e: e.pp_schedule == "interleaved_zero_bubble", "its adapter was never run with it"),
    Refusal(
        "num_microbatches",
        lambda e: e.pp_schedule == "dualpipe_v" and e.num_microbatches < 2 * e.pp,
        "its DualPipeV needs at least one for each of 2 * pp stages",
    ),
    Refusal("num_microbatches", _breaks_rounds, "its interleaved schedule takes whole rounds; use a multiple of pp"),
    Refusal("compile", lambda e: e.compile != "none" and e.pp_schedule in _SPLIT_BACKWARD, "they do not go together"),
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
    found = [entry for entry in REFUSALS[experiment.engine] if entry.speaks_of(backend) and entry.holds(experiment)]
    said = [f"{name} cannot run {entry.field}={_value(experiment, entry.field)}: {entry.why}" for entry in found]
    if backend != "cuda" and experiment.engine in ON_CUDA_ALONE:
        said.append(f"{name} cannot run on backend={backend}: its buffers and its clipping are on CUDA devices")
    return said


def _value(experiment: Experiment, field: str) -> object:
    return experiment.model.name if field == "model" else getattr(experiment, field)
