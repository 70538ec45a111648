"""The reader of each ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workloads.spec.config_json.dense_families import DENSE, read_dense
from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.hybrid_families import read_minimax, read_nemotron_h, read_qwen_next
from workloads.spec.config_json.latent_families import read_deepseek, read_deepseek_v4, read_kimi_linear
from workloads.spec.config_json.routed_families import (
    read_glm4_moe,
    read_gpt_oss,
    read_llama4,
    read_minimax_m2,
    read_minimax_m3,
    read_mixtral,
    read_qwen_moe,
)
from workloads.spec.config_json.sliding_families import read_gemma4, read_mimo_v2, read_step
from workloads.spec.layer_kinds.model import LayeredModel

Reader = Callable[[Fields, str], LayeredModel]

FAMILIES: Mapping[str, Reader] = {
    **dict.fromkeys(DENSE, read_dense),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"), read_deepseek),
    "deepseek_v4": read_deepseek_v4,
    "gemma4_text": read_gemma4,
    **dict.fromkeys(("glm4_moe", "dots1"), read_glm4_moe),
    "gpt_oss": read_gpt_oss,
    "kimi_linear": read_kimi_linear,
    "llama4_text": read_llama4,
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), read_mimo_v2),
    "minimax": read_minimax,
    "minimax_m2": read_minimax_m2,
    **dict.fromkeys(("minimax_m3", "minimax_m3_text", "minimax_m3_vl_text"), read_minimax_m3),
    "mixtral": read_mixtral,
    "nemotron_h": read_nemotron_h,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe"), read_qwen_moe),
    "qwen3_next": read_qwen_next,
    "qwen3_5_text": read_qwen_next,
    "qwen3_5_moe_text": read_qwen_next,
    "step3p5": read_step,
    "step3p7": read_step,
}
"""By the ``model_type`` of the language part."""
