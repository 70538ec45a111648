"""An experiment as nanotron's YAML file.

Names and meanings are those of ``src/nanotron/config`` at the commit named here; the released 0.4 lacks context
parallelism, recomputation and ``rope_theta``.
"""

from __future__ import annotations

from collections.abc import Mapping

from sweep.engine_configs.draft import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NOTHING,
    STEPS,
    WEIGHT_DECAY,
    Choice,
    Draft,
    EngineConfig,
    Options,
    Target,
)
from sweep.engine_configs.texts import commented, yaml_text
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

TARGET = Target(name="nanotron", version="nanotron main, commit 2411b022")
FILE = "nanotron.yaml"
_MODEL = "model.model_config"

DEGREES = {
    "dp": "parallelism.dp",
    "tp": "parallelism.tp",
    "cp": "parallelism.context_parallel_size",
    "pp": "parallelism.pp",
    "ep": "parallelism.expert_parallel_size",
    "micro_batch_size": "tokens.micro_batch_size",
    "num_microbatches": "tokens.batch_accumulation_per_replica",
    "seq_len": "tokens.sequence_length",
    "seed": "general.seed",
}
SHAPE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
ZERO: Mapping[int, Choice] = {
    0: Choice(options={"optimizer.zero_stage": 0}),
    1: Choice(options={"optimizer.zero_stage": 1}),
    2: Choice(refused="it shards only the optimizer; 0 or 1 would work"),
    3: Choice(refused="it shards only the optimizer; 0 or 1 would work"),
}
PRECISION: Mapping[str, Choice] = {
    "bf16": Choice(options={"model.dtype": "bfloat16", "optimizer.accumulate_grad_in_fp32": True}),
    "fp32": Choice(options={"model.dtype": "float32", "optimizer.accumulate_grad_in_fp32": False}),
    "fp16": Choice(refused="it has no loss scale; bf16 or fp32 would work"),
    "fp64": Choice(refused="it trains in bfloat16 or float32"),
}
SCHEDULES: Mapping[str, Choice] = {
    "gpipe": Choice(options={"parallelism.pp_engine": "afab"}),
    "1f1b": Choice(options={"parallelism.pp_engine": "1f1b"}),
    **dict.fromkeys(
        ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"),
        Choice(refused="it has only gpipe (afab) and 1f1b, with one stage per rank"),
    ),
}
RECOMPUTE: Mapping[str, Choice] = {
    "none": Choice(options={"parallelism.recompute_layer": False}),
    "full": Choice(options={"parallelism.recompute_layer": True}),
}
SEQUENCE_PARALLEL: Mapping[bool, Choice] = {
    True: Choice(options={"parallelism.tp_mode": "REDUCE_SCATTER", "parallelism.tp_linear_async_communication": True}),
    False: Choice(options={"parallelism.tp_mode": "ALL_REDUCE", "parallelism.tp_linear_async_communication": False}),
}
CONTEXT: Mapping[str, Choice] = {
    "ring": Choice(options={f"{_MODEL}._attn_implementation": "ring"}),
    "allgather": Choice(refused="it has only ring"),
    "ulysses": Choice(refused="it has only ring"),
}
_FLASH = {f"{_MODEL}._attn_implementation": "flash_attention_2"}
_SDPA = {f"{_MODEL}._attn_implementation": "sdpa"}
ATTENTION: Mapping[str, Choice] = {
    "auto": Choice(options=_FLASH, note="FlashAttention 2, where torch would pick a kernel"),
    "flash": Choice(options=_FLASH),
    **dict.fromkeys(
        ("cudnn", "efficient", "math", "flash4"),
        Choice(options=_SDPA, warning="torch picks the kernel there, whatever is asked"),
    ),
}
COMPILE: Mapping[str, Choice] = {"none": NOTHING, "block": Choice(warning="it is not compiled there: slower")}
ROUTING: Mapping[str, Choice] = {
    "balanced": Choice(warning="tokens follow the router: experts wait for the most loaded one"),
    "learned": NOTHING,
    "skewed": Choice(refused="it cannot force an expert load"),
}
SCHEDULE: Options = {
    "learning_rate": LEARNING_RATE,
    "lr_warmup_steps": 0,
    "lr_warmup_style": "constant",
    "lr_decay_style": "linear",
    "lr_decay_steps": STEPS,
    "min_decay_lr": LEARNING_RATE,
}
OPTIMIZER: Options = {
    "optimizer.weight_decay": WEIGHT_DECAY,
    "optimizer.clip_grad": MAX_GRAD_NORM,
    "optimizer.optimizer_factory": {
        "name": "adamW",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_eps": EPSILON,
        "torch_adam_is_fused": True,
    },
    "optimizer.learning_rate_scheduler": SCHEDULE,
    "tokens.train_steps": STEPS,
    "tokens.val_check_interval": -1,
}


def export(experiment: Experiment, name: str) -> tuple[Draft, EngineConfig]:
    """Returns the draft, including refusals, and the configuration with its file."""
    e = experiment
    draft = Draft(e)
    draft.refuse_sizes(pads_vocabulary=True)
    draft.set({"general.project": "ultrasweep", "general.run": name})
    _model(draft)
    draft.set({option: getattr(e, field) for field, option in DEGREES.items()})
    draft.choose("zero_stage", ZERO)
    if e.dp_replicate > 1 and e.dp_shard > 1:
        draft.refuse("dp_replicate", "it shards over all data-parallel ranks")
    if e.zero_stage == 1 and e.cp > 1:
        draft.refuse("zero_stage", "it shards over data-parallel ranks, not over cp; 0 would work")
    if e.pp > 1:
        draft.choose("pp_schedule", SCHEDULES)
        if e.virtual_stages > 1:
            draft.refuse("virtual_stages", "it has one stage per rank")
        if e.pp_stages is not None:
            draft.refuse("pp_stages", "it splits layers by a rule of its own; null would work")
        draft.warnings.append(f"pp_split: {e.pp_split} here; nanotron splits layers by another rule: slower")
    draft.choose("precision", PRECISION)
    draft.choose("recompute", RECOMPUTE)
    if e.recompute_every > 1:
        draft.refuse("recompute_every", "it recomputes every layer or none")
    if e.tp > 1:
        draft.choose("sequence_parallel", SEQUENCE_PARALLEL)
    draft.choose("attention", ATTENTION)
    if e.cp > 1:
        draft.choose("cp_kind", CONTEXT)
    draft.choose("compile", COMPILE)
    if e.model.moe is not None:
        _experts(draft, e.model.moe)
    draft.set(OPTIMIZER)
    stage = {
        "name": "random",
        "start_training_step": 1,
        "data": {"dataset": None, "num_loading_workers": 1, "seed": e.seed},
    }
    draft.set({"data_stages": [stage]})
    draft.notes.append("the same seed gives other initial weights there")
    head = [f"{name} for {TARGET.version}", *(f"warning: {text}" for text in draft.warnings)]
    return draft, EngineConfig(
        target=TARGET,
        name=name,
        files={FILE: commented(head) + yaml_text(draft.options)},
        start=f"{e.world_size} ranks: torchrun ... run_train.py --config-file {FILE}",
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
    )


def _model(draft: Draft) -> None:
    """Llama for the plain shape; nanotron's Qwen2 model for context parallelism and experts."""
    e, model = draft.experiment, draft.experiment.model
    qwen = e.cp > 1 or model.moe is not None
    draft.set({f"{_MODEL}.{'is_qwen2_config' if qwen else 'is_llama_config'}": True})
    draft.set({f"{_MODEL}.{option}": getattr(model, field) for field, option in SHAPE.items()})
    draft.set({f"{_MODEL}.max_position_embeddings": e.seq_len})
    draft.set({"model.make_vocab_size_divisible_by": e.pad_vocab_to or 1})
    draft.set({"model.init_method": {"std": 0.02}, "tokenizer.tokenizer_name_or_path": None})
    if model.mla is not None:
        draft.refuse("model.mla", "it has no latent attention")
    elif model.head_dim * model.num_heads != model.hidden_size:
        draft.refuse("model.head_dim", f"hidden_size / num_heads, {model.hidden_size // model.num_heads}, would work")
    if model.qk_norm:
        draft.refuse("model.qk_norm", "it has no norms of queries and keys")


def _experts(draft: Draft, moe: MoESpec) -> None:
    e = draft.experiment
    experts = {
        "num_experts": moe.num_experts,
        "top_k": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_hidden_size,
    }
    draft.set({f"{_MODEL}.moe_config": experts})
    if moe.num_shared_experts:
        draft.refuse("model.moe.num_shared_experts", "its shared expert differs")
    if moe.num_dense_layers:
        draft.refuse("model.moe.num_dense_layers", "all its layers have experts")
    if moe.gate != "softmax":
        draft.refuse("model.moe.gate", "its router has only softmax")
    if not moe.normalize_weights:
        draft.refuse("model.moe.normalize_weights", "it has no such choice")
    if moe.weight_scale != 1.0:
        draft.refuse("model.moe.weight_scale", "it has no such choice")
    if moe.balance != "none" and e.routing == "learned":
        draft.refuse("model.moe.balance", "it has no such choice")
    draft.choose("routing", ROUTING)
    if e.etp != e.tp:
        draft.refuse("etp", f"tensor parallelism also splits its experts; tp={e.tp} would work")
    if e.capacity_factor is not None:
        draft.refuse("capacity_factor", "its experts drop no token")
