"""torchtitan's gpt-oss and Llama 4 as the engine of a point: losses and norms equal ours, from the same weights and
tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.adapters.conftest import TORCHTITAN_02
from tests.workloads.adapters.test_torchtitan import MISSING
from tests.workloads.adapters.three_steps import Told, run
from tests.workloads.engine.test_published_modules import COMMON, CONFIGS
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.engine_versions import ENGINE_VERSIONS
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import FULL, Attention
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.model import LayeredModel
from workloads.spec.model_spec import ModelSpec

OLD, NEW = ENGINE_VERSIONS["torchtitan"]
trains = pytest.mark.skipif(
    bool(MISSING) or not TORCHTITAN_02.is_dir() or importlib.util.find_spec("spmd_types") is None,
    reason="torchtitan is not installed in both versions: tests/workloads/adapters/packages installs them",
)


def read(kind: str, **fields: Any) -> LayeredModel:
    """A small model, whose experts are not balanced."""
    found = layers_from_config(kind, {**COMMON, **CONFIGS[kind], "model_type": kind, **fields})
    return dataclasses.replace(found, layers=tuple(_without_balance(layer) for layer in found.layers))


def _without_balance(layer: Any) -> Any:
    if not isinstance(layer.mlp, RoutedMLP):
        return layer
    return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, balance_loss=0.0))


GPT_OSS = model_spec(read("gpt_oss"))
SCOUT = read("llama4_text", num_hidden_layers=4, interleave_moe_layer_step=1)
"""Of the kinds of Llama 4 Scout."""


def plain_llama4(positionless: tuple[int, ...] = (0,), dense: tuple[int, ...] = ()) -> ModelSpec:
    """A small Llama 4 as torchtitan has it: without norms of queries and keys, full attention, other layers without
    positions than those of Scout."""
    layers = []
    for at, layer in enumerate(SCOUT.layers):
        assert isinstance(layer.mixer, Attention) and isinstance(layer.mlp, RoutedMLP)
        rope = None if at in positionless else next(one.mixer.rope for one in SCOUT.layers)  # type: ignore[union-attr]
        mixer = dataclasses.replace(layer.mixer, norm="none", span=FULL, rope=rope)
        mlp = layer.mlp.expert if at in dense else layer.mlp
        layers.append(dataclasses.replace(layer, mixer=mixer, mlp=mlp))
    return model_spec(dataclasses.replace(SCOUT, layers=tuple(layers)))


LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"model": GPT_OSS},
    "gpt-oss, zero 3, full recomputation": {"model": GPT_OSS, "dp": 2, "zero_stage": 3, "recompute": "full"},
    "gpt-oss, ep": {"model": GPT_OSS, "dp": 2, "zero_stage": 3, "ep": 2},
    "gpt-oss, ep, replicas of experts": {"model": GPT_OSS, "dp": 4, "zero_stage": 2, "ep": 2},
    "gpt-oss, ddp, learned": {"model": GPT_OSS, "dp": 2, "routing": "learned"},
    "llama 4": {"model": plain_llama4()},
    "llama 4, dense layers between, ep": {
        "model": plain_llama4((), (0, 2)),
        "dp": 2,
        "zero_stage": 3,
        "ep": 2,
        "routing": "learned",
    },
}


def of(engine: str = "torchtitan", **fields: Any) -> Experiment:
    asked = {"model": GPT_OSS, "seq_len": 32, "global_batch_size": 8, "precision": "fp32", "engine": engine}
    version = {"engine_version": OLD} if engine == "torchtitan" else {}
    return Experiment.canonical(**{**asked, **version, **fields})


@pytest.fixture(scope="module")
def ours() -> Callable[..., Told]:
    """Of one rank: those of our other layouts are the same (tests/workloads/engine/test_parity.py)."""
    return cache(lambda **fields: run(of("ultrasweep", **fields))[0])


def check(layout: str, version: str, ours: Callable[..., Told]) -> None:
    asked = LAYOUTS[layout]
    own = ours(**{field: asked[field] for field in ("model", "routing") if field in asked})
    for told in run(of(engine_version=version, **asked)):
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in own], rel=1e-6)
        assert [norm for _, norm in told] == pytest.approx([norm for _, norm in own], rel=1e-6)


@trains
@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("torchtitan_02")
@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 1, seconds=20))
def test_losses_and_norms_equal_ours(layout: str, ours: Callable[..., Told]) -> None:
    check(layout, OLD, ours)


@trains
@pytest.mark.slow(seconds=90)
@pytest.mark.timeout(600)
@pytest.mark.exhaustive(seconds=90)
@pytest.mark.usefixtures("torchtitan_02")
@pytest.mark.parametrize("layout", ["llama 4", "gpt-oss"])
def test_compiled_losses_and_norms_equal_ours(layout: str, ours: Callable[..., Told]) -> None:
    asked = LAYOUTS[layout]
    (theirs,) = run(of(engine_version=OLD, compile="block", **asked))
    for found, own in zip(theirs, ours(**asked), strict=True):
        assert found == pytest.approx(own, rel=1e-6)


@trains
@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", sampled([name for name in LAYOUTS if "gpt-oss" in name], 1, seconds=20))
def test_losses_and_norms_of_the_newer_version_equal_ours(layout: str, ours: Callable[..., Told]) -> None:
    check(layout, NEW, ours)
