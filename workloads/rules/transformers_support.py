"""Lists what transformers with accelerate cannot run, and the family that has the shape of a model. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workloads.rules.refusal import Refusal
from workloads.spec.config_json.write import config_of
from workloads.spec.engine_versions import ENGINES
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, Mamba2
from workloads.spec.model_spec import ModelSpec


def transformers_config(model: ModelSpec) -> dict[str, Any] | None:
    """The fields of a config.json, ``model_type`` included, of the family of transformers that computes what a model
    does; None if there is none. Norms of queries and keys: Qwen3."""
    if model.layers is not None:
        return config_of(model)
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
    moe = model.moe
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


def _other_experts(e: Experiment) -> bool:
    """Whether experts that numbers describe differ from those of Qwen3-MoE: softmax over all, no shared ones, no
    factor."""
    moe = e.model.moe
    return (
        e.model.layers is None
        and moe is not None
        and (moe.gate != "softmax" or moe.num_shared_experts > 0 or moe.weight_scale != 1.0)
    )


def _lacks_biases(e: Experiment) -> bool:
    """Whether a mixture that numbers describe has biases of the choice: Mixtral and Qwen3-MoE have none."""
    return e.model.layers is None and e.model.moe is not None and e.model.moe.balance == "bias"


def _other_mixtral(e: Experiment) -> bool:
    """Whether a model without norms of queries and keys differs from Mixtral, the only family that it could have."""
    moe = e.model.moe
    return (
        e.model.layers is None
        and moe is not None
        and not e.model.qk_norm
        and (moe.num_dense_layers > 0 or not moe.normalize_weights)
    )


def _mixes_by(e: Experiment, kind: type) -> bool:
    """Whether some layer's mixer is of this kind."""
    return e.model.layers is not None and any(isinstance(layer.mixer, kind) for layer in e.model.layers.kinds)


def _divides(axis: str) -> Callable[[Experiment], bool]:
    return lambda e: getattr(e, axis) > 1


_ONE_AXIS = "its adapter runs data parallelism alone; use {axis}=1"

TRANSFORMERS = (
    Refusal("model", lambda e: e.model.mla is not None, "its adapter has no latent attention"),
    Refusal(
        "model",
        _other_experts,
        "its experts have softmax gates and neither shared experts nor a factor of their weights",
    ),
    Refusal(
        "model",
        _lacks_biases,
        "its Mixtral and Qwen3-MoE have no biases that balance experts; balance=aux_loss and none would work",
    ),
    Refusal("model", _other_mixtral, "without qk_norm it would be Mixtral: experts in every layer, normalized weights"),
    Refusal(
        "engine_version",
        lambda e: e.engine_version != ENGINES["transformers"],
        f"the adapter is for {ENGINES['transformers']}",
    ),
    *(Refusal(axis, _divides(axis), _ONE_AXIS.format(axis=axis)) for axis in ("tp", "pp", "cp", "ep")),
    Refusal("routing", lambda e: e.model.moe is not None and e.routing != "learned", "its router decides; use learned"),
    Refusal("capacity_factor", lambda e: e.capacity_factor is not None, "it drops no tokens; use null"),
    Refusal(
        "precision",
        lambda e: e.precision not in ("bf16", "fp32"),
        "use bf16 or fp32: its norms compute in fp32, and its adapter has neither fp16's loss scale nor fp8",
    ),
    Refusal(
        "precision",
        lambda e: e.precision == "fp32" and e.compile != "none",
        "accelerate turns TF32 on if it compiles without mixed precision; use bf16, or compile=none",
        on="cuda",
    ),
    Refusal(
        "recurrence",
        lambda e: e.recurrence == "fla" and not _mixes_by(e, GatedDeltaRule),
        "on flash-linear-attention it runs the gated delta rule, and Mamba-2 on mamba-ssm; use mamba_ssm or torch",
    ),
    Refusal(
        "recurrence",
        lambda e: e.recurrence == "mamba_ssm" and not _mixes_by(e, Mamba2),
        "it runs Mamba-2 alone on mamba-ssm; use fla or torch",
    ),
    Refusal("attention", lambda e: e.attention != "auto", "torch chooses the kernel there; use auto"),
    Refusal(
        "recompute",
        lambda e: e.recompute not in ("none", "full"),
        "it recomputes whole layers; use none or full",
    ),
    Refusal("recompute_every", lambda e: e.recompute_every > 1, "it recomputes every layer; use 1"),
)
"""Refusals of transformers and accelerate as `workloads.adapters.transformers` runs them."""
