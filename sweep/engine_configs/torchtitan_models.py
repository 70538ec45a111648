"""Matches shapes to torchtitan's model flavors, and writes a Python module for a shape without a flavor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from sweep.engine_configs.draft import Draft
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec, canonical_model

Family = Literal["llama3", "qwen3", "deepseek_v3"]
MODULE = "ultrasweep_model"
"""Name of the module with our shape, also its name in torchtitan."""


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": 8,
        "head_dim": hidden // heads,
        "ffn_hidden_size": ffn,
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-5,
    }


def _qwen(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_hidden_size": ffn,
        "vocab_size": 151_936,
        "tie_embeddings": tied,
        "qk_norm": True,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-6,
    }


_QWEN_30B = {
    **_qwen(48, 2048, 32, 6144),
    "num_kv_heads": 4,
    "moe": MoESpec(
        num_experts=128, experts_per_token=8, expert_hidden_size=768, balance="bias", balance_coefficient=1e-3
    ),
}
FLAVOURS: Mapping[tuple[Family, str], Mapping[str, Any]] = {
    ("llama3", "8B"): _llama(32, 4096, 32, 14_336),
    ("llama3", "70B"): _llama(80, 8192, 64, 28_672),
    ("llama3", "405B"): _llama(126, 16_384, 128, 53_248),
    ("qwen3", "0.6B"): _qwen(28, 1024, 16, 3072, True),
    ("qwen3", "1.7B"): _qwen(28, 2048, 16, 6144, True),
    ("qwen3", "4B"): _qwen(36, 2560, 32, 9728, True),
    ("qwen3", "8B"): _qwen(36, 4096, 32, 12_288),
    ("qwen3", "14B"): _qwen(40, 5120, 40, 17_408),
    ("qwen3", "32B"): _qwen(64, 5120, 64, 25_600),
    ("qwen3", "30B-A3B"): _QWEN_30B,
}
"""torchtitan's named shapes in our fields; fields not named here have our defaults."""


def flavour_of(experiment: Experiment) -> tuple[Family, str] | None:
    """torchtitan's (model, flavor) with exactly this shape; None if there is none. How experts are balanced counts
    only if the router chooses them."""
    return flavour_among(FLAVOURS, experiment)


def flavour_among(
    flavours: Mapping[tuple[Family, str], Mapping[str, Any]], experiment: Experiment
) -> tuple[Family, str] | None:
    """`flavour_of` among other flavors."""
    shape = _without_balance(experiment)
    for names, fields in flavours.items():
        flavour = experiment.replace(model=ModelSpec(name=experiment.model.name, **fields))
        if shape == _without_balance(flavour):
            return names
    return None


def _without_balance(experiment: Experiment) -> ModelSpec:
    """The model in canonical form, without the method that balances its experts where that has no effect."""
    model = canonical_model(experiment.model)
    if model.moe is None or experiment.routing == "learned":
        return model
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, balance="none", balance_coefficient=0.0))


def model_class(draft: Draft) -> Family | None:
    """The torchtitan model that supports this shape; None, with a refusal in the draft, if there is none."""
    model = draft.experiment.model
    if model.mla is not None:
        if model.moe is None:
            draft.refuse("model.moe", "its model with latent attention has experts")
            return None
        if model.tie_embeddings:
            draft.refuse("model.tie_embeddings", "its model with latent attention ties none")
            return None
        return "deepseek_v3"
    if model.moe is not None and (model.moe.num_dense_layers or model.moe.num_shared_experts):
        field = "num_dense_layers" if model.moe.num_dense_layers else "num_shared_experts"
        draft.refuse(f"model.moe.{field}", "only its model with latent attention has them")
        return None
    own_head = model.head_dim * model.num_heads != model.hidden_size
    return "qwen3" if model.moe or model.tie_embeddings or model.qk_norm or own_head else "llama3"


def module_text(experiment: Experiment, family: Family) -> str:
    """Text of a module that registers the shape with torchtitan when imported (``experimental.custom_import``)."""
    model = experiment.model
    kind = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs", "deepseek_v3": "DeepSeekV3ModelArgs"}[family]
    shape = {
        "dim": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "max_seq_len": experiment.seq_len,
    }
    if family == "llama3":
        shape |= {"n_kv_heads": model.num_kv_heads, **_exact_ffn(model)}
    elif family == "qwen3":
        shape |= {
            "n_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "hidden_dim": model.ffn_hidden_size,
            "qk_norm": model.qk_norm,
            "enable_weight_tying": model.tie_embeddings,
        }
    else:
        assert model.mla is not None
        shape |= {"inter_dim": model.ffn_hidden_size, **_latent(model.mla), "original_seq_len": experiment.seq_len}
    lines = [f"    {name}={value!r}," for name, value in shape.items()]
    imports = [f"from torchtitan.models.{family} import {kind}, get_train_spec"]
    if model.moe is not None:
        imports.append("from torchtitan.models.moe import MoEArgs")
        lines += _expert_lines(model.moe, family)
    imports.append("from torchtitan.protocols.train_spec import register_train_spec")
    return "\n".join(
        [
            '"""A shape of ultrasweep for torchtitan 0.2.2 (`experimental.custom_import`)."""',
            "",
            "from dataclasses import replace",
            "",
            *imports,
            "",
            f"SHAPE = {kind}(",
            *lines,
            ")",
            f'register_train_spec("{MODULE}", replace(get_train_spec(), model_args={{{model.name!r}: SHAPE}}))',
            "",
        ]
    )


def _exact_ffn(model: ModelSpec) -> dict[str, Any]:
    """Arguments that give torchtitan's Llama exactly this feed-forward size.

    It multiplies two thirds of 4 x dim by a factor and rounds up to a multiple. With the size itself as the multiple
    and a factor that stays below the size, the result is the size.
    """
    usual = 2 * 4 * model.hidden_size // 3
    return {"multiple_of": model.ffn_hidden_size, "ffn_dim_multiplier": min(1.0, 0.5 * model.ffn_hidden_size / usual)}


def _latent(mla: MLASpec) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def _expert_lines(moe: MoESpec, family: Family) -> list[str]:
    args = {
        "num_experts": moe.num_experts,
        "num_shared_experts": moe.num_shared_experts,
        "top_k": moe.experts_per_token,
        "score_func": moe.gate,
        "route_norm": moe.normalize_weights,
        "route_scale": moe.weight_scale,
        "score_before_experts": False,
        "load_balance_coeff": (moe.balance_coefficient or None) if moe.balance == "bias" else None,
    }
    lines = [f"    moe_inter_dim={moe.expert_hidden_size},"]
    lines.append("    moe_enabled=True," if family == "qwen3" else f"    n_dense_layers={moe.num_dense_layers},")
    return [*lines, f"    moe_args=MoEArgs({', '.join(f'{name}={value!r}' for name, value in args.items())}),"]
