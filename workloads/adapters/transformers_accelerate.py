"""Sets up accelerate as its users do: what a user's configuration file says (`sweep.engine_configs.transformers` writes
it), with the one setting that such a file does not have, the precision of reductions."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import DistributedType, PartialState
from accelerate.utils import GradientAccumulationPlugin, TorchDynamoPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from workloads.spec.experiment import Experiment


def accelerator_of(e: Experiment, rank: int, device: torch.device) -> Accelerator:
    """An accelerator in the process group that exists already, on this rank's device."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    if e.world_size > 1:
        local = device.index if device.type == "cuda" else rank
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(e.world_size), "LOCAL_RANK": str(local)}
        os.environ["LOCAL_WORLD_SIZE"] = str(e.world_size)
    if e.zero_stage and device.type == "cpu":
        _shard_on_cpu()
    sharded: dict[str, Any] = {"fsdp_plugin": fsdp_plugin(e)} if e.zero_stage else {}
    if e.dp_replicate > 1 and e.zero_stage:
        sharded["parallelism_config"] = ParallelismConfig(dp_replicate_size=e.dp_replicate, dp_shard_size=e.dp_shard)
    if e.compile == "block":
        sharded["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    return Accelerator(
        cpu=device.type == "cpu" and not e.zero_stage,
        mixed_precision="bf16" if e.precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=e.num_microbatches, sync_each_batch=e.zero_stage >= 2
        ),
        **sharded,
    )


def fsdp_plugin(e: Experiment) -> FullyShardedDataParallelPlugin:
    """FSDP2 around every layer. Stage 3 frees parameters after forward; stages 2 and 3 reduce gradients after every
    micro-batch (`accelerator_of`), stage 1 once a step.

    accelerate's own policy for bf16 also reduces gradients in bf16, and casts what the model returns: the loss too.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=e.zero_stage == 3,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=policy if e.precision == "bf16" else None,
        activation_checkpointing=e.recompute == "full",
        cpu_ram_efficient_loading=False,
    )


def _shard_on_cpu() -> None:
    """Make accelerate shard on a machine without accelerator, where it is tested and not measured: there it ignores its
    FSDP plugin in silence."""

    def backend(state: PartialState, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = backend
