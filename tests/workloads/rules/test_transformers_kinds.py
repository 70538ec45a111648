"""Models of mixtures and latent attention on transformers: which family a model is, and what none of them has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from workloads.rules.engine_support import refused
from workloads.rules.transformers_kinds import families_lack, transformers_config
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec, with_modules

V3, LITE, DOTS, QWEN, MIXTRAL = (
    ConfFolders().model(name)
    for name in ("deepseek_v3", "deepseek_v2_lite", "dots_llm1_4_layers", "qwen3_30b_a3b", "mixtral_8x7b")
)


def changed(model: ModelSpec, moe: Any = (), **fields: Any) -> ModelSpec:
    """The model with other experts (``moe``: fields of them) and other fields."""
    if moe is None:
        return dataclasses.replace(model, moe=None, **fields)
    assert model.moe is not None
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, **dict(moe)), **fields)


def of(model: ModelSpec, **fields: Any) -> Experiment:
    asked = {"seq_len": 4096, "global_batch_size": 8, "dp": 2, "zero_stage": 3, "routing": "learned"}
    return Experiment.canonical(**{**asked, "engine": "transformers", "model": model, **fields})


@pytest.mark.parametrize(
    ("model", "family"),
    [
        (V3, "deepseek_v3"),
        (ConfFolders().model("kimi_k2"), "deepseek_v3"),
        (changed(V3, {"balance": "aux_loss", "normalize_weights": False}), "deepseek_v3"),
        (changed(V3, None, tie_embeddings=True), "deepseek_v3"),
        (LITE, "deepseek_v2"),
        (changed(LITE, {"weight_scale": 16.0, "num_dense_layers": 0}), "deepseek_v2"),
        (DOTS, "glm4_moe"),
        (changed(DOTS, {"balance": "none"}, qk_norm=False), "glm4_moe"),
        (QWEN, "qwen3_moe"),
        (MIXTRAL, "mixtral"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_family_has_them(model: ModelSpec, family: str) -> None:
    config = transformers_config(model)
    assert config is not None and config["model_type"] == family
    assert refused(of(model)) == []


def test_latents_and_ranks_are_written() -> None:
    config, lite = transformers_config(V3), transformers_config(LITE)
    assert config is not None and lite is not None
    assert (config["q_lora_rank"], lite["q_lora_rank"]) == (1536, None)
    assert (config["first_k_dense_replace"], config["n_shared_experts"]) == (3, 1)
    # Our engine chooses from all experts, so none of theirs is left out by its group.
    assert (config["n_group"], config["topk_group"]) == (1, 1)


@pytest.mark.parametrize(
    ("model", "lacking"),
    [
        (changed(V3, {"num_shared_experts": 0}), ["sigmoid scores and without shared ones (its DeepSeek-V3"]),
        (changed(DOTS, {"num_shared_experts": 0}), ["sigmoid scores and without shared ones (its GLM-4.5"]),
        (
            changed(LITE, {"num_shared_experts": 0, "balance": "bias", "normalize_weights": True}),
            ["without shared ones (its DeepSeek-V2", "divided by their sum", "softmax scores and biases"],
        ),
        (changed(QWEN, {"weight_scale": 2.0}), ["a factor of the weights (its Qwen3-MoE"]),
        (changed(QWEN, {"num_shared_experts": 1}), ["beside shared experts without a gate (its Qwen3-MoE"]),
        (changed(MIXTRAL, {"balance": "bias"}), ["biases that balance experts (its Mixtral"]),
        (
            changed(MIXTRAL, {"num_dense_layers": 1, "normalize_weights": False}),
            ["dense layers before experts without qk_norm", "not divided by their sum without qk_norm"],
        ),
        (with_modules(V3, 1), ["modules of multi-token prediction"]),
    ],
)
def test_what_no_family_has_is_named(model: ModelSpec, lacking: list[str]) -> None:
    assert transformers_config(model) is None
    found = families_lack(model)
    assert len(found) == len(lacking)
    for said, wanted in zip(found, lacking, strict=True):
        assert wanted in said
    (reason,) = refused(of(model))
    assert f"cannot run model={model.name}: no family of transformers here has {found[0]}" in reason
