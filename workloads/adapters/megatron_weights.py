"""Sets the parameters of a Megatron-Core model to the values that our engine has for the same seed.

A chunk's parameters have other names with Transformer Engine, whose products hold the norm in front of them, and other
shapes than ours: queries, keys and values of one group lie beside each other, gate and up are one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from workloads.engine.collectives.parameters import initial_part
from workloads.spec import kind_weights, weights
from workloads.spec.experiment import Experiment

Values = Mapping[str, Tensor]
"""What each of a layer's weights holds, by its name in the layer."""


@torch.no_grad()
def fill(model: Any, e: Experiment, device: torch.device) -> None:
    """Set a chunk's parameters to this rank's part of our seed's values."""
    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(_rows(_value(e, weights.embedding(e.model), device), e))
    for layer in model.decoder.layers:
        index = layer.layer_number - 1
        value = {
            weight.name.removeprefix(f"layers.{index}."): _value(e, weight, device)
            for weight in kind_weights.block(e.model, index)
        }
        _fill_attention(layer, value, e)
        if weights.routed(e.model, index):
            layer.pre_mlp_layernorm.weight.copy_(value["ffn_norm"])
            _fill_experts(layer.mlp, value, e)
        else:
            _norm_before(layer.mlp.linear_fc1, layer.pre_mlp_layernorm).copy_(value["ffn_norm"])
            _fill_feed_forward(layer.mlp, value, "ffn", e)
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(_value(e, weights.final_norm(e.model), device))
        head = weights.embedding(e.model) if e.model.tie_embeddings else weights.head(e.model)
        if not (e.model.tie_embeddings and model.pre_process):  # a single stage has no separate head weight
            model.output_layer.weight.copy_(_rows(_value(e, head, device), e))


def _fill_attention(layer: Any, value: Values, e: Experiment) -> None:
    attention = layer.self_attention
    attention.linear_qkv.weight.copy_(_grouped(value, ("q", "gate", "k", "v"), e))
    attention.linear_proj.weight.copy_(_columns(value["attention.o"], e))
    if "attention.q_bias" in value:
        attention.linear_qkv.bias.copy_(_grouped(value, ("q_bias", "k_bias", "v_bias"), e))
    if "attention.o_bias" in value:
        attention.linear_proj.bias.copy_(value["attention.o_bias"])
    if "attention.sinks" in value:
        sinks = attention.core_attention.softmax_offset
        sinks.copy_(_rows(value["attention.sinks"], e).view(sinks.shape))
    if e.model.qk_norm:
        attention.q_layernorm.weight.copy_(value["attention.q_norm"])
        attention.k_layernorm.weight.copy_(value["attention.k_norm"])
    _norm_before(attention.linear_qkv, layer.input_layernorm).copy_(value["attention_norm"])


def _grouped(value: Values, names: tuple[str, ...], e: Experiment) -> Tensor:
    """This rank's rows of the parts that a layer has, those of one group of heads beside each other."""
    held = [value[f"attention.{name}"] for name in names if f"attention.{name}" in value]
    return _rows(torch.cat([part.unflatten(0, (e.model.num_kv_heads, -1)) for part in held], dim=1), e).flatten(0, 1)


def _fill_feed_forward(mlp: Any, value: Values, part: str, e: Experiment) -> None:
    """``part``: of a layer, ``ffn`` or ``shared``. Without a gate the first product makes the up projection alone."""
    into = [value[f"{part}.{name}"] for name in ("gate", "up") if f"{part}.{name}" in value]
    mlp.linear_fc1.weight.copy_(torch.cat([_rows(whole, e) for whole in into]))
    mlp.linear_fc2.weight.copy_(_columns(value[f"{part}.down"], e))


def _fill_experts(mlp: Any, value: Values, e: Experiment) -> None:
    """The router, this rank's experts (their part of it, if they are divided) and the shared experts."""
    assert e.model.moe is not None
    mlp.router.weight.copy_(value["experts.router"])
    if "experts.router_bias" in value:
        mlp.router.bias.copy_(value["experts.router_bias"])
    held = e.model.moe.num_experts // e.ep
    first = parallel_state.get_expert_model_parallel_rank() * held
    part = parallel_state.get_expert_tensor_parallel_rank()
    into = [name for name in ("gate", "up") if f"experts.{name}" in value]
    for local in range(held):
        parts = [value[f"experts.{name}"][first + local].chunk(e.etp, dim=0)[part] for name in into]
        _of_expert(mlp.experts, local, 1, "weight").copy_(torch.cat(parts))
        down = value["experts.down"][first + local].chunk(e.etp, dim=1)[part]
        _of_expert(mlp.experts, local, 2, "weight").copy_(down)
        if "experts.down_bias" in value:  # columns in ours; experts with biases are not divided
            biases = [value[f"experts.{name}_bias"][first + local, :, 0] for name in into]
            _of_expert(mlp.experts, local, 1, "bias").copy_(torch.cat(biases))
            _of_expert(mlp.experts, local, 2, "bias").copy_(value["experts.down_bias"][first + local, :, 0])
    if "shared.down" in value:
        _fill_feed_forward(mlp.shared_experts, value, "shared", e)
    if "shared.scale" in value:
        mlp.shared_experts.gate_weight.copy_(value["shared.scale"])


def _of_expert(experts: Any, local: int, product: int, kind: str) -> Tensor:
    """``weight`` or ``bias`` of an expert's first or second product: of a module of its own in Megatron-Core's layers,
    numbered in the grouped products of Transformer Engine."""
    own = hasattr(experts, "local_experts")
    module = getattr(experts.local_experts[local] if own else experts, f"linear_fc{product}")
    parameter: Tensor = getattr(module, kind if own else f"{kind}{local}")
    return parameter


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
