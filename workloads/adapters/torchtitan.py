"""torchtitan's own trainer as the engine of a point: our shapes, weights and tokens, its model and training step.

Its `Trainer` is subclassed and its ``train_step`` left alone. Around it are mended, because they would be wrong in
silence:

- Under a pipeline it runs backward on the *sum* of the losses: gradients were tokens_per_step times too large, and so
  were their norms before clipping. The loss function divides by the tokens.
- Its DDP divides by the ranks after the loss was divided by all tokens: the loss function multiplies by the ranks.
- gloo has no pre-multiplied sum, which FSDP asks for where gradients are not divided.

It rotates neighbouring elements of a head and we its halves: rows of queries and keys are put in its order.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.protocols import train_spec as specs
from torchtitan.train import Trainer

from workloads import mesh, weights
from workloads.adapters.steps import Ended, measure_steps
from workloads.costs.partition import experiment_layers
from workloads.costs.traffic import Traffic
from workloads.engine.clock import Clock
from workloads.engine.data import step_batches
from workloads.engine.optimizer import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from workloads.engine.parameters import initial_part
from workloads.errors import UnsupportedByEngine
from workloads.experiment import Experiment
from workloads.protocol import Breakdown, MeasureSpec
from workloads.step import BeforeStep, Measurements

SCHEDULES = {
    "none": "1F1B",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zero_bubble_v": "ZBVZeroBubble",
}
RESHARD = {0: "default", 1: "never", 2: "never", 3: "always"}
"""``fsdp_reshard_after_forward`` by ZeRO stage."""
_BLOCK = {
    "attention.wq": "attention.q",
    "attention.wk": "attention.k",
    "attention.wv": "attention.v",
    "attention.wo": "attention.o",
    "feed_forward.w1": "ffn.gate",
    "feed_forward.w2": "ffn.down",
    "feed_forward.w3": "ffn.up",
}
"""Its names of a layer's matrices, and ours (`workloads.weights`). Norms have one name."""


class Torchtitan:
    """See `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        installed, wanted = importlib.metadata.version("torchtitan"), experiment.engine_version.partition("+")[0]
        if installed != wanted:
            raise UnsupportedByEngine(f"torchtitan {installed} is installed, the experiment is of {wanted}")
        if device.type == "cpu":
            _use_cpu()
        logging.getLogger().setLevel(logging.WARNING)
        self.experiment, self.device, self.clock = experiment, device, Clock(device)
        position = mesh.coordinates(experiment, rank)
        self.data_rank = position["dp_replicate"] * experiment.dp_shard + position["dp_shard"]
        self.coordinates = {**position, "dp": self.data_rank}
        self._trainer: _Trainer | None = None

    def build(self) -> None:
        os.environ["LOCAL_RANK"] = str(self.device.index or 0)  # its trainer reads its device from there
        self._trainer = _Trainer(self.experiment, self.device, self.clock)
        self._trainer.fill(self.experiment)

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        return measure_steps(self._run, self.clock, self.device, spec, before_step), None

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return None, None

    def _run(self, step: int) -> Ended:
        e, trainer = self.experiment, self._trainer
        assert trainer is not None
        rows = [
            tuple(t.view(e.micro_batch_size, e.seq_len) for t in batch)
            for batch in step_batches(e, step, self.data_rank, torch.device("cpu"))
        ]
        if e.pp > 1:  # its schedules divide one large batch
            rows = [(torch.cat([tokens for tokens, _ in rows]), torch.cat([targets for _, targets in rows]))]
        trainer.step = step + 1
        trainer.train_step(trainer.batch_generator(({"input": tokens}, targets) for tokens, targets in rows))
        loss, norm = trainer.metrics_processor.told
        if e.pp > 1:  # the other stages say -1 for it
            on_stage = torch.tensor(loss if trainer.pp_has_last_stage else 0.0, dtype=torch.float64, device=self.device)
            dist.all_reduce(on_stage, group=trainer.parallel_dims.get_mesh("pp").get_group())
            loss = float(on_stage)
        return Ended(loss / trainer.loss_factor, norm, trainer.backward_end)


class _Trainer(Trainer):
    """Its trainer, in a process group that exists, on shapes and batches from outside."""

    def __init__(self, experiment: Experiment, device: torch.device, clock: Clock) -> None:
        self.experiment, self.clock = experiment, clock
        self.backward_end: Any = None
        self.loss_factor = 1.0
        if experiment.pp > 1:
            self.loss_factor = 1.0 / experiment.tokens_per_step
        elif experiment.zero_stage == 0:
            self.loss_factor = float(experiment.dp)
        spec = get_train_spec()
        spec.model_args = {"own": _shape(experiment)}
        spec.build_dataloader_fn = spec.build_tokenizer_fn = spec.state_dict_adapter = None
        spec.build_metrics_processor_fn = lambda *_: _Told()
        spec.build_loss_fn = lambda *_, **__: _scaled(self.loss_factor)
        specs._extra_train_specs["ultrasweep"] = spec
        super().__init__(_config(experiment))
        if device.type == "cpu":
            for part in self._sharded():
                part.set_force_sum_reduction_for_comms(True)

    def init_distributed(self) -> ParallelDims:
        """The layout's axes over the process group that the rank has made."""
        e = self.experiment
        return ParallelDims(
            dp_replicate=e.dp_replicate,
            dp_shard=e.dp_shard,
            cp=e.cp,
            tp=e.tp,
            pp=e.pp,
            ep=1,
            etp=1,
            world_size=e.world_size,
        )

    def forward_backward_step(self, **batch: Any) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self.backward_end = self.clock.mark()
        return loss

    @torch.no_grad()
    def fill(self, experiment: Experiment) -> None:
        """Give every parameter our seed's values."""
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                value = _initial(experiment, name, parameter.device)
                if isinstance(parameter, DTensor):
                    shape, offset = compute_local_shape_and_global_offset(
                        parameter.shape, parameter.device_mesh, parameter.placements
                    )
                    for dim, (first, size) in enumerate(zip(offset, shape, strict=True)):
                        value = value.narrow(dim, first if size else 0, size)
                    parameter.to_local().copy_(value)
                else:
                    parameter.copy_(value)

    def _sharded(self) -> Iterator[FSDPModule]:
        modules = (module for part in self.model_parts for module in part.modules())
        return (module for module in modules if isinstance(module, FSDPModule))


class _Told:
    """Stands for its metrics processor: keeps the last step's numbers, writes nothing."""

    color = torchtitan.tools.utils.NoColor()

    def __init__(self) -> None:
        self.told = (0.0, 0.0)
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.device_memory_monitor = self
        self.device_name = "H200"  # for its table of peak rates, which nothing reads
        self.max_reserved_gib = self.max_reserved_pct = 0.0

    def get_peak_stats(self) -> _Told:
        return self

    def should_log(self, step: int) -> bool:
        self.data_loading_times.clear()
        return True

    def log(self, step: int, loss: float, largest: float, grad_norm: float, extra_metrics: object = None) -> None:
        self.told = (loss, grad_norm)


def _use_cpu() -> None:
    """It takes a machine without accelerator for one with CUDA, in every module that asks when it is imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.__dict__.update(device_type="cpu", device_module=torch.cpu)


def _scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_loss(logits, targets) * factor

    return loss


def _shape(e: Experiment) -> TransformerModelArgs:
    m = e.model
    return TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=m.num_heads,
        n_kv_heads=m.num_kv_heads,
        vocab_size=m.vocab_size,
        multiple_of=m.ffn_hidden_size,  # it rounds 2/3 of 4 h up to a multiple: of this, with the factor, one
        ffn_dim_multiplier=m.ffn_hidden_size / (8 * m.hidden_size),
        norm_eps=m.norm_eps,
        rope_theta=m.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )


def _config(e: Experiment) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = "ultrasweep", "own"
    training, parallel, optimizer = config.training, config.parallelism, config.optimizer
    training.seq_len, training.global_batch_size = e.seq_len, e.global_batch_size
    training.local_batch_size = e.micro_batch_size * (e.num_microbatches if e.pp > 1 else 1)
    training.max_norm, training.gc_freq = MAX_GRAD_NORM, 1_000_000
    training.mixed_precision_param = "float32" if e.precision == "fp32" else "bfloat16"
    parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree = e.dp_replicate, e.dp_shard
    parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree = e.tp, e.pp
    parallel.fsdp_reshard_after_forward = RESHARD[e.zero_stage]
    parallel.pipeline_parallel_schedule = SCHEDULES[e.pp_schedule]
    parallel.pipeline_parallel_microbatch_size = e.micro_batch_size
    if e.pp > 1:
        parts = [[f"layers.{layer}" for layer in stage] for stage in experiment_layers(e)]
        parallel.module_fqns_per_model_part = [
            ["tok_embeddings", *parts[0]],
            *parts[1:-1],
            [*parts[-1], "norm", "output"],
        ]
    config.activation_checkpoint.mode = e.recompute
    config.compile.enable = e.compile == "block"
    optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps = LEARNING_RATE, *BETAS, EPSILON
    optimizer.weight_decay = WEIGHT_DECAY
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, 0.0
    config.debug.seed = e.seed & (2**63 - 1)
    return config


def _initial(e: Experiment, name: str, device: torch.device) -> Tensor:
    """Our values of one of its parameters, whole."""
    m = e.model
    name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").replace("module.", "")
    ends = {
        "tok_embeddings.weight": weights.embedding,
        "norm.weight": weights.final_norm,
        "output.weight": weights.head,
    }
    if name in ends:
        return initial_part(ends[name](m), e.seed, device, {})
    _, layer, short = name.removesuffix(".weight").split(".", 2)
    prefix = _layer_prefix(int(layer))
    own = {weight.name: weight for weight in weights.block(m, prefix, routed=False)}
    value = initial_part(own[f"{prefix}.{_BLOCK.get(short, short)}"], e.seed, device, {})
    if short in ("attention.wq", "attention.wk"):
        value = value.unflatten(0, (-1, 2, m.head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return value


def _layer_prefix(layer: int) -> str:
    return f"layers.{layer}"
