"""The layers of any model by kind: those of its list, or those that its numbers describe."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, reduce

from workloads.spec.layer_kinds.attention import Attention, LatentAttention, Rope
from workloads.spec.layer_kinds.layer_list import MTP_LOSS_WEIGHT, LayerList
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, Mixer
from workloads.spec.layer_kinds.weight import Splits
from workloads.spec.model_spec import ModelSpec, MoESpec


@lru_cache(maxsize=256)
def layers_of(model: ModelSpec) -> LayerList:
    """The model's layers by kind. Of a model described by numbers these are dense layers, then those with experts."""
    if model.layers is not None:
        return model.layers
    mixer, moe = _mixer(model), model.moe
    dense = model.num_layers if moe is None else min(moe.num_dense_layers, model.num_layers)
    kinds = [Layer(mixer=mixer, mlp=DenseMLP(width=model.ffn_hidden_size, activation="silu"))] if dense else []
    if moe is not None and dense < model.num_layers:
        kinds.append(Layer(mixer=mixer, mlp=_experts(moe)))
    return LayerList(tuple(kinds), (0,) * dense + (len(kinds) - 1,) * (model.num_layers - dense))


def with_modules(model: ModelSpec, count: int, loss_weight: float = MTP_LOSS_WEIGHT) -> ModelSpec:
    """The model with modules of multi-token prediction after its last layer, which are more of its layers; itself for
    none."""
    if not count:
        return model
    layers = layers_of(model).with_modules(count, loss_weight)
    return dataclasses.replace(model, layers=layers, num_layers=model.num_layers + count)


def _mixer(model: ModelSpec) -> Mixer:
    rope, mla = Rope(model.rope_theta), model.mla
    if mla is None:
        return Attention(
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            value_dim=model.head_dim,
            rope=rope,
            norm="head" if model.qk_norm else "none",
        )
    return LatentAttention(
        heads=model.num_heads,
        kv_rank=mla.kv_lora_rank,
        nope_dim=mla.qk_nope_head_dim,
        rope_dim=mla.qk_rope_head_dim,
        value_dim=mla.v_head_dim,
        q_rank=mla.q_lora_rank,
        rope=rope,
    )


def _experts(moe: MoESpec) -> RoutedMLP:
    shared = moe.num_shared_experts * moe.expert_hidden_size
    return RoutedMLP(
        experts=moe.num_experts,
        chosen=moe.experts_per_token,
        expert=DenseMLP(width=moe.expert_hidden_size, activation="silu"),
        shared=DenseMLP(width=shared, activation="silu") if shared else None,
        shared_experts=moe.num_shared_experts,
        score=moe.gate,
        normalize=moe.normalize_weights,
        scale=moe.weight_scale,
        correction=moe.balance == "bias",
        balance_loss=moe.balance_coefficient if moe.balance == "aux_loss" else 0.0,
    )


@lru_cache(maxsize=256)
def splits_of(model: ModelSpec) -> Splits:
    """Numbers that tensor parallelism must divide in every layer."""
    return reduce(Splits.both, (kind.splits for kind in layers_of(model).kinds), Splits())


def routed_layers(model: ModelSpec) -> tuple[bool, ...]:
    """Whether each layer has routed experts."""
    layers = layers_of(model)
    routed = [kind.routed for kind in layers.kinds]
    return tuple(routed[at] for at in layers.order)
