"""Converts an experiment to torchtitan 0.3's trainer configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

from workloads.adapters.torchtitan03_models import model_spec
from workloads.costs.shape.partition import experiment_layers
from workloads.engine.training.optimizer import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from workloads.spec.experiment import Experiment

SCHEDULES = {
    "none": "1F1B",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
RESHARD = {0: "never", 1: "never", 2: "never", 3: "always"}
"""``fsdp_reshard_after_forward`` by ZeRO stage. FSDP is there at every stage: without shards it replicates."""
LOSS_CHUNKS = 8
"""Parts of a sequence of which one at a time has logits, at most, as in torchtitan's own configurations."""
BACKEND = "spmd_types" if torch.__version__ >= "2.14" else "partial_dtensor"
"""How tensors carry their sharding. FSDP of torch 2.13 cannot shard parameters of spmd_types, torchtitan's default."""
FLOAT8: Mapping[str, Mapping[str, Any]] = {
    "fp8_rowwise": {"recipe_name": "rowwise_with_gw_hp", "filter_fqns": ["lm_head"]},
}
"""Options of the converter of the blocks' matrix products, by precision: torchao's recipes that compute the same bits
as ours (`workloads.engine.ops.fp8`)."""


class Nothing(Configurable):
    """Replaces a part of the trainer that a run does not need: tokenizer, data, checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        create_seed_checkpoint: bool = False
        enable: bool = False

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def maybe_wait_for_staging(self) -> None:
        pass


def trainer_config(e: Experiment, metrics: Configurable.Config) -> Trainer.Config:
    """The configuration; ``metrics``: what receives the numbers of a step."""
    spec = model_spec(e)
    if e.precision in FLOAT8:
        from torchtitan.components.quantization import Float8LinearConverter

        converter = Float8LinearConverter.Config(model_compile_enabled=e.compile == "block", **FLOAT8[e.precision])
        spec.model = converter.build().convert(spec.model)
    return Trainer.Config(
        model_spec=spec,
        metrics=metrics,
        tokenizer=Nothing.Config(),
        dataloader=Nothing.Config(),
        checkpoint=Nothing.Config(),
        loss=_loss(e),
        optimizer=default_adamw(lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            seq_len=e.seq_len,
            global_batch_size=e.global_batch_size,
            local_batch_size=e.micro_batch_size * (e.num_microbatches if e.pp > 1 else 1),
            max_norm=MAX_GRAD_NORM,
            gc_freq=1_000_000,
            mixed_precision_param="float32" if e.precision == "fp32" else "bfloat16",
            disable_cuda_graphs=not has_cuda_graphs(e),
        ),
        parallelism=_parallelism(e),
        activation_checkpoint=FullAC.Config() if e.recompute == "full" else None,
        compile=CompileConfig(enable=e.compile == "block"),
        debug=DebugConfig(
            seed=e.seed & (2**63 - 1),
            enable_structured_logging=False,
            moe_force_load_balance=e.routing == "balanced",
        ),
    )


def _loss(e: Experiment) -> Any:
    """The loss in chunks, as in torchtitan's own configurations; whole if a pipeline splits backwards, because then the
    last norm gets no gradient from chunks."""
    whole = CrossEntropyLoss.Config(global_vocab_size=e.model.vocab_size)
    if e.pp_schedule in SPLIT_BACKWARD:
        return whole
    return ChunkedLossWrapper.Config(num_chunks=math.gcd(LOSS_CHUNKS, e.seq_len // e.cp), loss_fn=whole)


def has_cuda_graphs(e: Experiment) -> bool:
    """Whether the forward and backward pass are captured, which is torchtitan's default where it can."""
    return e.pp == 1 and e.ep == 1


def _parallelism(e: Experiment) -> ParallelismConfig:
    parts: list[list[str]] | None = None
    if e.pp > 1:
        parts = [[f"layers.{layer}" for layer in stage] for stage in experiment_layers(e)]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "lm_head"]
    return ParallelismConfig(
        data_parallel_replicate_degree=e.dp_replicate,
        data_parallel_shard_degree=e.dp_shard,
        fsdp_reshard_after_forward=RESHARD[e.zero_stage],
        tensor_parallel_degree=e.tp,
        enable_sequence_parallel=e.sequence_parallel,
        context_parallel_degree=e.cp,
        expert_parallel_degree=e.ep,
        pipeline_parallel_degree=e.pp,
        spmd_backend=BACKEND,
        pipeline_parallel_schedule=SCHEDULES[e.pp_schedule],
        pipeline_parallel_microbatch_size=e.micro_batch_size,
        module_fqns_per_model_part=parts,
    )
