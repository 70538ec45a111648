"""Builds one rank's engine, with the same steps in the same order for every model and layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workloads.engine.clock import Clock
from workloads.engine.data_parallel import apply_data_parallel, master_dtype
from workloads.engine.groups import Groups
from workloads.engine.model import Stage, replace_blocks
from workloads.engine.optimizer import ShardedAdamW
from workloads.engine.parameters import initialise
from workloads.engine.pipeline import Pipeline
from workloads.engine.recompute import apply_recompute
from workloads.errors import UnsupportedByEngine
from workloads.experiment import Experiment
from workloads.rules import lacking


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank's part of a training run."""

    experiment: Experiment
    groups: Groups
    stage: Stage
    optimizer: ShardedAdamW
    pipeline: Pipeline
    clock: Clock


def shape_stage(experiment: Experiment, groups: Groups) -> Stage:
    """The sharded stage on the meta device: pipeline split → TP → recompute → compile → data parallel.

    Expert and context parallelism belong between tensor parallelism and recompute. Raises `UnsupportedByEngine` for
    what this version cannot build.
    """
    if missing := lacking(experiment):
        raise UnsupportedByEngine(f"engine version {experiment.engine_version} cannot run {', '.join(missing)} yet")
    with torch.device("meta"):
        stage = Stage(experiment, groups).to(master_dtype(experiment))
        if experiment.precision != "fp64":
            stage.cos, stage.sin = stage.cos.float(), stage.sin.float()
    compiled = experiment.compile == "block"
    blocks = [apply_recompute(block, experiment.recompute, compiled=compiled) for block in stage.blocks]
    if compiled:
        for block in blocks:
            block.compile()
    replace_blocks(stage, blocks)
    apply_data_parallel(stage, groups)
    return stage


def build(experiment: Experiment, groups: Groups) -> Engine:
    """Build the sharded stage, allocate it on the device and fill it with the seed's weights."""
    stage = shape_stage(experiment, groups)
    stage.to_empty(device=groups.device)
    stage.fill_rope()
    position = groups.position
    initialise(stage, experiment.seed, experiment.tp, position["tp"], experiment.dp_shard, position["dp_shard"])
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()  # initialisation used more than training reserves
    return assemble(experiment, groups, stage)


def assemble(experiment: Experiment, groups: Groups, stage: Stage) -> Engine:
    """The engine around a stage that is built already."""
    clock = Clock(groups.device)
    return Engine(experiment, groups, stage, ShardedAdamW(stage, groups), Pipeline(stage, groups, clock), clock)


def choose_attention(experiment: Experiment) -> None:
    """Set the SDPA back ends of this process.

    ``auto`` is cuDNN on Hopper and newer GPUs in the 16-bit precisions that it has kernels for, else torch's own order.
    """
    backends = {
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    chosen: str = experiment.attention
    if chosen == "auto":
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        chosen = "cudnn" if hopper and experiment.precision not in ("fp32", "fp64") else "all"
    for name, enable in backends.items():
        enable(chosen in (name, "all"))
