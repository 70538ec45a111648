"""Ten layouts that people train with, and what each of the engines refuses of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweep.composing.conffiles import ConfFolders
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import with_modules


def layout(model: str, *, modules: int = 0, **fields: Any) -> Experiment:
    """``modules``: of multi-token prediction, with DeepSeek-V3's first weight of their loss."""
    return Experiment.canonical(model=with_modules(ConfFolders().model(model), modules, 0.3), **fields)


LAYOUTS: Mapping[str, Experiment] = {
    "8B zero2": layout("llama8b", dp=4, zero_stage=2, micro_batch_size=2, global_batch_size=32),
    "1B replicated": layout("llama1b", dp=8, micro_batch_size=4, global_batch_size=64, attention="flash"),
    "8B hsdp": layout("llama8b", dp_replicate=2, dp_shard=4, zero_stage=3, global_batch_size=64, compile="block"),
    "8B zero1 tp2 pp2": layout(
        "llama8b", dp=2, zero_stage=1, tp=2, pp=2, micro_batch_size=2, global_batch_size=32, recompute="full"
    ),
    "70B interleaved": layout(
        "llama70b",
        dp=4,
        zero_stage=1,
        tp=4,
        pp=4,
        pp_schedule="interleaved_1f1b",
        virtual_stages=5,
        pp_split="even",
        recompute="selective",
        global_batch_size=64,
    ),
    "8B long context": layout("llama8b", cp=4, dp=2, zero_stage=3, global_batch_size=4, seq_len=65536),
    "8B fp8 tp2": layout(
        "llama8b", dp=4, zero_stage=3, tp=2, micro_batch_size=2, global_batch_size=32, precision="fp8_tensorwise"
    ),
    "8B zero bubble": layout(
        "llama8b", dp=2, zero_stage=1, pp=4, pp_schedule="zero_bubble_v", micro_batch_size=1, global_batch_size=32
    ),
    "30B experts": layout("qwen3_30b_a3b", dp=8, zero_stage=3, ep=8, micro_batch_size=2, global_batch_size=64, seed=7),
    "V3 experts": layout(
        "deepseek_v3", dp=32, zero_stage=1, tp=2, pp=8, ep=32, routing="learned", global_batch_size=512
    ),
}
OWN_SHAPES: Mapping[str, Experiment] = {
    "tied": layout("llama1b", dp=4, zero_stage=2, global_batch_size=8),
    "small ffn": layout("llama8b_8_layers", dp=4, zero_stage=2, global_batch_size=8),
    "experts": layout("mixtral_8x7b", dp=4, zero_stage=2, ep=2, global_batch_size=8),
    "latent": layout("deepseek_v2_lite", dp=4, zero_stage=2, ep=2, global_batch_size=8),
    "plain": layout("llama1.34b", dp=4, zero_stage=2, global_batch_size=8),
}
"""Shapes that torchtitan has no name for: they come with a Python module."""
REFUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torchtitan": {"8B long context": ("cp_kind",), "8B fp8 tp2": ("precision",)},
    "torchtitan-0.2": {},
    "megatron": {"8B zero bubble": ("pp_schedule",)},
    "nanotron": {
        "8B zero2": ("zero_stage",),
        "8B hsdp": ("zero_stage", "dp_replicate"),
        "70B interleaved": ("pp_schedule", "virtual_stages", "recompute"),
        "8B long context": ("zero_stage",),
        "8B fp8 tp2": ("zero_stage", "precision"),
        "8B zero bubble": ("pp_schedule", "virtual_stages"),
        "30B experts": ("model.head_dim", "model.qk_norm", "zero_stage"),
        "V3 experts": (
            *("model.mla", "model.moe.num_shared_experts", "model.moe.num_dense_layers", "model.moe.gate"),
            *("model.moe.weight_scale", "model.moe.balance", "etp"),
        ),
    },
    "deepspeed": {
        "1B replicated": ("zero_stage",),
        "8B hsdp": ("dp_replicate",),
        "8B zero1 tp2 pp2": ("sequence_parallel",),
        "70B interleaved": ("pp_schedule", "virtual_stages", "sequence_parallel", "recompute"),
        "8B long context": ("cp_kind",),
        "8B fp8 tp2": ("sequence_parallel", "precision"),
        "8B zero bubble": ("pp_schedule", "virtual_stages"),
        "V3 experts": ("sequence_parallel", "etp"),
    },
    "transformers": {
        "8B zero1 tp2 pp2": ("tp", "pp"),
        "70B interleaved": ("tp", "pp", "recompute"),
        "8B long context": ("cp",),
        "8B fp8 tp2": ("precision", "tp"),
        "8B zero bubble": ("pp",),
        "30B experts": ("ep",),
        "V3 experts": ("tp", "pp", "ep"),
    },
}
"""The fields that an engine has no counterpart of, by layout; no entry: all of it can be exported."""
