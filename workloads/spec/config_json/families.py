"""The reader of each ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workloads.spec.config_json.dense_families import DENSE, read_dense
from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.granite_families import read_bamba, read_granite, read_granite_hybrid
from workloads.spec.config_json.hybrid_families import read_minimax, read_nemotron_h, read_olmo_hybrid, read_qwen_next
from workloads.spec.config_json.latent_families import (
    read_deepseek,
    read_deepseek_v4,
    read_kimi_linear,
    read_latent_dense,
)
from workloads.spec.config_json.routed_families import (
    read_ernie_moe,
    read_glm4_moe,
    read_gpt_oss,
    read_hunyuan_moe,
    read_hy_v3,
    read_llama4,
    read_minimax_m2,
    read_minimax_m3,
    read_mixtral,
    read_qwen_moe,
)
from workloads.spec.config_json.sliding_families import (
    read_afmoe,
    read_exaone_moe,
    read_gemma4,
    read_laguna,
    read_mellum,
    read_mimo_v2,
    read_step,
)
from workloads.spec.layer_kinds.model import LayeredModel

Reader = Callable[[Fields, str], LayeredModel]

_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "sarvam_mla")
_GRANITE = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hyperclovax")
FAMILIES: Mapping[str, Reader] = {
    **dict.fromkeys(DENSE, read_dense),
    "afmoe": read_afmoe,
    "bamba": read_bamba,
    **dict.fromkeys(_DEEPSEEK, read_deepseek),
    "deepseek_v4": read_deepseek_v4,
    "ernie4_5_moe": read_ernie_moe,
    "exaone_moe": read_exaone_moe,
    "gemma4_text": read_gemma4,
    **dict.fromkeys(("glm4_moe", "dots1", "sarvam_moe", "solar_open"), read_glm4_moe),
    "gpt_oss": read_gpt_oss,
    **dict.fromkeys(_GRANITE, read_granite),
    "granitemoehybrid": read_granite_hybrid,
    "hunyuan_v1_moe": read_hunyuan_moe,
    "hy_v3": read_hy_v3,
    "kimi_linear": read_kimi_linear,
    "laguna": read_laguna,
    "llama4_text": read_llama4,
    "mellum": read_mellum,
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), read_mimo_v2),
    "minimax": read_minimax,
    "minimax_m2": read_minimax_m2,
    **dict.fromkeys(("minimax_m3", "minimax_m3_text", "minimax_m3_vl_text"), read_minimax_m3),
    **dict.fromkeys(("minicpm3", "youtu"), read_latent_dense),
    "mixtral": read_mixtral,
    "nemotron_h": read_nemotron_h,
    "olmo_hybrid": read_olmo_hybrid,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe", "flex_olmo"), read_qwen_moe),
    "qwen3_next": read_qwen_next,
    "qwen3_5_text": read_qwen_next,
    "qwen3_5_moe_text": read_qwen_next,
    "step3p5": read_step,
    "step3p7": read_step,
}
"""By the ``model_type`` of the language part."""
