"""Sets the parameters of a Megatron-Core model to the values that our engine has for the same seed.

A chunk's parameters have other names with Transformer Engine, whose products hold the norm in front of them, and other
shapes than ours: queries, keys and values of one group lie beside each other, gate and up are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from workloads.engine.collectives.parameters import initial_part
from workloads.spec import weights
from workloads.spec.experiment import Experiment

Put = Callable[[Tensor, Tensor], object]
"""Takes a parameter and this rank's part of its value, in fp32."""


def fill_masters(optimizer: Any, model: Any, e: Experiment, device: torch.device) -> None:
    """Set the fp32 weights of a chunk's optimizer to our seed's values, which it has taken from the rounded ones."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    fill(model, e, device, partial(_put_master, parts))


def _put_master(optimizers: Sequence[Any], parameter: Tensor, value: Tensor) -> None:
    """Set a parameter's fp32 weights, or the shard of them that this rank has. A parameter in fp32 has no others."""
    master = getattr(parameter, "main_param", None)
    if master is None:
        return
    whole = value.float().reshape(-1)
    if getattr(parameter, "main_param_sharded", False):
        holder = next(one for one in optimizers if parameter in one.model_param_gbuf_map)
        held = holder._get_model_param_range_map(parameter)["param"]
        whole = whole[held.start : held.end]
    master.copy_(whole.view_as(master))


@torch.no_grad()
def fill(model: Any, e: Experiment, device: torch.device, put: Put = Tensor.copy_) -> None:
    """Set a chunk's parameters to this rank's part of our seed's values."""
    if model.pre_process:
        put(model.embedding.word_embeddings.weight, _rows(_value(e, weights.embedding(e.model), device), e))
    for layer in model.decoder.layers:
        index = layer.layer_number - 1
        prefix, routed = f"layers.{index}", weights.routed(e.model, index)
        value = {
            weight.name.removeprefix(f"{prefix}."): _value(e, weight, device)
            for weight in weights.block(e.model, prefix, routed=routed)
        }
        _fill_attention(layer, value, e, put)
        if routed:
            put(layer.pre_mlp_layernorm.weight, value["ffn_norm"])
            _fill_experts(layer.mlp, value, e, put)
        else:
            put(_norm_before(layer.mlp.linear_fc1, layer.pre_mlp_layernorm), value["ffn_norm"])
            _fill_feed_forward(layer.mlp, [value[f"ffn.{name}"] for name in ("gate", "up", "down")], e, put)
    if model.post_process:
        put(model.decoder.final_layernorm.weight, _value(e, weights.final_norm(e.model), device))
        head = weights.embedding(e.model) if e.model.tie_embeddings else weights.head(e.model)
        if not (e.model.tie_embeddings and model.pre_process):  # a single stage has no separate head weight
            put(model.output_layer.weight, _rows(_value(e, head, device), e))


def _fill_attention(layer: Any, value: dict[str, Tensor], e: Experiment, put: Put) -> None:
    attention = layer.self_attention
    q, k, v = (value[f"attention.{name}"].unflatten(0, (e.model.num_kv_heads, -1)) for name in "qkv")
    put(attention.linear_qkv.weight, _rows(torch.cat([q, k, v], dim=1), e).flatten(0, 1))
    put(attention.linear_proj.weight, _columns(value["attention.o"], e))
    if e.model.qk_norm:
        put(attention.q_layernorm.weight, value["attention.q_norm"])
        put(attention.k_layernorm.weight, value["attention.k_norm"])
    put(_norm_before(attention.linear_qkv, layer.input_layernorm), value["attention_norm"])


def _fill_feed_forward(mlp: Any, gate_up_down: list[Tensor], e: Experiment, put: Put) -> None:
    gate, up, down = gate_up_down
    put(mlp.linear_fc1.weight, torch.cat([_rows(gate, e), _rows(up, e)]))
    put(mlp.linear_fc2.weight, _columns(down, e))


def _fill_experts(mlp: Any, value: dict[str, Tensor], e: Experiment, put: Put) -> None:
    """The router, this rank's experts (their part of it, if they are divided) and the shared experts."""
    assert e.model.moe is not None
    put(mlp.router.weight, value["experts.router"])
    held = e.model.moe.num_experts // e.ep
    first = parallel_state.get_expert_model_parallel_rank() * held
    part = parallel_state.get_expert_tensor_parallel_rank()
    for local in range(held):
        gate, up, down = (value[f"experts.{name}"][first + local] for name in ("gate", "up", "down"))
        fused = torch.cat([whole.chunk(e.etp, dim=0)[part] for whole in (gate, up)])
        put(getattr(mlp.experts.linear_fc1, f"weight{local}"), fused)
        put(getattr(mlp.experts.linear_fc2, f"weight{local}"), down.chunk(e.etp, dim=1)[part])
    if e.model.moe.num_shared_experts:
        _fill_feed_forward(mlp.shared_experts, [value[f"shared.{name}"] for name in ("gate", "up", "down")], e, put)


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
