"""Layers that numbers do not describe on Megatron-Core: what its GPT model runs, and what is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from tests.workloads.rules.test_torchtitan_kinds import changed
from workloads.rules.engine_support import refused
from workloads.rules.megatron_kinds import kinds_lacking
from workloads.spec.engine_versions import ENGINE_VERSIONS, WITHOUT_TRANSFORMER_ENGINE
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Rope
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_spec import ModelSpec, with_modules

GPT_OSS = ConfFolders().model("gpt_oss_20b_8_layers")
TINY = ConfFolders().model("tiny_moe")
EXPERTS = TINY.moe
assert EXPERTS is not None
WITH = ENGINE_VERSIONS["megatron"][0]
CLAMPED = DenseMLP(width=2880, activation="clamped_silu", bias=True, limit=7.0, slope=1.702, offset=1.0)


def of(model: ModelSpec = GPT_OSS, **fields: Any) -> Experiment:
    asked = {"seq_len": 4096, "global_batch_size": 8, "engine": "megatron", "engine_version": WITH}
    return Experiment.canonical(**{**asked, "model": model, **fields})


def with_last(**mixer: Any) -> ModelSpec:
    """gpt-oss whose second kind of layer alone has another mixer."""
    assert GPT_OSS.layers is not None
    first, last = GPT_OSS.layers.kinds
    assert last.mixer is not None
    other = dataclasses.replace(last, mixer=dataclasses.replace(last.mixer, **mixer))
    return dataclasses.replace(GPT_OSS, layers=dataclasses.replace(GPT_OSS.layers, kinds=(first, other)))


@pytest.mark.parametrize("version", ENGINE_VERSIONS["megatron"])
@pytest.mark.parametrize(
    "fields", [{}, {"dp": 2, "zero_stage": 1, "ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "recompute": "full"}]
)
def test_gpt_oss_runs(version: str, fields: dict[str, Any]) -> None:
    assert refused(of(engine_version=version, **fields)) == []


@pytest.mark.parametrize("name", ["smollm3_3b", "gpt_oss_120b", "llama4_scout_4_layers"])
def test_shipped_models_run(name: str) -> None:
    assert refused(of(ConfFolders().model(name))) == []


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("nemotron_3_nano_14_layers", "Mamba-2 (it needs the package mamba_ssm and another model class there)"),
        (
            "qwen3_5_35b_a3b_8_layers",
            "gated delta rule (it needs the package flash-linear-attention there, and its adapter has no weights for "
            "it)",
        ),
        ("gemma_4_26b_a4b_6_layers", "shared keys and values"),
        ("minimax_m2.5_2_layers", "a norm of queries and keys over all heads"),
    ],
)
def test_other_models_are_refused_by_what_it_lacks(name: str, reasons: str) -> None:
    for version in ENGINE_VERSIONS["megatron"]:
        (found,) = refused(of(ConfFolders().model(name), engine_version=version))
        assert found.startswith(f"megatron {version} cannot run model={name}: Megatron-Core's GPT model lacks ")
        assert reasons in found and found.endswith("; engine=ultrasweep runs it")


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (changed(GPT_OSS, span=Chunk(128)), "chunks of attention that are shorter than the sequence"),
        (with_last(span=Window(64)), "windows of several sizes"),
        (with_last(rope=Rope(1e4)), "rotary positions that differ by layer"),
        (with_last(heads=32), "heads that differ by layer"),
        (with_last(sinks=False), "sinks in some layers alone"),
        (with_last(gate="element"), "output gates in some layers alone"),
        (with_last(norm="head"), "norms of queries and keys with weights in some layers alone"),
        (changed(GPT_OSS, rope=Rope(1e4, rotated=0.5, proportional=True)), "proportional rotary positions"),
        (changed(GPT_OSS, gate="head"), "an output gate of attention (one number for each head)"),
        (changed(GPT_OSS, score_scale=0.5), "scores scaled by 0.5"),
        (
            changed(GPT_OSS, bias=False),
            "biases of some projections (all, or those of queries, keys and values alone)",
        ),
        (
            changed(GPT_OSS, mlp={"router_bias": False}),
            "biases of some projections (all, or those of queries, keys and values alone)",
        ),
        (changed(GPT_OSS, mlp={"shared": CLAMPED, "shared_experts": 1}), "biases of shared experts"),
        (
            changed(GPT_OSS, mlp={"shared": DenseMLP(width=2880, activation="silu"), "shared_experts": 1}),
            "several activations",
        ),
        (
            changed(GPT_OSS, mlp={"expert": dataclasses.replace(CLAMPED, slope=1.0)}),
            "clamped gates with another slope than 1.702",
        ),
        (changed(GPT_OSS, mlp={"weights_inputs": True}), "weights on the inputs of several experts a token"),
        (
            changed(GPT_OSS, mlp={"latent": 64}),
            "latent experts (at width 64) (its adapter has no weights for their projections)",
        ),
        (
            with_modules(GPT_OSS, 1),
            "modules of multi-token prediction (its adapter has no weights for them)",
        ),
    ],
)
def test_what_it_lacks_is_named(model: ModelSpec, named: str) -> None:
    assert named in kinds_lacking(model, 4096)


def test_chunks_as_long_as_the_sequence_are_full_attention() -> None:
    assert kinds_lacking(changed(GPT_OSS, span=Chunk(4096)), 4096) == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cp": 2, "cp_kind": "ring"}, "cp_kind=ring: Transformer Engine divides sequences with sinks by heads alone"),
        ({"cp": 2, "cp_kind": "allgather"}, "cp_kind=allgather: Transformer Engine divides sequences with sinks"),
        (
            {"model": changed(GPT_OSS, sinks=False), "cp": 2, "cp_kind": "ring"},
            "cp_kind=ring: Transformer Engine has no ring for windows; allgather or ulysses would work",
        ),
        ({"tp": 2, "etp": 2}, "etp=2: it does not divide experts with biases; use 1"),
        ({"tp": 2}, "etp=1: without expert parallelism it sums gradients of whole experts over dp alone"),
        ({"cp": 2, "engine_version": WITHOUT_TRANSFORMER_ENGINE}, "cp=2: its context parallelism needs Transformer"),
        (
            {"model": dataclasses.replace(TINY, moe=dataclasses.replace(EXPERTS, experts_per_token=1))},
            f"model={TINY.name}: it refuses one expert a token whose weight is divided by itself",
        ),
    ],
)
def test_layouts_are_refused_with_what_would_work(fields: dict[str, Any], why: str) -> None:
    (found,) = refused(of(**fields))
    assert why in found


def test_ulysses_divides_sequences_with_sinks() -> None:
    assert refused(of(cp=2, cp_kind="ulysses")) == []
