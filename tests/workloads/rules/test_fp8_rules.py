"""The rules about matrix products in 8 bits or fewer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    H200,
    LLAMA_8B,
    QWEN3_30B,
)
from tests.workloads.rules.broken_rules import broken
from workloads.spec.experiment import ENGINES

SLIM = dataclasses.replace(DEEPSEEK_V2_LITE, ffn_hidden_size=8192)
assert DEEPSEEK_V2_LITE.mla is not None and QWEN3_30B.moe is not None
NARROW = dataclasses.replace(SLIM, mla=dataclasses.replace(DEEPSEEK_V2_LITE.mla, qk_rope_head_dim=58))
SHARED = dataclasses.replace(QWEN3_30B, moe=dataclasses.replace(QWEN3_30B.moe, num_shared_experts=1))
THIN = dataclasses.replace(LLAMA_8B, ffn_hidden_size=8 * 1744)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"precision": "fp8_tensorwise", "seq_len": 4100}, "multiples of 16 on every rank: 4100 tokens"),
        ({"precision": "fp8_blockwise", "seq_len": 4096 + 64}, "multiples of 128 on every rank: 4160 tokens"),
        ({"precision": "fp8_blockwise", "tp": 8, "model": THIN}, "hidden_size=4096, and 512, 768, 1744 columns"),
        ({"precision": "fp8_rowwise", "tp": 8, "model": SLIM, "seq_len": 64}, "of 16: 576 columns and 8 tokens of the"),
        (
            {"precision": "fp8_blockwise", "tp": 8, "model": DEEPSEEK_V2_LITE},
            "2048, 384, 512 and 256 columns of queries, keys with",
        ),
        ({"precision": "fp8_tensorwise", "model": NARROW}, "and of 16: 570 columns and 4096 tokens of the down"),
    ],
)
def test_sizes_that_fp8_products_cannot_have(fields: dict[str, Any], told: str) -> None:
    assert told in broken(**fields)["fp8_sizes"]
    assert "fp8_sizes" not in broken(**{**fields, "precision": "bf16"})
    assert "fp8_sizes" not in broken(precision=fields["precision"])


def test_sizes_without_effect_refuse_nothing_and_are_not_mentioned() -> None:
    """The feed-forward size of a mixture without dense layers, and the head size of latent attention."""
    routed = dataclasses.replace(QWEN3_30B, ffn_hidden_size=999)
    assert broken(model=routed, tp=2) == broken(model=routed, tp=2, precision="fp8_blockwise") == {}
    told = broken(model=routed, precision="fp8_tensorwise", seq_len=4100)["fp8_sizes"]
    assert "and 4096, 5120 columns of queries, of all projections; choose another" in told
    latent = dataclasses.replace(DEEPSEEK_V3, head_dim=57)
    assert broken(model=latent, tp=2, precision="fp8_rowwise") == {}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"precision": "fp8_rowwise", "tp": 32, "etp": 32}, "of an expert on every rank, 24, and"),
        (
            {"precision": "fp8_blockwise", "tp": 4, "etp": 1, "model": SHARED},
            "128 of shared ones, 192;",
        ),
    ],
)
def test_sizes_that_experts_cannot_have_in_fp8(fields: dict[str, Any], told: str) -> None:
    fields = {"model": dataclasses.replace(QWEN3_30B, num_kv_heads=32), **fields}
    assert told in broken(**fields)["fp8_experts"]
    assert "fp8_experts" not in broken(**{**fields, "precision": "bf16"})


def test_compiled_blocks_are_not_in_fp8() -> None:
    assert "precision=bf16" in broken(precision="fp8_rowwise", compile="block")["compile_fp8"]
    assert "compile_fp8" not in broken(precision="fp16", compile="block")
    titan = {"engine": "torchtitan", "engine_version": ENGINES["torchtitan"]}
    assert "compile_fp8" not in broken(precision="fp8_tensorwise", compile="block", **titan)


def test_device_without_fp8() -> None:
    device = dataclasses.replace(H200.device, peak_flops={"bf16": 312e12})
    assert "it has bf16" in broken(dataclasses.replace(H200, device=device), precision="fp8_rowwise")["precision"]


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_latent_attention_and_experts_run_in_fp8(precision: str) -> None:
    assert broken(model=DEEPSEEK_V3, precision=precision) == {}
    assert broken(model=QWEN3_30B, precision=precision) == {}
