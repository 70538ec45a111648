"""The family of transformers that has the shape of a model, and what all of them lack, by name. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workloads.rules.engine_kinds import adapters_lack
from workloads.spec.config_json.write import config_of
from workloads.spec.model_spec import ModelSpec, MoESpec


def transformers_config(model: ModelSpec) -> dict[str, Any] | None:
    """The fields of a config.json, ``model_type`` included, of the family of transformers that computes what a model
    does; None if there is none.

    Llama, Qwen3, Mixtral and Qwen3-MoE have what numbers describe without latent attention and with softmax scores:
    norms of queries and keys make it a Qwen3. All else is looked up among the families of
    `workloads.spec.config_json.write`.
    """
    moe = model.moe
    if model.layers is not None or model.mla is not None or (moe is not None and moe.gate == "sigmoid"):
        return config_of(model)
    if moe is not None and any(_of_softmax_experts(model, moe)):
        return None
    ends = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
    }
    if moe is None:
        kind = "qwen3" if model.qk_norm else "llama"
        return {"model_type": kind, **ends, "intermediate_size": model.ffn_hidden_size}
    experts = {"num_experts_per_tok": moe.experts_per_token, "output_router_logits": False, "sliding_window": None}
    if not model.qk_norm:
        width = {"intermediate_size": moe.expert_hidden_size, "num_local_experts": moe.num_experts}
        return {"model_type": "mixtral", **ends, **experts, **width}
    return {
        "model_type": "qwen3_moe",
        **ends,
        **experts,
        "intermediate_size": model.ffn_hidden_size,
        "moe_intermediate_size": moe.expert_hidden_size,
        "num_experts": moe.num_experts,
        "norm_topk_prob": moe.normalize_weights,
        "mlp_only_layers": list(range(moe.num_dense_layers)),
    }


def families_lack(model: ModelSpec) -> list[str]:
    """What no family of transformers has together with the rest of the model, by name; empty if one computes what the
    model does."""
    if transformers_config(model) is not None:
        return []
    moe = model.moe
    if model.layers is not None or moe is None:
        return list(adapters_lack(model)) or ["these layers together"]
    if model.mla is not None and moe.gate == "softmax":
        return list(_of_deepseek_v2(moe))
    if model.mla is not None or moe.gate == "sigmoid":
        family = "DeepSeek-V3" if model.mla is not None else "GLM-4.5"
        return [f"experts with sigmoid scores and without shared ones (its {family} always has them)"]
    return list(_of_softmax_experts(model, moe))


def _of_deepseek_v2(moe: MoESpec) -> Iterator[str]:
    if not moe.num_shared_experts:
        yield "latent attention with experts and without shared ones (its DeepSeek-V2 always has them)"
    if moe.normalize_weights:
        yield "latent attention with softmax scores that are divided by their sum (its DeepSeek-V2 does not divide)"
    if moe.balance == "bias":
        yield "latent attention with softmax scores and biases that balance experts (its DeepSeek-V2 has none)"


def _of_softmax_experts(model: ModelSpec, moe: MoESpec) -> Iterator[str]:
    """What neither Mixtral nor Qwen3-MoE has."""
    family = "Qwen3-MoE" if model.qk_norm else "Mixtral"
    if moe.num_shared_experts:
        yield f"softmax scores beside shared experts without a gate (its {family} has no shared experts)"
    if moe.weight_scale != 1.0:
        yield f"softmax scores with a factor of the weights (its {family} has none)"
    if moe.balance == "bias":
        yield f"softmax scores with biases that balance experts (its {family} has none; aux_loss and none would work)"
    if not model.qk_norm and moe.num_dense_layers:
        yield "dense layers before experts without qk_norm (its Mixtral has experts in every layer)"
    if not model.qk_norm and not moe.normalize_weights:
        yield "softmax scores that are not divided by their sum without qk_norm (its Mixtral divides them)"
