"""Runs ZeRO 0 to 3 and HSDP through FSDP2's `fully_shard` on the (dp_replicate, dp_shard) mesh.

| stage | shard degree | gathered parameters        | gradients over dp                     |
|-------|--------------|----------------------------|---------------------------------------|
| 0     | 1            | kept for the whole step    | all-reduced with the last micro-batch |
| 1     | dp_shard     | kept for the whole step    | reduce-scattered with the last one    |
| 2     | dp_shard     | kept for the whole step    | reduce-scattered with every one       |
| 3     | dp_shard     | gathered at use, both ways | reduce-scattered with every one       |

Replicas (HSDP) are all-reduced once, with the last micro-batch. Master weights and optimizer state live in fp32
shards; the gathered copy has the compute dtype; gradients are reduced, and accumulated over micro-batches, in fp32.
Gradients are *summed* over ranks: the loss is already divided by the tokens of the global batch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from workloads.engine.groups import Groups
from workloads.engine.model import Stage
from workloads.errors import UnsupportedByEngine
from workloads.experiment import Experiment

_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(experiment: Experiment) -> torch.dtype:
    """The dtype of activations and gathered weights. Raises `UnsupportedByEngine` for a precision without kernels."""
    dtype = _COMPUTE_DTYPES.get(experiment.precision)
    if dtype is None:
        known = ", ".join(_COMPUTE_DTYPES)
        raise UnsupportedByEngine(
            f"the engine cannot run precision={experiment.precision} yet; it may be one of {known}"
        )
    return dtype


def master_dtype(experiment: Experiment) -> torch.dtype:
    return torch.float64 if experiment.precision == "fp64" else torch.float32


def apply_data_parallel(stage: Stage, groups: Groups) -> None:
    """Wrap every block, the embedding, the head and the stage itself; also done for dp = 1 (mixed precision)."""
    experiment = groups.experiment
    mesh = groups.data_mesh if experiment.dp_replicate > 1 else groups.data_mesh["dp_shard"]
    dtype = compute_dtype(experiment)
    mixed = dtype != master_dtype(experiment)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=master_dtype(experiment) if mixed else None,
        cast_forward_inputs=False,
    )
    reshard = experiment.zero_stage == 3

    def shard(module: nn.Module, *, reshard_after_forward: bool) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    for block in stage.blocks:
        shard(block, reshard_after_forward=reshard)
    if not (experiment.model.tie_embeddings and groups.is_first_stage and groups.is_last_stage):
        # A tied weight belongs to two modules, so it stays with the stage; untied ends are units of their own.
        if stage.embedding is not None:
            shard(stage.embedding, reshard_after_forward=reshard)
        if stage.head is not None:
            shard(stage.head, reshard_after_forward=False)  # its backward comes next
    shard(stage, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):  # these two setters are not recursive
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class GradientSync:
    """Tells FSDP, before each backward, what to reduce and what to keep gathered."""

    def __init__(self, stage: Stage, experiment: Experiment) -> None:
        assert isinstance(stage, FSDPModule)
        self.stage: FSDPModule = stage
        self.every_microbatch = experiment.zero_stage >= 2
        self.keep_gathered = experiment.zero_stage <= 2
        self.last: bool | None = None

    def before_backward(self, *, last: bool) -> None:
        if last == self.last:
            return
        self.last = last
        self.stage.set_is_last_backward(last)
        self.stage.set_requires_gradient_sync(last or self.every_microbatch)
        self.stage.set_requires_all_reduce(last)  # after the line above, which sets both
        if self.keep_gathered:
            self.stage.set_reshard_after_backward(last)
