"""An experiment as flags of Megatron-LM's ``pretrain_gpt.py``, or of its ``pretrain_hybrid.py`` for hybrids.

Names and meanings are those of ``megatron.training.arguments`` and of Megatron-Core's configurations, both in the
package ``megatron-core``. Both scripts are in Megatron-LM's repository alone.
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
from sweep.engine_configs.megatron_hybrid import SCRIPT
from sweep.engine_configs.megatron_kinds import lacks, nearest_numbers, set_kinds
from sweep.engine_configs.megatron_model import set_experts, set_model, set_modules
from sweep.engine_configs.megatron_offload import offload_activations, offload_optimizer
from sweep.engine_configs.texts import commented, flags
from workloads.costs.shape.partition import experiment_layers
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS
from workloads.spec.model_layers import numbers_of
from workloads.spec.recomputation import stage_words

TARGET = Target(name="megatron", version="Megatron-Core 0.19.2", lacks=lacks)
FILE = "megatron_flags.txt"

DEGREES = {
    "tp": "tensor-model-parallel-size",
    "cp": "context-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "ep": "expert-model-parallel-size",
    "micro_batch_size": "micro-batch-size",
    "global_batch_size": "global-batch-size",
    "seq_len": "seq-length",
    "seed": "seed",
}
"""Flags of the degrees and sizes. The data-parallel degree follows from the number of ranks."""
WITHOUT_APEX = "--no-gradient-accumulation-fusion"
LOCAL = "--transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
"""The flags of an installation that has Megatron-Core alone."""
_SHARDED = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
_FSDP = {"use-megatron-fsdp": True, **_SHARDED, "ckpt-format": "fsdp_dtensor", "no-gradient-accumulation-fusion": True}
ZERO: Mapping[int, Choice] = {
    0: NOTHING,
    1: Choice(options=_SHARDED),
    2: Choice(options={**_FSDP, "data-parallel-sharding-strategy": "optim_grads"}),
    3: Choice(options={**_FSDP, "data-parallel-sharding-strategy": "optim_grads_params"}),
}
_FP8 = {"bf16": True, "fp8-format": "hybrid"}
PRECISION: Mapping[str, Choice] = {
    "bf16": Choice(options={"bf16": True}),
    "fp16": Choice(options={"fp16": True, "accumulate-allreduce-grads-in-fp32": True}),
    "fp32": NOTHING,
    "fp8_tensorwise": Choice(options={**_FP8, "fp8-recipe": "tensorwise"}),
    "fp8_blockwise": Choice(options={**_FP8, "fp8-recipe": "blockwise"}),
    "mxfp8": Choice(options={"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"}),
    "nvfp4": Choice(options={"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"}),
    "fp8_rowwise": Choice(refused="its recipes are delayed, tensorwise, mxfp8 and blockwise"),
    "fp64": Choice(refused="it trains in bf16, fp16 or fp32"),
}
SCHEDULES: Mapping[str, Choice] = {
    "1f1b": NOTHING,
    "interleaved_1f1b": NOTHING,
    **dict.fromkeys(
        ("gpipe", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"),
        Choice(refused="it has 1f1b and interleaved_1f1b"),
    ),
}
CONTEXT: Mapping[str, Choice] = {
    "ring": Choice(options={"cp-comm-type": "p2p"}),
    "allgather": Choice(options={"cp-comm-type": "all_gather"}),
    "ulysses": Choice(options={"cp-comm-type": "a2a"}),
}
ATTENTION: Mapping[str, Choice] = {
    "auto": Choice(options={"attention-backend": "auto"}),
    "flash": Choice(options={"attention-backend": "flash"}),
    "cudnn": Choice(options={"attention-backend": "fused"}),
    "math": Choice(options={"attention-backend": "unfused"}),
    "efficient": Choice(options={"attention-backend": "auto"}, warning="it has no such kernel and picks one itself"),
    "flash4": Choice(
        options={"attention-backend": "flash"},
        warning="Transformer Engine picks the FlashAttention that it finds installed",
    ),
}
COMPILE: Mapping[str, Choice] = {
    "none": NOTHING,
    "block": Choice(warning="it is not compiled there: Transformer Engine's own fused kernels take its place"),
}
SEQUENCE_PARALLEL: Mapping[bool, Choice] = {True: Choice(options={"sequence-parallel": True}), False: NOTHING}
RECOMPUTED = {"norm": "layernorm", "mla_up": "mla_up_proj", "experts": "moe"}
"""Megatron's ``--recompute-modules`` for our operations. ``moe`` is only the nearest: it repeats routing and
all-to-all."""
OPTIMIZERS: Mapping[str, Choice] = {
    "adamw": Choice(options={"optimizer": "adam"}),
    "sgd": Choice(options={"optimizer": "sgd", "sgd-momentum": 0.9}),
    "muon": Choice(
        options={
            "optimizer": "muon",
            "muon-momentum": 0.95,
            "muon-nesterov": True,
            "muon-scale-mode": "spectral",
            "muon-extra-scale-factor": 0.2,
            "muon-tp-mode": "duplicated",
        },
        warning="every tensor-parallel rank orthogonalises all of its matrices, and with ZeRO 1 ranks own whole layers",
        note="Megatron-Core takes it from the package emerging-optimizers",
    ),
    "adafactor": Choice(refused="it has adam, sgd and muon; these would work"),
}
"""Constants are those of `workloads.engine.training.optimizer` and `workloads.engine.training.muon`."""
TRAINING: Options = {
    "lr": LEARNING_RATE,
    "min-lr": LEARNING_RATE,
    "lr-decay-style": "constant",
    "weight-decay": WEIGHT_DECAY,
    "adam-beta1": BETAS[0],
    "adam-beta2": BETAS[1],
    "adam-eps": EPSILON,
    "clip-grad": MAX_GRAD_NORM,
    "train-iters": STEPS,
    "eval-iters": 0,
    "eval-interval": STEPS,
    "log-interval": 1,
}
"""Optimizer and training loop. Megatron-Core 0.19.2 has no default for ``--eval-interval`` and divides by it even
where it never evaluates."""


DOCUMENTS = "its layers ask for causal masks, so fused attention does not read what --reset-attention-mask makes"
"""Why packed documents are refused (Megatron-LM issue 415)."""


def export(experiment: Experiment, name: str) -> tuple[Draft, EngineConfig]:
    """Returns the draft, including refusals, and the configuration with its file of flags."""
    e = experiment
    draft = Draft(e)
    draft.refuse_sizes(
        pads_vocabulary=True,
        copies_heads=True,
        adds_gradients=True,
        updates=("grad_reduce", "optimizer", "optimizer_states", "optimizer_offload"),
        offloads=True,
        documents=DOCUMENTS,
    )
    _formats(draft)
    numbers = numbers_of(e.model)
    model = numbers or nearest_numbers(e.model)
    set_model(draft, model)
    draft.set({option: getattr(e, field) for field, option in DEGREES.items()})
    draft.set({"max-position-embeddings": e.seq_len})
    _sharding(draft)
    if e.optimizer_offload:
        offload_optimizer(draft)
    if e.pp > 1:
        _pipeline(draft)
    draft.choose("precision", PRECISION)
    draft.choose("optimizer", OPTIMIZERS)
    if e.optimizer == "muon" and e.zero_stage >= 2:
        draft.refuse("optimizer", "Megatron-FSDP has no Muon; zero_stage 0 or 1 would work")
    _recompute(draft)
    if e.activation_offload != "none":
        offload_activations(draft)
    if e.tp > 1:
        draft.choose("sequence_parallel", SEQUENCE_PARALLEL)
    if e.cp > 1:
        draft.choose("cp_kind", CONTEXT)
        if model.mla is not None and e.cp_kind != "ring":
            draft.refuse("cp_kind", "Transformer Engine has only the ring for latent attention; ring would work")
    draft.choose("attention", ATTENTION)
    draft.choose("compile", COMPILE)
    if model.moe is not None:
        set_experts(draft, model.moe, model.num_layers)
    if e.model.mtp_modules:
        set_modules(draft)
    if numbers is None:
        set_kinds(draft)
    draft.set(TRAINING)
    draft.notes.append(f"data parallelism {e.dp} follows from {e.world_size} ranks")
    draft.notes.append("weight decay leaves out norms there, and the same seed gives other weights")
    script = SCRIPT if "hybrid-layer-pattern" in draft.options else "pretrain_gpt.py"
    draft.notes.append(f"{script}, and the Makefile that it starts with, are in Megatron-LM's repository alone")
    apex = f"without Apex: {WITHOUT_APEX}" if e.zero_stage < 2 else "it does not need Apex"
    draft.notes.append("it needs Apex or Transformer Engine" if e.gradient_accumulation_fusion else apex)
    draft.notes.append(_without_transformer_engine(e, routed=model.moe is not None, plain=numbers is not None))
    head = [f"{name} for {TARGET.version}", *(f"warning: {text}" for text in draft.warnings)]
    start = f"{e.world_size} ranks: {_environment(e)}torchrun ... {script} $(grep -v '^#' {FILE})"
    return draft, EngineConfig(
        target=TARGET,
        name=name,
        files={FILE: commented(head) + flags(draft.options)},
        start=start,
        warnings=tuple(draft.warnings),
        notes=tuple(draft.notes),
    )


def _environment(e: Experiment) -> str:
    """What the command line starts with: tp and cp overlap their communication only with one queue of kernels on GPUs
    before Blackwell, and Megatron-FSDP only with several; offload of activations moves weights too without its
    variable. Megatron asserts all of them."""
    if e.zero_stage >= 2:
        return "env -u CUDA_DEVICE_MAX_CONNECTIONS "
    offload = "NVTE_CPU_OFFLOAD_V1=1 " if e.activation_offload != "none" else ""
    return offload + ("CUDA_DEVICE_MAX_CONNECTIONS=1 " if e.tp > 1 or e.cp > 1 else "")


def _without_transformer_engine(e: Experiment, *, routed: bool, plain: bool) -> str:
    """The note on Megatron's own layers, which write every score of attention and have no fused experts. ``plain``:
    numbers describe the layers."""
    needed = {
        "model": not plain,
        "cp": e.cp > 1,
        "sequence_parallel": e.tp > 1 and e.sequence_parallel,
        "activation_offload": e.activation_offload != "none",
        "precision": e.precision.startswith("fp8") or e.precision in PLANNED_FORMATS,
    }
    if fields := [name for name, needs in needed.items() if needs]:
        return f"it needs Transformer Engine: {', '.join(fields)}"
    gone = " and none of --moe-permute-fusion, --moe-router-fusion" if routed else ""
    return f"without Transformer Engine, slower: {LOCAL}{gone}"


def _sharding(draft: Draft) -> None:
    e = draft.experiment
    draft.choose("zero_stage", ZERO)
    if e.zero_stage == 0 and e.dp > 1:
        draft.set({"overlap-grad-reduce": True})
    if e.zero_stage >= 2 and e.pp > 1:
        draft.refuse("zero_stage", "Megatron-FSDP is made for tp, cp and ep, not for a pipeline; 1 would work")
    if e.zero_stage == 3:
        draft.notes.append("a model that does not fit one GPU unsharded needs --init-model-with-meta-device, too")
    if e.zero_stage > 0 and e.dp_replicate > 1:
        draft.set({"num-distributed-optimizer-instances": e.dp_replicate})
        if e.zero_stage >= 2:
            draft.set({"outer-dp-sharding-strategy": "no_shard"})


def _pipeline(draft: Draft) -> None:
    """Even stages need only the number of virtual stages; other splits are written out, and all with multi-token
    modules, which are in the last stage."""
    e = draft.experiment
    draft.choose("pp_schedule", SCHEDULES)
    stages = experiment_layers(e)
    if e.pp_schedule == "interleaved_1f1b":
        _groups(draft)
    if e.pp_stages is not None:
        draft.set({"pipeline-model-parallel-layout": e.pp_stages})
        return
    modules = e.model.mtp_modules
    if not modules and len({len(layers) for layers in stages}) == 1:
        if e.virtual_stages > 1:
            draft.set({"num-virtual-stages-per-pipeline-rank": e.virtual_stages})
        return
    parts = ["t" * len(layers) for layers in stages[:-1]]
    parts += ["t" * (len(stages[-1]) - modules) + "m" * modules]
    draft.set({"pipeline-model-parallel-layout": "E" + "|".join(parts) + "L"})


def _groups(draft: Draft) -> None:
    """Micro-batches that a virtual stage runs in a row: as many as there are stages, unless the last group would be
    smaller than that, which Megatron refuses."""
    e = draft.experiment
    count = e.num_microbatches
    if count < e.pp:
        draft.refuse("global_batch_size", f"its interleaved schedule needs pp={e.pp} micro-batches, not {count}")
        return
    size = next(size for size in range(e.pp, count + 1) if not 0 < count % size < e.pp)
    if size > e.pp:
        draft.set({"microbatch-group-size-per-virtual-pipeline-stage": size})
        draft.warnings.append(f"pp_schedule: {count} micro-batches go in groups of {size}: more activation memory")


def _recompute(draft: Draft) -> None:
    e = draft.experiment
    if e.recompute == "none":
        return
    if e.recompute_every > 1:
        draft.refuse("recompute_every", "it recomputes every layer, or the first ones of a stage")
    words = stage_words(e.recompute)
    if len(words) > 1:
        draft.refuse("recompute", "it recomputes alike in every stage; one word, such as full or full:3, would work")
        return
    if words[0].first:
        draft.set(
            {
                "recompute-granularity": "full",
                "recompute-method": "block",
                "recompute-num-layers": words[0].first,
            }
        )
        return
    if e.recompute == "full":
        full = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
        draft.set(full)
        return
    modules = [RECOMPUTED[name] for name in e.recomputed_operations if name in RECOMPUTED]
    if not modules:
        draft.refuse("recompute", f"the only single operations that it recomputes are {', '.join(RECOMPUTED)}")
        return
    draft.set({"recompute-granularity": "selective", "recompute-modules": " ".join(modules)})
    kept = [name for name in e.recomputed_operations if name not in RECOMPUTED]
    if "layernorm" in modules and (e.model.moe is None or e.model.mla is None):
        draft.warnings.append("recompute: norms before products are fused with them and not recomputed: more memory")
    if kept:
        draft.warnings.append(f"recompute: {' and '.join(kept)} are not recomputed there: faster, with more memory")
    if "moe" in modules:
        draft.warnings.append("recompute: routing and the all-to-all of experts run twice: slower")


def _formats(draft: Draft) -> None:
    """Gradients and moments in bf16. Its main parameters are fp32 or fp16, never bf16."""
    e = draft.experiment
    if e.grad_reduce == "bf16":
        if e.zero_stage >= 2:
            draft.refuse("grad_reduce", "Megatron-FSDP has formats of its own for gradients; fp32 would work")
        draft.set({"grad-reduce-in-bf16": True})
    if e.optimizer_states == "bf16":
        if e.zero_stage != 1:
            draft.refuse(
                "optimizer_states", "its precision-aware optimizer shards states; zero_stage=1 or fp32 would work"
            )
        draft.set({"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"})
        draft.warnings.append("optimizer_states: Transformer Engine rounds them to nearest, not stochastically")
