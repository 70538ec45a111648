"""Runs a point with Megatron-Core: its model, data parallelism, schedules and optimizer.

It runs without Transformer Engine, on Megatron-Core's local layers. Two of their parts are replaced:

- Its attention writes every score: torch's fused attention is used instead (`_Attention`).
- Its RMSNorm refuses sequence parallelism: torch's is used, marked so that its gradient is summed over tp (`_Norm`).

Its AdamW is torch's, with ``fused=True`` set here: the optimizer takes 54 ms a step instead of 119.

Megatron-Core initialises the weights before ours replace all of them: only its initialisation marks which of them are
sharded, so that the gradient norm counts each once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn import functional

from workloads.adapters.steps import Ended, measure_steps
from workloads.contract.protocol import Breakdown, MeasureSpec
from workloads.costs.shape.partition import experiment_layers
from workloads.costs.traffic.sent import Traffic
from workloads.engine.collectives.parameters import initial_part
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import step_batches
from workloads.engine.training.optimizer import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from workloads.measuring.step import BeforeStep, Measurements
from workloads.spec import mesh, weights
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


class Megatron:
    """Implements `workloads.adapters.seam.RankEngine`."""

    def __init__(self, experiment: Experiment, rank: int, device: torch.device) -> None:
        e = experiment
        installed, wanted = importlib.metadata.version("megatron-core"), e.engine_version.partition("+")[0]
        if installed != wanted:
            raise UnsupportedByEngine(f"megatron-core {installed} is installed, but the experiment needs {wanted}")
        if importlib.util.find_spec("transformer_engine") is not None:
            raise UnsupportedByEngine(
                f"transformer_engine is installed, so Megatron-Core would use its optimizer; engine version "
                f"{e.engine_version!r} runs without it: uninstall it"
            )
        require_cuda(device)
        _be_quiet()
        self.experiment, self.device, self.clock = experiment, device, Clock(device)
        position = mesh.coordinates(e, rank)
        self.data_rank = position["dp_replicate"] * e.dp_shard + position["dp_shard"]
        self.coordinates = {**position, "dp": self.data_rank}
        parallel_state.initialize_model_parallel(e.tp, e.pp, virtual_stages(e), create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(e.seed & (2**31 - 1))
        self.chunks: list[Any] = []
        self.optimizer: Any = None

    def build(self) -> None:
        e, virtual = self.experiment, virtual_stages(self.experiment)
        config = transformer_config(e)
        data = data_parallel_config(e)
        for chunk in range(virtual or 1):
            model: Any = _chunk(e, config, chunk if virtual else None).to(self.device)
            fill(model, e, self.device)
            if e.precision == "bf16":
                model = Float16Module(config, model)
            self.chunks.append(DistributedDataParallel(config, data, model, disable_bucketing=chunk > 0))
        if data.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = waits if virtual else waits[0]
        config.finalize_model_grads_func = finalize_model_grads
        settings = optimizer_config(e)
        self.optimizer = get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=False)
        for optimizer in self.optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False

    def measure(
        self, spec: MeasureSpec, before_step: BeforeStep, devices_per_node: int | None
    ) -> tuple[Measurements, list[Traffic] | None]:
        return measure_steps(self._run, self.clock, self.device, spec, before_step), None

    def profile(self, folder: Path, first_step: int, before_step: BeforeStep) -> tuple[Breakdown | None, str | None]:
        return None, None

    def _run(self, step: int) -> Ended:
        e, virtual = self.experiment, virtual_stages(self.experiment)
        batches = [
            (tokens.view(-1, e.seq_len), targets.view(-1, e.seq_len))
            for tokens, targets in step_batches(e, step, self.data_rank, self.device)
        ]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward = get_forward_backward_func(e.pp, virtual)
        losses = forward_backward(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in self.chunks] if virtual else iter(batches),
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=e.num_microbatches,
            seq_length=e.seq_len,
            micro_batch_size=e.micro_batch_size,
            forward_only=False,
        )
        backward_end = self.clock.mark()
        _, norm, _ = self.optimizer.step()
        # Only the last stage has losses; each of its tensor-parallel ranks has the same ones.
        mean = (
            torch.stack([microbatch["loss"] for microbatch in losses]).double().mean()
            if losses
            else torch.zeros(1).double()
        )
        total = mean.to(self.device).reshape(1) / (e.dp * e.tp)
        dist.all_reduce(total)
        return Ended(float(total), float(norm), backward_end)


def require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise UnsupportedByEngine("Megatron-Core runs on CUDA devices only: its buffers and clipping are on the device")


def virtual_stages(e: Experiment) -> int | None:
    """Number of chunks of a rank, if there are several, as Megatron-Core expects it; else None."""
    return e.virtual_stages if e.pp_schedule == "interleaved_1f1b" else None


def transformer_config(e: Experiment) -> TransformerConfig:
    """Model shape and layout; every other option has Megatron's command-line default, except those that need
    Transformer Engine or Apex."""
    m, bf16 = e.model, e.precision == "bf16"
    stages = [["decoder"] * len(stage) for stage in experiment_layers(e)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_heads,
        num_query_groups=m.num_kv_heads,
        kv_channels=m.head_dim,
        ffn_hidden_size=m.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=m.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        qk_layernorm=m.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_leave,
        output_layer_init_method=_leave,
        tensor_model_parallel_size=e.tp,
        sequence_parallel=e.tp > 1 and e.sequence_parallel,
        pipeline_model_parallel_size=e.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(e),
        pipeline_model_parallel_layout=stages if e.pp > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=virtual_stages(e) is not None,
        batch_p2p_comm=virtual_stages(e) is None,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,  # needs apex
        **(full if e.recompute == "full" else {}),
    )


def data_parallel_config(e: Experiment) -> DistributedDataParallelConfig:
    sharded = e.zero_stage == 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=e.dp > 1,
        overlap_param_gather=sharded and e.dp > 1,
        use_distributed_optimizer=sharded,
    )


def optimizer_config(e: Experiment) -> OptimizerConfig:
    bf16 = e.precision == "bf16"
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
        overlap_param_gather=e.zero_stage == 1 and e.dp > 1,
    )


@torch.no_grad()
def fill(model: Any, e: Experiment, device: torch.device) -> None:
    """Set a chunk's parameters to this rank's part of our seed's values."""
    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(_rows(_value(e, weights.embedding(e.model), device), e))
    for layer in model.decoder.layers:
        prefix = f"layers.{layer.layer_number - 1}"
        block_weights = {w.name.removeprefix(f"{prefix}."): w for w in weights.block(e.model, prefix, routed=False)}
        value = {name: _value(e, weight, device) for name, weight in block_weights.items()}
        q, k, v = (value[f"attention.{name}"].unflatten(0, (e.model.num_kv_heads, -1)) for name in "qkv")
        layer.self_attention.linear_qkv.weight.copy_(_rows(torch.cat([q, k, v], dim=1), e).flatten(0, 1))
        layer.self_attention.linear_proj.weight.copy_(_columns(value["attention.o"], e))
        layer.mlp.linear_fc1.weight.copy_(torch.cat([_rows(value["ffn.gate"], e), _rows(value["ffn.up"], e)]))
        layer.mlp.linear_fc2.weight.copy_(_columns(value["ffn.down"], e))
        if e.model.qk_norm:
            layer.self_attention.q_layernorm.weight.copy_(value["attention.q_norm"])
            layer.self_attention.k_layernorm.weight.copy_(value["attention.k_norm"])
        layer.input_layernorm.weight.copy_(value["attention_norm"])
        layer.pre_mlp_layernorm.weight.copy_(value["ffn_norm"])
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(_value(e, weights.final_norm(e.model), device))
        head = weights.embedding(e.model) if e.model.tie_embeddings else weights.head(e.model)
        if not (e.model.tie_embeddings and model.pre_process):  # a single stage has no separate head weight
            model.output_layer.weight.copy_(_rows(_value(e, head, device), e))


def _value(e: Experiment, weight: weights.Weight, device: torch.device) -> Tensor:
    return initial_part(weight, e.seed, device, {})


def _rows(whole: Tensor, e: Experiment) -> Tensor:
    return whole.chunk(e.tp, dim=0)[parallel_state.get_tensor_model_parallel_rank()]


def _columns(whole: Tensor, e: Experiment) -> Tensor:
    return whole.chunk(e.tp, dim=1)[parallel_state.get_tensor_model_parallel_rank()]


def _chunk(e: Experiment, config: TransformerConfig, virtual: int | None) -> GPTModel:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=e.model.qk_norm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(_Attention)
    if e.model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = _Norm
    return GPTModel(
        config,
        TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=virtual), _Norm),
        vocab_size=e.model.vocab_size,
        max_sequence_length=e.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        share_embeddings_and_output_weights=e.model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=e.model.rope_theta,
        vp_stage=virtual,
    )


class _Norm(torch.nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Attention(torch.nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Causal attention of queries [S, B, N, H] and possibly fewer keys and values [S, B, K, H]: [S, B, N * H]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)


def _forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    tokens, targets = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=targets), partial(_mean)


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the loss that is backpropagated is divided in place


def _leave(weight: Tensor) -> Tensor:
    return weight


def _be_quiet() -> None:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
