"""Megatron-Core's settings for an experiment: model shape, layout, data parallelism and optimizer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from workloads.adapters.megatron_graph import graph_options
from workloads.adapters.mixtures.megatron_kinds import kind_options
from workloads.costs.shape.partition import experiment_layers
from workloads.engine.training.optimizer import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from workloads.spec import weights
from workloads.spec.engine_versions import runs_with
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

CP_COMMUNICATION = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
"""Transformer Engine's name of each ``cp_kind``."""


def virtual_stages(e: Experiment) -> int | None:
    """Number of chunks of a rank, if there are several, as Megatron-Core expects it; else None."""
    return e.virtual_stages if e.pp_schedule == "interleaved_1f1b" else None


def transformer_config(e: Experiment) -> TransformerConfig:
    """Model shape and layout; every other option has Megatron's command-line default, except those that need
    Transformer Engine or Apex: the former are on if the experiment's engine has it, the latter off."""
    m, bf16 = e.model, e.precision != "fp32"
    stages = [["decoder"] * len(stage) for stage in experiment_layers(e)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    dtype = torch.bfloat16 if bf16 else torch.float32
    options: dict[str, Any] = {
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "num_attention_heads": m.num_heads,
        "num_query_groups": m.num_kv_heads,
        "kv_channels": m.head_dim,
        "ffn_hidden_size": m.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": m.norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": m.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "tensor_model_parallel_size": e.tp,
        "sequence_parallel": e.tp > 1 and e.sequence_parallel,
        "pipeline_model_parallel_size": e.pp,
        "virtual_pipeline_model_parallel_size": virtual_stages(e),
        "pipeline_model_parallel_layout": stages if e.pp > 1 else None,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": bf16,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": virtual_stages(e) is not None,
        "batch_p2p_comm": virtual_stages(e) is None,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": False,  # needs apex
        **(full if e.recompute == "full" else {}),
        **(_with_transformer_engine(e) if runs_with(e.engine_version) else {}),
        **(_experts(e, m.moe) if m.moe is not None else {}),
        **kind_options(m),
        **graph_options(e),
    }
    return TransformerConfig(**options)


def _with_transformer_engine(e: Experiment) -> dict[str, Any]:
    """Options that need Transformer Engine: fused rotary embedding and cross entropy, context parallelism and fp8."""
    options: dict[str, Any] = {
        "apply_rope_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    }
    if e.cp > 1:
        options |= {"context_parallel_size": e.cp, "cp_comm_type": CP_COMMUNICATION[e.cp_kind]}
    if e.precision == "fp8_tensorwise":
        options |= {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    return options


def _experts(e: Experiment, moe: MoESpec) -> dict[str, Any]:
    """Options of routed experts, whose products are grouped with Transformer Engine alone. Weights that are divided by
    their sum are softmax or sigmoid after the choice."""
    grouped = runs_with(e.engine_version) is not None
    scale = {} if moe.weight_scale == 1.0 else {"moe_router_topk_scaling_factor": moe.weight_scale}
    shared = moe.num_shared_experts * moe.expert_hidden_size
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_hidden_size,
        "moe_layer_freq": [int(weights.routed(e.model, layer)) for layer in range(e.model.num_layers)],
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_score_function": moe.gate,
        "moe_router_pre_softmax": moe.gate == "softmax" and not moe.normalize_weights,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": grouped,
        "expert_model_parallel_size": e.ep,
        "expert_tensor_parallel_size": e.etp,
        **scale,
    }


def data_parallel_config(e: Experiment) -> DistributedDataParallelConfig:
    sharded, several = e.zero_stage == 1, e.dp * e.cp > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=several,
        overlap_param_gather=sharded and several,
        use_distributed_optimizer=sharded,
    )


def optimizer_config(e: Experiment) -> OptimizerConfig:
    bf16 = e.precision != "fp32"
    return OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        clip_grad=MAX_GRAD_NORM,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=e.zero_stage == 1,
        overlap_param_gather=e.zero_stage == 1 and e.dp * e.cp > 1,
    )


def _leave(weight: Tensor) -> Tensor:
    return weight
