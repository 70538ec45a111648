"""An experiment as accelerate's configuration file, transformers' configuration of the model, and a script with the
training loop that both are for.

Names and meanings are those of ``accelerate/commands/config/config_args.py``, ``accelerate/commands/launch.py`` and
``transformers/models``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweep.engine_configs.draft import MAX_GRAD_NORM, NOTHING, Choice, Draft, EngineConfig, Target
from sweep.engine_configs.texts import json_text, yaml_text
from sweep.engine_configs.transformers_script import script
from workloads.rules.transformers_kinds import families_lack, transformers_config
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS

TARGET = Target(name="transformers", version="transformers 5.24.0 with accelerate 1.15.0", lacks=families_lack)
FILE, DEEPSPEED_FILE, MODEL_FILE, SCRIPT = "accelerate.yaml", "accelerate_deepspeed.yaml", "config.json", "train.py"
_WITHOUT: Mapping[str, tuple[str, ...]] = {
    "tp": ("sequence_parallel", "etp"),
    "pp": ("pp_schedule", "virtual_stages", "pp_split", "pp_stages"),
    "cp": ("cp_kind",),
    "ep": (),
}
"""Axes that are not written, and the fields that have an effect with them alone."""

PRECISION: Mapping[str, Choice] = {
    "bf16": Choice(options={"mixed_precision": "bf16"}),
    "fp16": Choice(options={"mixed_precision": "fp16"}),
    "fp32": Choice(options={"mixed_precision": "no"}),
    "fp64": Choice(refused="its norms compute in fp32"),
    **dict.fromkeys(
        ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"), Choice(refused="its fp8 recipes are other ones")
    ),
    **dict.fromkeys(PLANNED_FORMATS, Choice(refused="it has neither mxfp8 nor nvfp4")),
}
COMPILE: Mapping[str, Choice] = {
    "none": NOTHING,
    "block": Choice(
        options={
            "dynamo_config.dynamo_backend": "INDUCTOR",
            "dynamo_config.dynamo_mode": "default",
            "dynamo_config.dynamo_use_fullgraph": False,
            "dynamo_config.dynamo_use_dynamic": False,
            "dynamo_config.dynamo_use_regional_compilation": True,
        }
    ),
}
ATTENTION: Mapping[str, Choice] = {
    "auto": NOTHING,
    **{
        name: Choice(note=f"the training loop under torch.nn.attention.sdpa_kernel(SDPBackend.{backend})")
        for name, backend in {
            "cudnn": "CUDNN_ATTENTION",
            "flash": "FLASH_ATTENTION",
            "efficient": "EFFICIENT_ATTENTION",
            "math": "MATH",
        }.items()
    },
}
ROUTING: Mapping[str, Choice] = {
    "balanced": Choice(warning="tokens follow the router: experts wait for the most loaded one"),
    "learned": NOTHING,
    "skewed": Choice(refused="it cannot force an expert load"),
}
_WITHOUT_SDPA = ("gpt_oss",)
"""Families whose class refuses torch's fused attention: its softmax has no sinks."""

_EPSILON_OF_LATENTS = 1e-6
_WITHOUT_LOSS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "llama4_text", "nemotron_h")
"""Families whose class reads ``router_aux_loss_coef`` nowhere."""


def export(experiment: Experiment, name: str) -> tuple[Draft, EngineConfig]:
    """Returns the draft, including refusals, and the configuration with its files."""
    e, draft = experiment, Draft(experiment)
    draft.refuse_sizes()
    draft.set({"compute_environment": "LOCAL_MACHINE", "distributed_type": _kind(e), "debug": False})
    draft.choose("precision", PRECISION)
    draft.set({"num_machines": 1, "num_processes": e.world_size, "machine_rank": 0, "main_training_function": "main"})
    _parallelism(draft)
    _recompute(draft)
    draft.choose("compile", COMPILE)
    draft.choose("attention", ATTENTION)
    lacking = families_lack(e.model)
    if lacking:
        draft.refuse("model", f"no family has {'; '.join(lacking)}")
    else:
        _experts(draft)
    files = {FILE: yaml_text(draft.options)}
    if e.zero_stage > 0 and not (e.dp_replicate > 1 and e.dp_shard > 1):
        files[DEEPSPEED_FILE] = yaml_text(_deepspeed(draft))
        draft.notes.append(f"{DEEPSPEED_FILE}: DeepSpeed's ZeRO instead; gradients are reduced in {e.precision}")
    if e.num_microbatches > 1 and e.zero_stage > 1:
        draft.warnings.append("zero_stage: parameters are gathered again for every micro-batch: slower")
    if e.zero_stage > 0 and e.precision == "bf16":
        draft.notes.append(f"{SCRIPT} has gradients reduced in fp32: accelerate's own policy reduces them in bf16")
    draft.notes += [
        f"more nodes: --num_machines N --machine_rank R --main_process_ip FIRST, {e.world_size} processes in all",
        "the data are random tokens",
    ]
    if e.model.mla is not None and e.model.norm_eps != _EPSILON_OF_LATENTS:
        draft.notes.append(f"model.norm_eps: its norms of latents have {_EPSILON_OF_LATENTS:g} in any case")
    if not lacking:
        config = model_config(e)
        files |= {MODEL_FILE: json_text(config), SCRIPT: script(e, fused=config["model_type"] not in _WITHOUT_SDPA)}
    return draft, EngineConfig(
        target=TARGET,
        name=name,
        files=files,
        start=f"accelerate launch --config_file {FILE} {SCRIPT}",
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
    )


def model_config(e: Experiment) -> dict[str, Any]:
    """Transformers' configuration of the model."""
    fields, moe = transformers_config(e.model), e.model.moe
    assert fields is not None, "refused before"
    if moe is not None and moe.balance == "aux_loss":
        fields |= {"output_router_logits": True, "router_aux_loss_coef": moe.balance_coefficient}
    return {
        **fields,
        "max_position_embeddings": e.seq_len,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _kind(e: Experiment) -> str:
    if e.zero_stage > 0:
        return "FSDP"
    return "MULTI_GPU" if e.world_size > 1 else "NO"


def _parallelism(draft: Draft) -> None:
    e = draft.experiment
    for axis, fields in _WITHOUT.items():
        if getattr(e, axis) > 1:
            without = ", ".join(f"{field} {getattr(e, field)}" for field in fields)
            draft.refuse(axis, f"only data parallelism is written{f', no {without}' if without else ''}; 1 would work")
    if e.zero_stage == 0:
        return
    draft.set(
        {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": e.zero_stage == 3,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_activation_checkpointing": e.recompute == "full",
            "fsdp_config.fsdp_cpu_ram_efficient_loading": False,
            "fsdp_config.fsdp_offload_params": False,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    )
    if e.dp_replicate > 1:
        draft.set(
            {
                "parallelism_config.parallelism_config_dp_replicate_size": e.dp_replicate,
                "parallelism_config.parallelism_config_dp_shard_size": e.dp_shard,
                "parallelism_config.parallelism_config_tp_size": 1,
                "parallelism_config.parallelism_config_cp_size": 1,
            }
        )


def _recompute(draft: Draft) -> None:
    e = draft.experiment
    if e.recompute not in ("none", "full"):
        draft.refuse("recompute", "it recomputes whole layers; none or full would work")
    elif e.recompute == "full" and e.recompute_every > 1:
        draft.refuse("recompute_every", "it recomputes every layer; 1 would work")


def _experts(draft: Draft) -> None:
    e, moe = draft.experiment, draft.experiment.model.moe
    if moe is None:
        return
    draft.choose("routing", ROUTING)
    if e.capacity_factor is not None:
        draft.refuse("capacity_factor", "it drops no tokens")
    if moe.balance == "bias":
        step = f"{moe.balance_coefficient:g}"
        draft.notes.append(f"model.moe.balance: no code there moves the biases of the choice of experts (by {step})")
    elif moe.balance == "aux_loss" and model_config(e)["model_type"] in _WITHOUT_LOSS:
        draft.notes.append("model.moe.balance: its class does not compute the loss that balances experts")
    elif moe.balance == "aux_loss":
        draft.notes.append("model.moe.balance: its loss is one of all tokens, not of each sequence")


def _deepspeed(draft: Draft) -> dict[str, Any]:
    """The options of accelerate for the same stage of DeepSpeed."""
    e = draft.experiment
    kept = {
        name: value
        for name, value in draft.options.items()
        if not name.startswith(("fsdp_config", "dynamo_config", "parallelism_config"))
    }
    return {
        **kept,
        "distributed_type": "DEEPSPEED",
        "deepspeed_config.zero_stage": e.zero_stage,
        "deepspeed_config.gradient_accumulation_steps": e.num_microbatches,
        "deepspeed_config.gradient_clipping": MAX_GRAD_NORM,
        "deepspeed_config.offload_optimizer_device": "none",
        "deepspeed_config.offload_param_device": "none",
        "deepspeed_config.zero3_init_flag": False,
    }
