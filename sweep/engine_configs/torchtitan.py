"""An experiment as torchtitan's TOML file, with a Python module for models that are not among torchtitan's flavors.

Names and meanings are those of ``torchtitan/config/job_config.py``, ``distributed/pipeline_parallel.py`` and the
models' ``parallelize.py``. Later versions (0.3) do not read TOML (`sweep.engine_configs.torchtitan03`).
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
    Target,
)
from sweep.engine_configs.texts import commented, toml
from sweep.engine_configs.torchtitan_kinds import lacks_in_02
from sweep.engine_configs.torchtitan_models import MODULE, flavour_of, model_class, module_text
from workloads.costs.shape.partition import experiment_layers
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS

TARGET = Target(name="torchtitan-0.2", version="torchtitan 0.2.2", lacks=lacks_in_02)
FILE = "torchtitan.toml"

DEGREES = {
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "global_batch_size": "training.global_batch_size",
    "seq_len": "training.seq_len",
    "seed": "debug.seed",
}
_BF16 = {"training.mixed_precision_param": "bfloat16", "training.mixed_precision_reduce": "float32"}
_FLOAT8 = {**_BF16, "model.converters": ["quantize.linear.float8"]}
PRECISION: Mapping[str, Choice] = {
    "bf16": Choice(options=_BF16),
    "fp32": Choice(options={**_BF16, "training.mixed_precision_param": "float32"}),
    "fp8_tensorwise": Choice(
        options={
            **_FLOAT8,
            "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
            "quantize.linear.float8.filter_fqns": ["output"],
        }
    ),
    "fp8_rowwise": Choice(
        options={
            **_FLOAT8,
            "quantize.linear.float8.recipe_name": "rowwise_with_gw_hp",
            "quantize.linear.float8.filter_fqns": ["output"],
        }
    ),
    "fp16": Choice(refused="it has no loss scale; bf16 or fp32 would work"),
    "fp64": Choice(refused="it trains in bfloat16 or float32"),
    **dict.fromkeys(PLANNED_FORMATS, Choice(refused="of what it has, fp8_rowwise is nearest")),
    "fp8_blockwise": Choice(refused="its recipes are tensor-wise and row-wise"),
}
_PER_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
RECOMPUTE: Mapping[str, Choice] = {
    "none": Choice(options={"activation_checkpoint.mode": "none"}),
    "full": Choice(options={"activation_checkpoint.mode": "full"}),
    "selective": Choice(
        options=_PER_OP,
        warning='its "op" also recomputes every second matrix product: slower, with less memory',
    ),
}
SCHEDULES: Mapping[str, Choice] = {
    name: Choice(options={"parallelism.pipeline_parallel_schedule": theirs})
    for name, theirs in {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved_1f1b": "Interleaved1F1B",
        "interleaved_zero_bubble": "InterleavedZeroBubble",
        "zero_bubble_v": "ZBVZeroBubble",
        "dualpipe_v": "DualPipeV",
    }.items()
}
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
"""Schedules with separate input-gradient and weight-gradient passes."""
REPEATS = (
    "torch's checkpoint wrapper repeats the forward of a layer once for its inputs and once for each of its weights"
)
CONTEXT: Mapping[str, Choice] = {
    "ring": Choice(
        options={"parallelism.context_parallel_rotate_method": "alltoall"},
        warning="its trainer gathers all keys and values, whatever this option says: more memory, other traffic",
    ),
    "allgather": Choice(options={"parallelism.context_parallel_rotate_method": "allgather"}),
    "ulysses": Choice(refused="it exchanges keys and values, never heads; ring or allgather would work"),
}
_PICKS = Choice(warning="torch picks the kernel there, whatever is asked")
ATTENTION: Mapping[str, Choice] = {
    "auto": NOTHING,
    **dict.fromkeys(("cudnn", "flash", "efficient", "math", "flash4"), _PICKS),
}
COMPILE: Mapping[str, Choice] = {
    "none": Choice(options={"compile.enable": False}),
    "block": Choice(options={"compile.enable": True, "compile.components": ["model", "loss"]}),
}
ROUTING: Mapping[str, Choice] = {
    "balanced": Choice(options={"debug.moe_force_load_balance": True}),
    "learned": Choice(options={"debug.moe_force_load_balance": False}),
    "skewed": Choice(refused="the only load that it can force on experts is an even one"),
}
SEQUENCE_PARALLEL: Mapping[bool, Choice] = {
    True: NOTHING,
    False: Choice(refused="with tp it always shards activations over tokens"),
}
OPTIMIZER = {
    "optimizer.name": "AdamW",
    "optimizer.lr": LEARNING_RATE,
    "optimizer.beta1": BETAS[0],
    "optimizer.beta2": BETAS[1],
    "optimizer.eps": EPSILON,
    "optimizer.weight_decay": WEIGHT_DECAY,
    "training.max_norm": MAX_GRAD_NORM,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0.0,
    "training.steps": STEPS,
}


def export(experiment: Experiment, name: str) -> tuple[Draft, EngineConfig]:
    """Returns the draft, including refusals, and the configuration. Its files are not usable if anything is refused."""
    e = experiment
    draft = Draft(e)
    draft.refuse_sizes(updates=("grad_reduce",))
    draft.set({"job.description": name})
    module = _model(draft)
    draft.set({option: getattr(e, field) for field, option in DEGREES.items()})
    draft.set({"training.local_batch_size": e.micro_batch_size})
    if e.pp > 1:
        _pipeline(draft)
    _sharding(draft)
    draft.choose("precision", PRECISION)
    if e.grad_reduce == "bf16":
        draft.set({"training.mixed_precision_reduce": "bfloat16"})
    _recompute(draft)
    if e.tp > 1:
        draft.choose("sequence_parallel", SEQUENCE_PARALLEL)
    if e.cp > 1:
        draft.choose("cp_kind", CONTEXT)
    draft.choose("attention", ATTENTION)
    draft.choose("compile", COMPILE)
    if e.precision.startswith("fp8") and e.compile == "none":
        draft.warnings.append(
            "compile: without compilation its casts to fp8 are many small kernels: set compile.enable"
        )
    if e.model.moe is not None:
        _experts(draft)
    draft.set(OPTIMIZER)
    draft.set({"training.dataset": "c4_test"})
    draft.notes.append("the data set is torchtitan's c4_test: random tokens would need Python code there")
    head = [f"{name} for {TARGET.version}", *(f"warning: {text}" for text in draft.warnings)]
    files = {FILE: commented(head) + toml(draft.options)}
    if module:
        files[f"{MODULE}.py"] = module
    start = f"torchtitan's train.py on {e.world_size} ranks: torchrun ... -m torchtitan.train --job.config-file {FILE}"
    return draft, EngineConfig(
        target=TARGET,
        name=name,
        files=files,
        start=start,
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
    )


def _model(draft: Draft) -> str:
    """Sets the model by its torchtitan flavor. Returns the text of a module that defines it, if there is no flavor."""
    e = draft.experiment
    named = flavour_of(e)
    if named is not None:
        draft.set({"model.name": named[0], "model.flavor": named[1]})
        if named[0] == "llama3":
            draft.notes.append("its Llama scales rotary frequencies as Llama 3.1 does: other values, same speed")
        return ""
    if (family := model_class(draft)) is None:
        return ""
    draft.set({"model.name": MODULE, "model.flavor": e.model.name, "experimental.custom_import": MODULE})
    draft.notes.append(f"torchtitan has no flavor of this shape: {MODULE}.py defines it and must be importable")
    return module_text(e, family)


def _sharding(draft: Draft) -> None:
    e = draft.experiment
    policy = "parallelism.fsdp_reshard_after_forward"
    mixed = e.precision not in ("fp32", "fp64")
    if e.dp * e.cp == 1:
        if mixed and e.tp * e.pp > 1:
            draft.refuse("precision", "without FSDP, tp and pp alone compute in fp32 there; fp32 would work")
    elif e.zero_stage == 0:
        if e.tp * e.pp * e.cp > 1:
            draft.refuse("zero_stage", "it replicates (DDP) only without tp, pp and cp; 2 or 3 would work")
    elif e.zero_stage == 1 and e.pp == 1:
        draft.refuse("zero_stage", "FSDP shards gradients, too; 2 would work")
    elif e.zero_stage == 2 and e.pp > 1:
        draft.refuse("zero_stage", "its pipeline reduces gradients once per step; 1 or 3 would work")
    elif e.zero_stage == 3 and e.pp > 1 and e.pp_schedule in SPLIT_BACKWARD:
        draft.refuse("zero_stage", "FSDP loses gradients if the backward is split; 1 would work")
    elif e.zero_stage == 3:
        draft.set({policy: "always" if e.pp > 1 else "default"})
    else:
        draft.set({policy: "never"})
        if e.zero_stage == 2 and e.num_microbatches > 1:
            draft.warnings.append("zero_stage: parameters are gathered again for every micro-batch: slower")


def _pipeline(draft: Draft) -> None:
    e = draft.experiment
    draft.choose("pp_schedule", SCHEDULES)
    stages = experiment_layers(e)
    parts = [[f"layers.{layer}" for layer in layers] for layers in stages]
    if not all(parts[1:-1]):
        draft.refuse("pp_stages", "a stage without layers between the first and the last one has no module there")
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    draft.set(
        {
            "parallelism.module_fqns_per_model_part": parts,
            "parallelism.pipeline_parallel_microbatch_size": e.micro_batch_size,
            "training.local_batch_size": e.micro_batch_size * e.num_microbatches,
        }
    )
    if e.model.tie_embeddings:
        draft.refuse("model.tie_embeddings", "it cannot tie embeddings across stages")
    elif draft.options.get("model.name") == "qwen3" or e.model.qk_norm or (e.model.moe and not e.model.mla):
        draft.refuse("pp", "only its Qwen3 models have this shape, and these have no pipeline")


def recompute_in_halves(draft: Draft) -> None:
    """What torch's checkpoint wrapper does in backwards of two halves: repeats much, or raises if it is selective.

    Measured by ``findings/zero_bubble_repeats_a_checkpointed_block_for_every_weight.sh`` (torch 2.13). DualPipeV splits
    at most ``2 * pp - 1`` of the ``2 * num_microbatches`` backwards of a rank (``ScheduleDualPipeV.pipeline_order``).
    """
    e = draft.experiment
    if e.pp == 1 or e.pp_schedule not in SPLIT_BACKWARD or e.recompute == "none":
        return
    if e.recompute == "selective":
        draft.refuse(
            "recompute", f"torch's selective one fails where {e.pp_schedule} splits the backward; none would work"
        )
    elif e.pp_schedule == "dualpipe_v":
        split = f"{2 * e.pp - 1} of {2 * e.num_microbatches} backwards of a rank"
        draft.warnings.append(f"recompute: in up to {split}, which dualpipe_v splits, {REPEATS}: slower")
    else:
        draft.warnings.append(
            f"recompute: in split backwards {REPEATS}, 9 times a micro-batch instead of 2 in a Llama: much slower; "
            "1f1b, dualpipe_v or recompute=none repeat less"
        )


def _recompute(draft: Draft) -> None:
    recompute_in_halves(draft)
    e = draft.experiment
    if e.recompute == "full" and e.recompute_every > 1:
        every = {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": str(e.recompute_every),
        }
        draft.set(every)
        draft.warnings.append("recompute_every: it begins with the last layer of each group, not with the first")
        return
    draft.choose("recompute", RECOMPUTE)
    if e.recompute != "none" and e.recompute_every > 1:
        draft.refuse("recompute_every", "it can skip layers only with full recomputation")


def _experts(draft: Draft) -> None:
    e = draft.experiment
    assert e.model.moe is not None
    draft.choose("routing", ROUTING)
    if e.ep == 1 and e.etp != e.tp:
        draft.refuse("etp", "with ep=1 tensor parallelism also splits its experts")
    if e.ep > 1 and e.etp not in (1, e.tp):
        draft.refuse("etp", f"1 or tp={e.tp}")
    if e.capacity_factor is not None:
        draft.refuse("capacity_factor", "its experts drop no token")
    if e.routing == "learned" and e.model.moe.balance == "aux_loss":
        draft.refuse("model.moe.balance", "it balances only by a bias")
    if e.precision.startswith("fp8"):
        draft.warnings.append("precision: routed experts stay in bf16: slower")
