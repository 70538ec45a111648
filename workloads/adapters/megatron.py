"""Runs a point with Megatron-Core: its model, data parallelism, schedules and optimizer.

Its layers are those of Transformer Engine, or, in the engine version without it, its own ones
(`workloads.adapters.megatron_layers`).

Megatron-Core initialises the weights before ours replace all of them: only its initialisation marks which of them are
sharded, so that the gradient norm counts each once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from workloads.adapters import megatron_layers
from workloads.adapters.forced_routing import force_routing
from workloads.adapters.megatron_config import (
    data_parallel_config,
    optimizer_config,
    transformer_config,
    virtual_stages,
)
from workloads.adapters.megatron_graph import StepGraph, is_graphed, require_warm_up
from workloads.adapters.megatron_weights import fill
from workloads.adapters.mixtures.megatron_kinds import mark_parameters, position_options
from workloads.adapters.steps import Ended, measure_steps
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.costs.traffic.sent import Traffic
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import step_batches
from workloads.measuring.step import BeforeStep, Measurements
from workloads.spec import mesh
from workloads.spec.engine_versions import WITHOUT_TRANSFORMER_ENGINE, runs_with
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


class Megatron:
    """Implements `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        e = experiment
        _require_packages(e.engine_version)
        require_cuda(device)
        _be_quiet()
        self.experiment, self.device, self.clock = experiment, device, Clock(device)
        position = mesh.coordinates(e, rank)
        self.data_rank = position["dp_replicate"] * e.dp_shard + position["dp_shard"]
        self.coordinates = {**position, "dp": self.data_rank}
        experts = {"expert_model_parallel_size": e.ep, "expert_tensor_parallel_size": e.etp} if e.model.moe else {}
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=e.tp,
            pipeline_model_parallel_size=e.pp,
            virtual_pipeline_model_parallel_size=virtual_stages(e),
            context_parallel_size=e.cp,
            create_gloo_process_groups=False,
            **experts,
        )
        # A graph cannot set the states of other generators than Transformer Engine's.
        tensor_parallel.model_parallel_cuda_manual_seed(e.seed & (2**31 - 1), te_rng_tracker=is_graphed(e))
        self.chunks: list[Any] = []
        self.optimizer: Any = None
        self.graph = StepGraph() if is_graphed(e) else None

    def build(self) -> None:
        e, virtual = self.experiment, virtual_stages(self.experiment)
        config, with_te = transformer_config(e), runs_with(e.engine_version) is not None
        data = data_parallel_config(e)
        for chunk in range(virtual or 1):
            model: Any = _chunk(e, config, chunk if virtual else None).to(self.device)
            fill(model, e, self.device)
            mark_parameters(model)
            force_routing(model, e, cp_rank=self.coordinates["cp"], tp_rank=self.coordinates["tp"])
            if with_te:
                megatron_layers.accumulate_in_products(model)
            else:
                megatron_layers.let_experts_have_biases(model)
            if e.precision != "fp32":
                model = Float16Module(config, model)
            with self.graph.stream() if self.graph else nullcontext():
                self.chunks.append(DistributedDataParallel(config, data, model, disable_bucketing=chunk > 0))
        if data.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = waits if virtual else waits[0]
        config.finalize_model_grads_func = finalize_model_grads
        settings = optimizer_config(e)
        self.optimizer = get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=False)
        if not with_te:
            megatron_layers.use_fused_adamw(self.optimizer)

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        require_warm_up(self.experiment, spec)
        return measure_steps(self._run, self.clock, self.device, spec, before_step), None

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return None, None

    def _run(self, step: int) -> Ended:
        e, virtual = self.experiment, virtual_stages(self.experiment)
        batch = e.replace(cp_kind="ring")  # the order of Megatron-Core's positions, whatever their exchange is
        batches = [
            {"tokens": tokens.view(e.micro_batch_size, -1), "targets": targets.view(e.micro_batch_size, -1)}
            for tokens, targets in step_batches(batch, step, self.data_rank, self.device, self.coordinates["cp"])
        ]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.graph:
            batches = self.graph.hold(batches)
        passes = partial(
            get_forward_backward_func(e.pp, virtual),
            forward_step_func=partial(_forward, e.cp),
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=e.num_microbatches,
            seq_length=e.seq_len,
            micro_batch_size=e.micro_batch_size,
            forward_only=False,
        )

        def both_passes() -> Any:
            return passes(data_iterator=[iter(batches) for _ in self.chunks] if virtual else iter(batches))

        losses = self.graph.run(both_passes) if self.graph else both_passes()
        backward_end = self.clock.mark()
        _, norm, _ = self.optimizer.step()
        # Only the last stage has losses; each of its tensor-parallel ranks has the same ones.
        mean = (
            torch.stack([microbatch["loss"] for microbatch in losses]).double().mean()
            if losses
            else torch.zeros(1).double()
        )
        total = mean.to(self.device).reshape(1) / (e.dp * e.cp * e.tp)
        dist.all_reduce(total)
        return Ended(float(total), float(norm), backward_end, self.graph.bytes if self.graph else 0)


def require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise UnsupportedByEngine("Megatron-Core runs on CUDA devices only: its buffers and clipping are on the device")


def _require_packages(engine_version: str) -> None:
    """Raises `UnsupportedByEngine` unless the packages that the engine version names are installed, and none that it
    runs without."""
    installed, wanted = importlib.metadata.version("megatron-core"), engine_version.partition("+")[0]
    if installed != wanted:
        raise UnsupportedByEngine(f"megatron-core {installed} is installed, but the experiment needs {wanted}")
    needed = runs_with(engine_version)
    if importlib.util.find_spec("transformer_engine") is None:
        if needed is not None:
            raise UnsupportedByEngine(
                f"transformer_engine {needed} is not installed; engine version {engine_version!r} needs it. "
                f"Install it, or choose the version without it by engine_version={WITHOUT_TRANSFORMER_ENGINE!r}"
            )
        return
    if needed is None:
        raise UnsupportedByEngine(
            f"transformer_engine is installed, so Megatron-Core would use its optimizer; engine version "
            f"{engine_version!r} runs without it: uninstall it, or leave engine_version out"
        )
    if (present := importlib.metadata.version("transformer_engine")) != needed:
        raise UnsupportedByEngine(f"transformer_engine {present} is installed, but the experiment needs {needed}")


def _chunk(e: Experiment, config: TransformerConfig, virtual: int | None) -> GPTModel:
    return GPTModel(
        config,
        megatron_layers.layers(e, config, virtual),
        vocab_size=e.model.vocab_size,
        max_sequence_length=e.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        share_embeddings_and_output_weights=e.model.tie_embeddings,
        **position_options(e.model),
        vp_stage=virtual,
    )


def _forward(cp: int, batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    tokens, targets = batch["tokens"], batch["targets"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=targets), partial(_mean, cp)


def _mean(cp: int, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's share of the mean loss of a micro-batch, which its schedules multiply by ``cp``, and the mean of the
    rank's own tokens."""
    loss = losses.float().mean()
    mean = loss.detach().clone()  # the loss that is backpropagated is divided in place
    return loss / cp, {"loss": mean}


def _be_quiet() -> None:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
