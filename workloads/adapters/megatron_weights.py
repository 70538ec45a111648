"""Sets the parameters of a Megatron-Core model to the values that our engine has for the same seed.

A chunk's parameters have other names with Transformer Engine, whose products hold the norm in front of them, and other
shapes than ours: queries, keys and values of one group lie beside each other, gate and up are one matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from workloads.engine.collectives.parameters import initial_part
from workloads.spec import weights
from workloads.spec.experiment import Experiment


@torch.no_grad()
def fill(model: Any, e: Experiment, device: torch.device) -> None:
    """Set a chunk's parameters to this rank's part of our seed's values."""
    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(_rows(_value(e, weights.embedding(e.model), device), e))
    for layer in model.decoder.layers:
        index = layer.layer_number - 1
        prefix, routed = f"layers.{index}", weights.routed(e.model, index)
        value = {
            weight.name.removeprefix(f"{prefix}."): _value(e, weight, device)
            for weight in weights.block(e.model, prefix, routed=routed)
        }
        _fill_attention(layer, value, e)
        if routed:
            layer.pre_mlp_layernorm.weight.copy_(value["ffn_norm"])
            _fill_experts(layer.mlp, value, e)
        else:
            _norm_before(layer.mlp.linear_fc1, layer.pre_mlp_layernorm).copy_(value["ffn_norm"])
            _fill_feed_forward(layer.mlp, [value[f"ffn.{name}"] for name in ("gate", "up", "down")], e)
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(_value(e, weights.final_norm(e.model), device))
        head = weights.embedding(e.model) if e.model.tie_embeddings else weights.head(e.model)
        if not (e.model.tie_embeddings and model.pre_process):  # a single stage has no separate head weight
            model.output_layer.weight.copy_(_rows(_value(e, head, device), e))


def _fill_attention(layer: Any, value: dict[str, Tensor], e: Experiment) -> None:
    attention = layer.self_attention
    q, k, v = (value[f"attention.{name}"].unflatten(0, (e.model.num_kv_heads, -1)) for name in "qkv")
    attention.linear_qkv.weight.copy_(_rows(torch.cat([q, k, v], dim=1), e).flatten(0, 1))
    attention.linear_proj.weight.copy_(_columns(value["attention.o"], e))
    if e.model.qk_norm:
        attention.q_layernorm.weight.copy_(value["attention.q_norm"])
        attention.k_layernorm.weight.copy_(value["attention.k_norm"])
    _norm_before(attention.linear_qkv, layer.input_layernorm).copy_(value["attention_norm"])


def _fill_feed_forward(mlp: Any, gate_up_down: list[Tensor], e: Experiment) -> None:
    gate, up, down = gate_up_down
    mlp.linear_fc1.weight.copy_(torch.cat([_rows(gate, e), _rows(up, e)]))
    mlp.linear_fc2.weight.copy_(_columns(down, e))


def _fill_experts(mlp: Any, value: dict[str, Tensor], e: Experiment) -> None:
    """The router, this rank's experts (their part of it, if they are divided) and the shared experts."""
    assert e.model.moe is not None
    mlp.router.weight.copy_(value["experts.router"])
    held = e.model.moe.num_experts // e.ep
    first = parallel_state.get_expert_model_parallel_rank() * held
    part = parallel_state.get_expert_tensor_parallel_rank()
    for local in range(held):
        gate, up, down = (value[f"experts.{name}"][first + local] for name in ("gate", "up", "down"))
        fused = torch.cat([whole.chunk(e.etp, dim=0)[part] for whole in (gate, up)])
        getattr(mlp.experts.linear_fc1, f"weight{local}").copy_(fused)
        getattr(mlp.experts.linear_fc2, f"weight{local}").copy_(down.chunk(e.etp, dim=1)[part])
    if e.model.moe.num_shared_experts:
        _fill_feed_forward(mlp.shared_experts, [value[f"shared.{name}"] for name in ("gate", "up", "down")], e)


def _norm_before(product: Any, norm: Any) -> Tensor:
    """Weight of the norm in front of a product: its own with Transformer Engine, a module's without."""
    weight: Tensor = product.layer_norm_weight if hasattr(product, "layer_norm_weight") else norm.weight
    return weight


def _value(e: Experiment, weight: weights.Weight, device: torch.device) -> Tensor:
    return initial_part(weight, e.seed, device, {})


def _rows(whole: Tensor, e: Experiment) -> Tensor:
    return whole.chunk(e.tp, dim=0)[parallel_state.get_tensor_model_parallel_rank()]


def _columns(whole: Tensor, e: Experiment) -> Tensor:
    return whole.chunk(e.tp, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
