"""An experiment as DeepSpeed's JSON file, with notes for the user's code, because DeepSpeed's configuration holds no
model.

Names and meanings are those of ``deepspeed/runtime/config.py`` and its constants.
"""

from __future__ import annotations

from collections.abc import Mapping

from sweep.engine_configs.draft import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NOTHING,
    WEIGHT_DECAY,
    Choice,
    Draft,
    EngineConfig,
    Options,
    Target,
)
from sweep.engine_configs.texts import json_text
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS
from workloads.spec.recomputation import is_by_stage

TARGET = Target(name="deepspeed", version="DeepSpeed 0.19.8")
FILE = "deepspeed.json"

DEGREES = {
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "global_batch_size": "train_batch_size",
    "num_microbatches": "gradient_accumulation_steps",
    "zero_stage": "zero_optimization.stage",
}
PRECISION: Mapping[str, Choice] = {
    "bf16": Choice(options={"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"}),
    "fp16": Choice(options={"fp16.enabled": True, "data_types.grad_accum_dtype": "fp32"}),
    "fp32": NOTHING,
    "fp64": Choice(refused="its optimizers support bf16, fp16 and fp32"),
    **dict.fromkeys(("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"), Choice(refused="it has no fp8")),
    **dict.fromkeys(PLANNED_FORMATS, Choice(refused="it has neither mxfp8 nor nvfp4")),
}
SCHEDULES: Mapping[str, Choice] = {
    "1f1b": NOTHING,
    "dualpipe_v": Choice(note="DualPipeVModule in place of PipelineModule"),
    **dict.fromkeys(
        ("gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v"), Choice(refused="it has only 1f1b")
    ),
}
CONTEXT: Mapping[str, Choice] = {
    "ulysses": Choice(note="attention wrapped in DeepSpeed's Ulysses (DistributedAttention)"),
    "ring": Choice(refused="it exchanges heads; ulysses would work"),
    "allgather": Choice(refused="it exchanges heads; ulysses would work"),
}
SEQUENCE_PARALLEL: Mapping[bool, Choice] = {
    True: Choice(refused="with tp every rank holds the activations of all tokens; false would work"),
    False: NOTHING,
}
COMPILE: Mapping[str, Choice] = {"none": NOTHING, "block": Choice(note="engine.compile() after initialize()")}
ATTENTION: Mapping[str, Choice] = {
    "auto": NOTHING,
    **{name: Choice(note=f"the model's attention by torch's {name} kernel") for name in ("cudnn", "flash", "math")},
    "efficient": Choice(note="the model's attention by torch's memory-efficient kernel"),
    "flash4": Choice(note="the model's attention by FlashAttention-4 (package flash-attn-4)"),
}
ROUTING: Mapping[str, Choice] = {
    "balanced": Choice(warning="tokens follow the router: experts wait for the most loaded one"),
    "learned": NOTHING,
    "skewed": Choice(refused="it cannot force an expert load"),
}
OPTIMIZER: Options = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
    },
    "gradient_clipping": MAX_GRAD_NORM,
}


def export(experiment: Experiment, name: str) -> tuple[Draft, EngineConfig]:
    """Returns the draft, including refusals, and the configuration with its file."""
    e = experiment
    draft = Draft(e)
    draft.refuse_sizes(updates=("optimizer_offload",))
    draft.set({option: getattr(e, field) for field, option in DEGREES.items()})
    _model(draft)
    _parallelism(draft)
    draft.choose("precision", PRECISION)
    _recompute(draft)
    draft.choose("attention", ATTENTION)
    draft.choose("compile", COMPILE)
    if e.model.moe is not None:
        _experts(draft)
    draft.set(OPTIMIZER)
    if e.optimizer_offload:
        _offload(draft)
    return draft, EngineConfig(
        target=TARGET,
        name=name,
        files={FILE: json_text(draft.options)},
        start=f"{e.world_size} ranks: deepspeed YOUR_SCRIPT.py --deepspeed --deepspeed_config {FILE}",
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
    )


def _model(draft: Draft) -> None:
    e, model = draft.experiment, draft.experiment.model
    shape = (
        f"model: {model.num_layers} layers of {model.hidden_size}, {model.num_heads} heads of {model.head_dim} "
        f"({model.num_kv_heads} for keys and values), feed-forward {model.ffn_hidden_size}, vocabulary "
        f"{model.vocab_size}, rope_theta {model.rope_theta}, norm_eps {model.norm_eps}"
    )
    extra = {"tied embeddings": model.tie_embeddings, "norms of queries and keys": model.qk_norm}
    if model.mla is not None:
        extra[f"latent attention {model.mla}"] = True
    draft.notes.append(", ".join([shape, *(name for name, has in extra.items() if has)]) + ": in your code")
    draft.notes.append(f"seq_len: sequences of {e.seq_len} tokens, in your code; seed: torch.manual_seed({e.seed})")


def _parallelism(draft: Draft) -> None:
    e = draft.experiment
    if e.dp_replicate > 1 and e.dp_shard > 1:
        draft.refuse("dp_replicate", "it shards over all data-parallel ranks")
    if e.pp > 1:
        draft.choose("pp_schedule", SCHEDULES)
        if e.virtual_stages > 1 and e.pp_schedule != "dualpipe_v":
            draft.refuse("virtual_stages", "it has one stage per rank")
        split = f"pp_split {e.pp_split}" if e.pp_stages is None else f"pp_stages {e.pp_stages}"
        draft.notes.append(f"pp: PipelineModule(num_stages={e.pp}, partition_method=...), {split}")
        if e.model.tie_embeddings:
            draft.notes.append("model.tie_embeddings: TiedLayerSpec for embedding and head")
        if e.zero_stage >= 2:
            draft.refuse("zero_stage", "its pipeline allows 0 and 1")
        if e.cp > 1:
            draft.refuse("cp", "its pipeline has no sequence parallelism")
    if e.tp > 1:
        draft.choose("sequence_parallel", SEQUENCE_PARALLEL)
        draft.set({"tensor_parallel.autotp_size": e.tp})
    if e.zero_stage == 0 and e.precision in ("bf16", "fp16"):
        # Without ZeRO it neither keeps fp32 gradients nor, in bf16, fp32 parameters.
        if e.dp * e.cp == 1:
            draft.set({"zero_optimization.stage": 1})
            draft.notes.append("zero_stage: stage 1 on one rank shards nothing, and stage 0 has no fp32 gradients")
        else:
            draft.refuse("zero_stage", f"it has no fp32 gradients in {e.precision} then; 1 would work")
    if e.cp > 1:
        draft.choose("cp_kind", CONTEXT)
        # It makes the groups of ranks only if it finds both.
        draft.set({"sequence_parallel_size": e.cp, "data_parallel_size": e.dp})
    draft.notes.append(f"data parallelism {e.dp} follows from {e.world_size} ranks")


def _offload(draft: Draft) -> None:
    """ZeRO-Offload; only stage 3 knows a part of the optimizer (``ratio``)."""
    e = draft.experiment
    if e.zero_stage == 0:
        draft.refuse("optimizer_offload", "it has that with ZeRO; zero_stage=1 would work")
    elif e.zero_stage < 3 and e.optimizer_offload < 1:
        draft.refuse("optimizer_offload", "only ZeRO 3 can keep a part on the device; 1.0 would work, or zero_stage=3")
    ratio = {"ratio": e.optimizer_offload} if e.zero_stage == 3 else {}
    draft.set({"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True, **ratio}})
    draft.warnings.append(
        "optimizer_offload: master weights are on the host, too: the device needs less memory; the host's processors "
        "update them, which takes longer than is predicted here"
    )


def _recompute(draft: Draft) -> None:
    e = draft.experiment
    if e.recompute == "none":
        return
    if is_by_stage(e.recompute):
        draft.refuse("recompute", "it recomputes alike in every stage, and all layers; none or full would work")
    elif e.recompute != "full":
        draft.refuse("recompute", "it has no selective recomputation; none or full would work")
    elif e.pp > 1:
        draft.set({"pipeline.activation_checkpoint_interval": e.recompute_every})
        if e.recompute_every > 1:
            draft.refuse("recompute_every", "its interval groups layers, and all of them are recomputed")
    else:
        draft.notes.append(
            f"recompute: deepspeed.checkpointing.checkpoint around every layer, one of {e.recompute_every}"
        )


def _experts(draft: Draft) -> None:
    e = draft.experiment
    moe = e.model.moe
    assert moe is not None
    drop = "drop_tokens=False" if e.capacity_factor is None else f"capacity_factor={e.capacity_factor}"
    draft.notes.append(
        f"model.moe: deepspeed.moe.layer.MoE(num_experts={moe.num_experts}, ep_size={e.ep}, "
        f"k={moe.experts_per_token}, {drop}) in your code, with {moe}"
    )
    draft.choose("routing", ROUTING)
    if e.etp != e.tp:
        draft.refuse("etp", f"tensor parallelism also splits its experts; tp={e.tp} would work")
