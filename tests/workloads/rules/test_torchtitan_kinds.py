"""Layers that numbers do not describe on torchtitan: which of its models a model is, and what its class lacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from workloads.rules.engine_support import refused
from workloads.rules.torchtitan_kinds import kinds_family, kinds_lacking
from workloads.spec.engine_versions import ENGINE_VERSIONS
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import FULL, Attention, Rope
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_spec import ModelSpec

OLD, NEW = ENGINE_VERSIONS["torchtitan"]
GPT_OSS, SCOUT = (ConfFolders().model(name) for name in ("gpt_oss_20b_8_layers", "llama4_scout_4_layers"))


def changed(model: ModelSpec, *, order: tuple[int, ...] | None = None, mlp: Any = (), **mixer: Any) -> ModelSpec:
    """The model with other mixers, other experts or another order of its kinds."""
    assert model.layers is not None
    kinds = []
    for kind in model.layers.kinds:
        assert isinstance(kind.mixer, Attention) and isinstance(kind.mlp, RoutedMLP)
        other = kind.mixer if not mixer else dataclasses.replace(kind.mixer, **mixer)
        kinds.append(dataclasses.replace(kind, mixer=other, mlp=dataclasses.replace(kind.mlp, **dict(mlp))))
    listed = dataclasses.replace(model.layers, kinds=tuple(kinds), order=order or model.layers.order)
    return dataclasses.replace(model, layers=listed)


PLAIN = changed(SCOUT, norm="none", span=FULL, rope=Rope(5e5))
"""Llama 4 as torchtitan has it."""


def of(model: ModelSpec, **fields: Any) -> Experiment:
    asked = {"seq_len": 4096, "global_batch_size": 8, "dp": 2, "zero_stage": 3, "engine": "torchtitan"}
    return Experiment.canonical(**{**asked, "engine_version": OLD, "model": model, **fields})


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("fields", [{}, {"ep": 2}, {"recompute": "full"}, {"dp": 1, "zero_stage": 0}])
def test_gpt_oss_runs_with_even_loads(version: str, fields: dict[str, Any]) -> None:
    assert refused(of(GPT_OSS, engine_version=version, **fields)) == []


def test_scout_is_refused_by_what_torchtitan_lacks() -> None:
    (reason,) = refused(of(SCOUT))
    assert reason == (
        f"torchtitan {OLD} cannot run model=llama4_scout_4_layers: its Llama 4 lacks a norm of queries and keys; "
        "layers without positions other than the first of every few"
    )
    (reason,) = refused(of(SCOUT, engine_version=NEW))
    assert reason.endswith("its Llama 4 lacks a class in this version; 0.2.2 has one")
    assert "chunks shorter than the sequence (8192)" in refused(of(SCOUT, seq_len=16_384))[0]
    assert refused(of(PLAIN)) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"order": (1, 0) * 4}, "windows in other layers than the first, third, fifth ..."),
        ({"span": Chunk(128)}, "chunks"),
        ({"sinks": False}, "attention without sinks or without biases"),
        ({"rope": None}, "attention without positions"),
        ({"norm": "head"}, "a norm of queries and keys"),
        ({"value_scale": 0.5}, "scaled or normed values"),
        ({"score_scale": 0.5}, "another scale of scores"),
        ({"rope": Rope(1e4, rotated=0.5)}, "rotary positions of a part of each head"),
        ({"mlp": {"router_bias": False}}, "experts or a router without biases"),
        ({"mlp": {"score": "sigmoid"}}, "router scores by sigmoid"),
        ({"mlp": {"shared": DenseMLP(width=64, activation="silu"), "shared_experts": 1}}, "shared experts"),
        ({"mlp": {"latent": 64}}, "latent experts"),
        ({"mlp": {"groups": 4}}, "experts that are chosen from groups"),
    ],
)
def test_what_its_gpt_oss_lacks_is_named(fields: dict[str, Any], named: str) -> None:
    model = changed(GPT_OSS, **fields)
    assert kinds_family(model) == "gpt_oss"
    assert any(lacking.startswith(named) for lacking in kinds_lacking(model, 4096, OLD))


def test_the_newer_version_has_windows_in_any_layer() -> None:
    other = changed(GPT_OSS, order=(0, 0, 0, 1) * 2)
    assert kinds_lacking(other, 4096, NEW) == []
    windows = changed(other, span=Window(64))
    assert kinds_lacking(windows, 4096, NEW) == []


def test_a_constant_of_its_own_is_another_activation() -> None:
    assert GPT_OSS.layers is not None
    (routed, *_) = [kind.mlp for kind in GPT_OSS.layers.kinds]
    assert isinstance(routed, RoutedMLP)
    steep = changed(GPT_OSS, mlp={"expert": dataclasses.replace(routed.expert, slope=1.0)})
    (named,) = kinds_lacking(steep, 4096, NEW)
    assert named == "another activation than a clamped SwiGLU with slope 1.702 and offset 1"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"span": Window(64)}, "windows"),
        ({"bias": True}, "biases or sinks of attention"),
        ({"mlp": {"router_bias": True}}, "a bias of the router"),
        ({"mlp": {"shared_experts": 2}}, "shared experts of another width"),
    ],
)
def test_what_its_llama_4_lacks_is_named(fields: dict[str, Any], named: str) -> None:
    assert named in kinds_lacking(changed(PLAIN, **fields), 4096, OLD)


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"routing": "learned"}, "routing=learned: it balances experts by no loss, and by biases that it centres"),
        ({"routing": "skewed", "routing_imbalance": 2.0}, "routing=skewed: the only load that it can force"),
        ({"routing": "learned", "capacity_factor": 1.0}, "capacity_factor=1.0: its experts drop no tokens"),
        ({"precision": "fp32"}, "precision=fp32: on CUDA its experts multiply in bf16"),
        ({"tp": 2}, "tp=2: its adapter runs models with experts by dp and ep alone"),
        ({"cp": 2}, "cp=2: its adapter runs models with experts by dp and ep alone"),
        ({"pp": 2}, "pp=2: its adapter runs models with experts by dp and ep alone"),
        ({"ep": 2, "zero_stage": 0}, "ep=2: it sends tokens between ranks of dp that FSDP shards over"),
        ({"micro_batch_size": 2, "seq_len": 4092}, "micro_batch_size=2: it deals experts out over the whole"),
    ],
)
def test_layouts_of_experts_that_it_does_not_run_are_refused(version: str, fields: dict[str, Any], why: str) -> None:
    assert any(f"cannot run {why}" in reason for reason in refused(of(GPT_OSS, engine_version=version, **fields)))


def test_mixtures_of_the_older_version_alone_are_compiled() -> None:
    assert refused(of(PLAIN, compile="block")) == refused(of(GPT_OSS, compile="block")) == []
    newer = refused(of(GPT_OSS, compile="block", engine_version=NEW))
    assert any("compile=block: its adapter is not tested with compiled experts" in reason for reason in newer)


def test_learned_choices_of_experts_that_nothing_balances_run() -> None:
    assert refused(of(changed(GPT_OSS, mlp={"balance_loss": 0.0}), routing="learned")) != []  # its sizes say the loss
    assert GPT_OSS.moe is not None
    free = dataclasses.replace(GPT_OSS, moe=dataclasses.replace(GPT_OSS.moe, balance="none", balance_coefficient=0.0))
    assert refused(of(changed(free, mlp={"balance_loss": 0.0}), routing="learned")) == []
