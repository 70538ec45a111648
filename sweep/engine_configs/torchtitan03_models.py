"""Model shapes as the Python code of torchtitan 0.3: one of its flavors, or a shape built from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sweep.engine_configs.torchtitan_models import FLAVOURS, Family, flavour_among
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MLASpec, MoESpec

LLAMA_1B: Mapping[str, Any] = {
    **FLAVOURS["llama3", "8B"],
    "num_layers": 16,
    "hidden_size": 2048,
    "head_dim": 64,
    "ffn_hidden_size": 8192,
    "tie_embeddings": True,
}
FLAVOURS_03: Mapping[tuple[Family, str], Mapping[str, Any]] = {
    **FLAVOURS,
    ("llama3", "1B"): LLAMA_1B,
    ("llama3", "3B"): {**LLAMA_1B, "num_layers": 28, "hidden_size": 3072, "num_heads": 24, "head_dim": 128},
}
"""Its named shapes in our fields; fields not named here have our defaults."""
LONGEST = {"llama3": 131_072, "qwen3": 40_960, "gpt_oss": 131_072}
"""The longest sequence of a flavor, by family."""
CLASSES: Mapping[Family, tuple[str, str, str]] = {
    "llama3": ("Llama3Model", "Llama3TransformerBlock", "parallelize_llama"),
    "qwen3": ("Qwen3Model", "Qwen3TransformerBlock", "parallelize_qwen3"),
    "deepseek_v3": ("DeepSeekV3Model", "DeepSeekV3TransformerBlock", "parallelize_deepseekv3"),
}
"""Model, layer and the function that parallelises the model."""
_COMMON = "torchtitan.models.common"


def named(experiment: Experiment) -> tuple[Family, str] | None:
    """torchtitan's (family, flavor) with exactly this shape and long enough sequences; None if there is none."""
    found = flavour_among(FLAVOURS_03, experiment)
    return found if found is not None and experiment.seq_len <= LONGEST[found[0]] else None


def flavor_text(
    family: Family | Literal["gpt_oss"], flavor: str, backend: str, converters: str
) -> tuple[list[str], str]:
    """Imports, and the function that gives the model specification of a flavor."""
    more = f", converters=[{converters}]" if converters else ""
    return [f"from torchtitan.models.{family} import model_registry"], (
        f'def model_spec() -> ModelSpec:\n    return model_registry("{flavor}", attn_backend="{backend}"{more})\n'
    )


def shape_text(experiment: Experiment, family: Family, backend: str, converters: str) -> tuple[list[str], str]:
    """Imports, and functions that build the model specification of a shape without a flavor."""
    m = experiment.model
    model, block, parallelize = CLASSES[family]
    imports = [
        "from functools import partial",
        "from torch import nn",
        "from torchtitan.distributed.pipeline_parallel import pipeline_llm",
        f"from {_COMMON} import {'CosSinRoPE' if family == 'qwen3' else 'ComplexRoPE'}, Embedding, Linear, RMSNorm",
        f"from torchtitan.models.{family}.model import {model}, {block}",
        f"from torchtitan.models.{family}.parallelize import {parallelize}",
    ]
    helpers = []
    if m.mla is None:
        helpers += ["get_attention_config", "make_gqa_config"]
    else:
        imports.append("from torchtitan.models.deepseek_v3 import make_mla_attention_config")
    dense, routed = _first_dense(experiment), m.moe is not None
    if dense or (m.moe is not None and m.moe.num_shared_experts):
        helpers.append("make_ffn_config")
    if routed:
        helpers += ["make_moe_config", "make_routed_experts_config", "make_router_config"]
        imports.append("from torchtitan.components.optimizer import register_moe_load_balancing_hook")
    imports.append(f"from {_COMMON}.config_utils import {', '.join(sorted(helpers))}")
    lines = [
        'LINEAR = {"weight": partial(nn.init.trunc_normal_, std=0.02)}',
        "",
        "",
        "def norm(size: int) -> RMSNorm.Config:",
        f'    return RMSNorm.Config(normalized_shape=size, eps={m.norm_eps!r}, param_init={{"weight": nn.init.ones_}})',
        "",
        "",
        f"def layer(number: int) -> {block}.Config:",
        *_attention(experiment, family, backend),
        *_feed_forward(experiment),
        f"    return {block}.Config(",
        f"        attention_norm=norm({m.hidden_size}),",
        f"        ffn_norm=norm({m.hidden_size}),",
        "        attention=attention,",
        *(["        feed_forward=feed_forward,"] if dense else []),
        *(["        moe=moe,"] if routed else []),
        "    )",
        "",
        "",
        "def model_spec() -> ModelSpec:",
        f"    model = {model}.Config(",
        f"        dim={m.hidden_size},",
        f"        vocab_size={m.vocab_size},",
        f"        enable_weight_tying={m.tie_embeddings},",
        f"        tok_embeddings=Embedding.Config(num_embeddings={m.vocab_size}, embedding_dim={m.hidden_size}, "
        "param_init=LINEAR),",
        f"        norm=norm({m.hidden_size}),",
        f"        lm_head=Linear.Config(in_features={m.hidden_size}, out_features={m.vocab_size}, param_init=LINEAR),",
        f"        layers=[layer(number) for number in range({m.num_layers})],",
        "    )",
        *([f"    model = {converters}.build().convert(model)"] if converters else []),
        "    return ModelSpec(",
        '        name="ultrasweep",',
        f"        flavor={m.name!r},",
        "        model=model,",
        f"        parallelize_fn={parallelize},",
        "        pipelining_fn=pipeline_llm,",
        f"        post_optimizer_build_fn={'register_moe_load_balancing_hook' if routed else None},",
        "        state_dict_adapter=None,",
        "    )",
    ]
    return imports, "\n".join(lines) + "\n"


def _first_dense(experiment: Experiment) -> int:
    """Number of layers, from the first, without experts."""
    m = experiment.model
    return m.num_layers if m.moe is None else m.moe.num_dense_layers


def _attention(experiment: Experiment, family: Family, backend: str) -> list[str]:
    m, rotary = experiment.model, "CosSinRoPE" if family == "qwen3" else "ComplexRoPE"
    size = m.head_dim if m.mla is None else m.mla.qk_rope_head_dim
    rope = f"{rotary}.Config(dim={size}, max_seq_len={experiment.seq_len}, theta={m.rope_theta!r})"
    if m.mla is not None:
        return _latent(experiment, m.mla, backend, rope)
    return [
        "    attention = make_gqa_config(",
        f"        dim={m.hidden_size},",
        f"        n_heads={m.num_heads},",
        f"        n_kv_heads={m.num_kv_heads},",
        f"        head_dim={m.head_dim if family == 'qwen3' else None},",
        "        wqkv_param_init=LINEAR,",
        "        wo_param_init=LINEAR,",
        f'        inner_attention=get_attention_config("{backend}"),',
        "        fuse_qkv=True,",
        f"        qk_norm={f'norm({m.head_dim})' if m.qk_norm else None},",
        f"        rope={rope},",
        "    )",
    ]


def _latent(experiment: Experiment, mla: MLASpec, backend: str, rope: str) -> list[str]:
    m = experiment.model
    sizes = {
        "dim": m.hidden_size,
        "n_heads": m.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }
    return [
        "    attention = make_mla_attention_config(",
        "        layer_id=number,",
        *(f"        {name}={size}," for name, size in sizes.items()),
        f'        attn_backend="{backend}",',
        "        linear_init=LINEAR,",
        '        norm_init={"weight": nn.init.ones_},',
        "        depth_init=lambda _: LINEAR,",
        f"        rope={rope},",
        "    )",
        f"    attention.q_norm.eps = attention.kv_norm.eps = {m.norm_eps!r}",
    ]


def _feed_forward(experiment: Experiment) -> list[str]:
    m, dense = experiment.model, _first_dense(experiment)
    lines = []
    if dense:
        only = f" if number < {dense} else None" if dense < m.num_layers else ""
        lines.append(f"    feed_forward = {_ffn(m.hidden_size, m.ffn_hidden_size)}{only}")
    if m.moe is not None:
        only = f" if number >= {dense} else None" if dense else ""
        lines += [*_experts(m.hidden_size, m.moe), f"    ){only}"]
    return lines


def _ffn(hidden: int, size: int) -> str:
    return f"make_ffn_config(dim={hidden}, hidden_dim={size}, w1_param_init=LINEAR, w2w3_param_init=LINEAR)"


def _experts(hidden: int, moe: MoESpec) -> list[str]:
    routed = f"dim={hidden}, num_experts={moe.num_experts}, top_k={moe.experts_per_token}"
    shared = _ffn(hidden, moe.expert_hidden_size * moe.num_shared_experts) if moe.num_shared_experts else None
    stacked = '{name: LINEAR["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}'
    return [
        "    moe = make_moe_config(",
        f"        num_experts={moe.num_experts},",
        f"        router=make_router_config({routed}, gate_param_init=LINEAR, score_func={moe.gate!r}, "
        f"route_norm={moe.normalize_weights}, route_scale={moe.weight_scale!r}),",
        f"        routed_experts=make_routed_experts_config({routed}, hidden_dim={moe.expert_hidden_size}, "
        f'param_init={stacked}, comm_backend="standard"),',
        f"        shared_experts={shared},",
        f"        load_balance_coeff={(moe.balance_coefficient or None) if moe.balance == 'bias' else None},",
    ]
