"""An experiment as the Python configuration that torchtitan 0.3 runs: ``--module`` and ``--config``.

Names and meanings are those of ``torchtitan/config/configs.py``, ``trainer.py``, ``distributed/pipeline_parallel.py``
and the models' ``parallelize.py``. CUDA graphs are on there unless they are disabled.
"""

from __future__ import annotations

import math
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
    Target,
)
from sweep.engine_configs.torchtitan import COMPILE, ROUTING, SCHEDULES, SPLIT_BACKWARD, recompute_in_halves
from sweep.engine_configs.torchtitan03_models import LONGEST, flavor_text, named, shape_text
from sweep.engine_configs.torchtitan_kinds import gpt_oss_flavor, lacks
from workloads.costs.shape.partition import experiment_layers
from workloads.rules.torchtitan_support import FLEX_BLOCK, torchtitan_model
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS

TARGET = Target(name="torchtitan", version="torchtitan 0.3.0", lacks=lacks)
MODULE, CONFIG = "ultrasweep_torchtitan", "layout"
"""Arguments of ``--module`` and ``--config``."""
FILE = f"{MODULE}.py"

DEGREES = {
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "global_batch_size": "training.global_batch_size",
    "seq_len": "training.seq_len",
    "seed": "debug.seed",
}
GRAPHS = "training.disable_cuda_graphs"
_BF16 = {"training.mixed_precision_param": "bfloat16", "training.mixed_precision_reduce": "float32"}
FLOAT8 = 'Float8LinearConverter.Config(recipe_name="rowwise_with_gw_hp", filter_fqns=["lm_head"], '
PRECISION: Mapping[str, Choice] = {
    "bf16": Choice(options=_BF16),
    "fp32": Choice(options={**_BF16, "training.mixed_precision_param": "float32"}),
    "fp8_rowwise": Choice(options=_BF16),
    "fp8_tensorwise": Choice(
        refused="quantize.linear.float8.enable_fsdp_float8_all_gather is gone, its recipes are row-wise; fp8_rowwise "
        "would work"
    ),
    "fp16": Choice(refused="it has no loss scale; bf16 or fp32 would work"),
    "fp64": Choice(refused="it trains in bfloat16 or float32"),
    **dict.fromkeys(PLANNED_FORMATS, Choice(refused="of what it has, fp8_rowwise is nearest")),
    "fp8_blockwise": Choice(refused="its recipes are row-wise; fp8_rowwise would work"),
}
RECOMPUTE: Mapping[str, Choice] = {
    "none": Choice(options={"activation_checkpoint": None}),
    "full": Choice(options={"activation_checkpoint": "FullAC"}),
    "selective": Choice(
        options={"activation_checkpoint": "SelectiveAC"},
        warning="its own also recomputes every second matrix product: slower, with less memory",
    ),
}
CONTEXT: Mapping[str, Choice] = {
    "ring": Choice(
        refused="parallelism.context_parallel_rotate_method is gone, it gathers all keys and values; allgather would "
        "work"
    ),
    "allgather": NOTHING,
    "ulysses": Choice(refused="it exchanges keys and values, never heads; allgather would work"),
}
_FLEX = Choice(warning="it refuses scaled_dot_product_attention: flex attention runs, at another speed")
ATTENTION: Mapping[str, Choice] = {
    "auto": NOTHING,
    "flash": Choice(options={GRAPHS: True}, warning="its varlen attention, which CUDA graphs cannot contain"),
    **dict.fromkeys(("cudnn", "efficient", "math", "flash4"), _FLEX),
}
LOSS_CHUNKS = 8
"""Parts of a sequence whose logits exist at a time, as in torchtitan's own configurations."""
CLASSES = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "compile": "CompileConfig",
    "debug": "DebugConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "dataloader": "HuggingFaceTextDataLoader.Config",
}
"""Class of each section of `Trainer.Config` that has options here."""
BACKEND = (
    "# How tensors carry their sharding: FSDP of torch 2.13 cannot shard the parameters of torchtitan's default.\n"
    'BACKEND = "spmd_types" if torch.__version__ >= "2.14" else "partial_dtensor"\n'
)
IMPORTS = (
    "import torch",
    "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
    "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
    "from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig",
    "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
    "from torchtitan.protocols.model_spec import ModelSpec",
    "from torchtitan.trainer import Trainer",
)


def export(experiment: Experiment, name: str) -> tuple[Draft, EngineConfig]:
    """Returns the draft, including refusals, and the configuration. Its files are not usable if anything is refused."""
    e = experiment
    draft = Draft(e)
    draft.refuse_sizes(updates=("grad_reduce",))
    draft.set({option: getattr(e, field) for field, option in DEGREES.items()})
    draft.set({"training.local_batch_size": e.micro_batch_size, GRAPHS: False})
    imports, model = _model(draft)
    if e.pp > 1:
        _pipeline(draft)
    _sharding(draft)
    draft.choose("precision", PRECISION)
    if e.grad_reduce == "bf16":
        draft.set({"training.mixed_precision_reduce": "bfloat16"})
    draft.choose("recompute", RECOMPUTE)
    recompute_in_halves(draft)
    if e.recompute_every > 1:
        draft.refuse("recompute_every", "activation_checkpoint.selective_ac_option is gone: it recomputes every layer")
    if e.tp > 1:
        draft.set({"parallelism.enable_sequence_parallel": e.sequence_parallel})
    if e.cp > 1:
        draft.choose("cp_kind", CONTEXT)
        if e.seq_len % (FLEX_BLOCK * e.cp):
            draft.refuse("seq_len", f"with cp it must be a multiple of {FLEX_BLOCK} * cp")
    _attention(draft)
    draft.choose("compile", COMPILE)
    if e.precision.startswith("fp8") and e.compile == "none":
        draft.warnings.append("compile: without compilation its casts to fp8 are many small kernels: set compile=block")
    if e.compile != "none" and e.pp_schedule in SPLIT_BACKWARD:
        draft.refuse("compile", "it cannot compile with a schedule that splits backwards; none would work")
    if e.model.moe is not None:
        _experts(draft)
    draft.set({"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0})
    draft.set({"training.max_norm": MAX_GRAD_NORM, "training.steps": STEPS, "dataloader.dataset": "c4_test"})
    draft.notes.append("the data set is torchtitan's c4_test: random tokens would need Python code there")
    config = EngineConfig(
        target=TARGET,
        name=name,
        files={FILE: _module(draft, name, imports, model)},
        start=f"on {e.world_size} ranks, in the folder of the file, with torch 2.13 or newer: torchrun ... "
        f"-m torchtitan.train --module {MODULE} --config {CONFIG}",
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
    )
    return draft, config


def _model(draft: Draft) -> tuple[list[str], str]:
    """Imports and functions for the model specification; nothing if the shape is refused."""
    e = draft.experiment
    backend = "varlen" if e.attention == "flash" else "flex"
    converters = f"{FLOAT8}model_compile_enabled={e.compile == 'block'})" if e.precision.startswith("fp8") else ""
    if e.model.layers is not None:
        return _gpt_oss(draft, backend)
    if (flavor := named(e)) is not None:
        if flavor[0] == "llama3":
            draft.notes.append("its Llama scales rotary frequencies as Llama 3.1 does: other values, same speed")
        imports, text = flavor_text(*flavor, backend, converters)
    else:
        draft.notes.append(f"torchtitan has no flavor of this shape: {FILE} builds it from its parts")
        imports, text = shape_text(e, torchtitan_model(e.model), backend, converters)
    if converters:
        imports.append("from torchtitan.components.quantization import Float8LinearConverter")
    return imports, text


def _gpt_oss(draft: Draft, backend: str) -> tuple[list[str], str]:
    """`_model` for a flavor of gpt-oss; what of a layout was not tried with it is refused."""
    e, flavor = draft.experiment, gpt_oss_flavor(draft.experiment.model)
    if flavor is None:
        draft.refuse("model", "it is none of its flavors of gpt-oss")
        return [], ""
    for axis in ("pp", "cp"):
        if getattr(e, axis) > 1:
            draft.refuse(axis, "not tried with its gpt-oss")
    if e.precision.startswith("fp8"):
        draft.refuse("precision", "not tried with its gpt-oss; bf16 would work")
    if e.seq_len > LONGEST["gpt_oss"]:
        draft.refuse("seq_len", f"its gpt-oss has positions for {LONGEST['gpt_oss']}")
    draft.notes.append("its gpt-oss scales rotary frequencies as published: other values, same speed")
    return flavor_text("gpt_oss", flavor, backend, "")


def _sharding(draft: Draft) -> None:
    e, policy = draft.experiment, "parallelism.fsdp_reshard_after_forward"
    draft.set({policy: "never"})
    if e.zero_stage == 0:
        if e.cp > 1:
            draft.refuse("zero_stage", "it always shards over cp; 2 or 3 would work, with pp 1 or 3")
        elif e.dp > 1 and e.num_microbatches > 1 and e.pp == 1:
            draft.warnings.append("zero_stage: gradients are reduced after every micro-batch: slower")
    elif e.zero_stage == 1 and e.pp == 1:
        draft.refuse("zero_stage", "FSDP shards gradients, too; 2 would work")
    elif e.zero_stage == 2 and e.pp > 1:
        draft.refuse("zero_stage", "its pipeline reduces gradients once per step; 1 or 3 would work")
    elif e.zero_stage == 3 and e.pp_schedule in SPLIT_BACKWARD:
        draft.refuse("zero_stage", "FSDP loses gradients if the backward is split; 1 would work")
    elif e.zero_stage == 3:
        draft.set({policy: "always" if e.pp > 1 else "default"})
    elif e.zero_stage == 2 and e.num_microbatches > 1:
        draft.warnings.append("zero_stage: gradients are reduced after every micro-batch: slower")


def _pipeline(draft: Draft) -> None:
    e = draft.experiment
    draft.choose("pp_schedule", SCHEDULES)
    stages = experiment_layers(e)
    parts = [[f"layers.{layer}" for layer in layers] for layers in stages]
    if not all(parts[1:-1]):
        draft.refuse("pp_stages", "a stage without layers between the first and the last one has no module there")
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    draft.set(
        {
            "parallelism.module_fqns_per_model_part": parts,
            "parallelism.pipeline_parallel_microbatch_size": e.micro_batch_size,
            "training.local_batch_size": e.micro_batch_size * e.num_microbatches,
            GRAPHS: True,
        }
    )
    draft.warnings.append("pp: its CUDA graphs cannot contain a pipeline, they are disabled")
    if e.pp_schedule in SPLIT_BACKWARD:
        draft.warnings.append(
            "pp_schedule: the loss is computed whole, with more memory: in chunks the last norm would get no gradient"
        )
    draft.notes.append("pp: its pipelines need torch 2.14 or newer")
    if e.model.tie_embeddings:
        draft.refuse("model.tie_embeddings", "it cannot tie embeddings across stages")


def _attention(draft: Draft) -> None:
    e = draft.experiment
    draft.choose("attention", ATTENTION)
    if e.attention != "flash":
        return
    if e.cp > 1:
        draft.refuse("attention", "its varlen attention has no context parallelism; auto would work")
    elif e.precision == "fp32":
        draft.refuse("attention", "its varlen attention computes in bfloat16; auto would work")


def _experts(draft: Draft) -> None:
    e = draft.experiment
    assert e.model.moe is not None
    draft.choose("routing", ROUTING)
    if e.ep == 1 and e.etp != e.tp:
        draft.refuse("etp", "with ep=1 tensor parallelism also splits its experts")
    if e.ep > 1:
        draft.set({GRAPHS: True})
        draft.warnings.append("ep: its CUDA graphs cannot contain the exchange of tokens, they are disabled")
        if e.etp != 1:
            draft.refuse("etp", "parallelism.expert_tensor_parallel_degree is gone: with ep it is 1")
    if e.capacity_factor is not None:
        draft.refuse("capacity_factor", "its experts drop no token")
    if e.routing == "learned" and e.model.moe.balance == "aux_loss":
        draft.refuse("model.moe.balance", "it balances only by a bias")
    if e.precision.startswith("fp8"):
        draft.warnings.append("precision: routed experts stay in bf16: slower")


def _module(draft: Draft, name: str, imports: list[str], model: str) -> str:
    """Text of the Python module."""
    e = draft.experiment
    sections: dict[str, dict[str, str]] = {section: {} for section in CLASSES}
    checkpointing = draft.options.get("activation_checkpoint")
    for option, value in draft.options.items():
        section, _, key = option.partition(".")
        if key:
            sections[section][key] = repr(value)
    sections["parallelism"]["spmd_backend"] = "BACKEND"
    if checkpointing:
        imports = [*imports, f"from torchtitan.distributed.activation_checkpoint import {checkpointing}"]
    fields = []
    for section, options in sections.items():
        lines = "".join(f"            {key}={value},\n" for key, value in options.items())
        fields.append(f"        {section}={CLASSES[section]}(\n{lines}        ),\n")
    loss = f"CrossEntropyLoss.Config(global_vocab_size={e.model.vocab_size})"
    if e.pp_schedule not in SPLIT_BACKWARD:
        loss = f"ChunkedLossWrapper.Config(num_chunks={math.gcd(LOSS_CHUNKS, e.seq_len // e.cp)}, loss_fn={loss})"
    head = "".join(f"\nwarning: {text}" for text in draft.warnings)
    optimizer = f"lr={LEARNING_RATE!r}, betas={BETAS!r}, eps={EPSILON!r}, weight_decay={WEIGHT_DECAY!r}"
    return (
        f'"""{name} for {TARGET.version}: --module {MODULE} --config {CONFIG}\n{head}\n"""\n\n'
        + "".join(f"{line}\n" for line in sorted({*IMPORTS, *imports}))
        + f"\n{BACKEND}\n\n{model}\n\n"
        + f"def {CONFIG}() -> Trainer.Config:\n"
        + "    return Trainer.Config(\n"
        + "        model_spec=model_spec(),\n"
        + f"        loss={loss},\n"
        + f"        optimizer=default_adamw({optimizer}),\n"
        + f"        activation_checkpoint={f'{checkpointing}.Config()' if checkpointing else None},\n"
        + "".join(fields)
        + "    )\n"
    )
