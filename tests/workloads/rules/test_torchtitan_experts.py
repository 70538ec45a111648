"""Mixtures and latent attention that numbers describe on torchtitan: what each version runs, and why not the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from workloads.rules.engine_support import refused
from workloads.rules.torchtitan_support import torchtitan_model
from workloads.spec.engine_versions import ENGINE_VERSIONS
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

OLD, NEW = ENGINE_VERSIONS["torchtitan"]
V3, KIMI, LITE, DOTS, QWEN, MIXTRAL = (
    ConfFolders().model(name)
    for name in ("deepseek_v3", "kimi_k2", "deepseek_v2_lite", "dots_llm1_4_layers", "qwen3_30b_a3b", "mixtral_8x7b")
)
DENSE = dataclasses.replace(V3, moe=None)
CP = {"cp": 2, "cp_kind": "allgather"}


def of(model: ModelSpec, **fields: Any) -> Experiment:
    asked = {"seq_len": 4096, "global_batch_size": 8, "dp": 2, "zero_stage": 3, "engine": "torchtitan"}
    return Experiment.canonical(**{**asked, "engine_version": NEW, "model": model, **fields})


def unbalanced(model: ModelSpec) -> ModelSpec:
    assert model.moe is not None
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, balance="none", balance_coefficient=0.0))


@pytest.mark.parametrize("model", [V3, LITE, DOTS, QWEN, MIXTRAL, DENSE], ids=lambda model: model.name)
@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}, CP, {"dp": 1, "zero_stage": 0}])
def test_the_newer_version_runs_them(model: ModelSpec, fields: dict[str, Any]) -> None:
    assert refused(of(model, **fields)) == []
    assert torchtitan_model(model) == ("qwen3" if model.mla is None else "deepseek_v3")


def test_experts_are_sent_between_ranks_and_stages() -> None:
    assert refused(of(QWEN, ep=2)) == refused(of(V3, ep=2, pp=2, zero_stage=3)) == []
    assert refused(of(unbalanced(V3), routing="learned", ep=2)) == refused(of(DENSE, tp=2)) == []


@pytest.mark.parametrize(
    ("model", "fields", "why"),
    [
        (QWEN, {"tp": 2}, "tp=2: without ep the input of its experts gets no gradient"),
        (V3, {"tp": 2, "ep": 2}, "tp=2: without ep the input of its experts gets no gradient, and with ep"),
        (V3, {"ep": 2, **CP}, "ep=2: with cp it sends tokens between cp ranks"),
        (KIMI, {**CP, "seq_len": 256}, "seq_len=256: with cp it deals experts out"),
        (V3, {"routing": "learned"}, "routing=learned: it balances experts by no loss"),
        (V3, {"precision": "fp8_rowwise"}, "precision=fp8_rowwise: its adapter is not tested with experts in fp8"),
        (DENSE, {"precision": "fp8_rowwise"}, "precision=fp8_rowwise: its adapter is not tested with latent attention"),
        (QWEN, {"precision": "fp32"}, "precision=fp32: on CUDA its experts multiply in bf16"),
        (QWEN, {"compile": "block"}, "compile=block: its adapter is not tested with compiled experts"),
    ],
)
def test_what_it_does_not_run_is_named(model: ModelSpec, fields: dict[str, Any], why: str) -> None:
    assert any(f"cannot run {why}" in reason for reason in refused(of(model, **fields)))


def test_the_older_version_names_the_newer_one() -> None:
    (qwen,) = refused(of(QWEN, engine_version=OLD))
    assert qwen.endswith("builds gpt-oss and Llama 4 alone; that of 0.3.0 builds Qwen3, too")
    (latent,) = refused(of(DENSE, engine_version=OLD))
    assert latent.endswith("its adapter has no latent attention; that of 0.3.0 builds DeepSeek-V3")
