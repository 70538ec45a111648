"""Converts an experiment to torchtitan 0.2.2's job configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan.config import JobConfig

from workloads.adapters.torchtitan_models import FLAVOR
from workloads.costs.shape.partition import experiment_layers
from workloads.engine.training.optimizer import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from workloads.spec.experiment import Experiment

NAME = "ultrasweep"
"""Name under which the trainer finds our model."""
SCHEDULES = {
    "none": "1F1B",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
RESHARD = {0: "default", 1: "never", 2: "never", 3: "always"}
"""``fsdp_reshard_after_forward`` by ZeRO stage."""
ROTATION = {"ring": "alltoall", "allgather": "allgather"}
"""``context_parallel_rotate_method`` by kind of context parallelism."""
CONVERTER = "quantize.linear.float8"
FLOAT8: Mapping[str, Mapping[str, Any]] = {
    "fp8_tensorwise": {
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
        "filter_fqns": ["output"],
    },
    "fp8_rowwise": {"recipe_name": "rowwise_with_gw_hp", "filter_fqns": ["output"]},
}
"""Options of the converter for the blocks' matrix products, by precision: torchao's recipes that compute the same bits
as ours (`workloads.engine.ops.fp8`)."""


def job_config(e: Experiment) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = NAME, FLAVOR
    training, parallel, optimizer = config.training, config.parallelism, config.optimizer
    training.seq_len, training.global_batch_size = e.seq_len, e.global_batch_size
    training.local_batch_size = e.micro_batch_size * (e.num_microbatches if e.pp > 1 else 1)
    training.max_norm, training.gc_freq = MAX_GRAD_NORM, 1_000_000
    training.mixed_precision_param = "float32" if e.precision == "fp32" else "bfloat16"
    parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree = e.dp_replicate, e.dp_shard
    parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree = e.tp, e.pp
    parallel.context_parallel_degree = e.cp
    parallel.context_parallel_rotate_method = ROTATION[e.cp_kind]
    parallel.fsdp_reshard_after_forward = RESHARD[e.zero_stage]
    parallel.pipeline_parallel_schedule = SCHEDULES[e.pp_schedule]
    parallel.pipeline_parallel_microbatch_size = e.micro_batch_size
    parallel.pipeline_parallel_expert_parallel_overlap = False  # needs two threads, and is of no use without experts
    if e.pp > 1:
        parts = [[f"layers.{layer}" for layer in stage] for stage in experiment_layers(e)]
        parallel.module_fqns_per_model_part = [
            ["tok_embeddings", *parts[0]],
            *parts[1:-1],
            [*parts[-1], "norm", "output"],
        ]
    if e.precision in FLOAT8:
        config.model.converters = [CONVERTER]
        for option, value in FLOAT8[e.precision].items():
            setattr(config.quantize.linear.float8, option, value)
    config.activation_checkpoint.mode = e.recompute
    config.compile.enable = e.compile == "block"
    optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps = LEARNING_RATE, *BETAS, EPSILON
    optimizer.weight_decay = WEIGHT_DECAY
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, 0.0
    parallel.expert_parallel_degree = e.ep
    config.debug.moe_force_load_balance = e.routing == "balanced"
    config.debug.seed = e.seed & (2**63 - 1)
    return config
