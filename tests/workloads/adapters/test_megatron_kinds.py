"""Megatron-Core's experts and layers that numbers do not describe, on its own layers: losses and norms equal ours."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.adapters.test_megatron import Told, run
from tests.workloads.adapters.test_torchtitan_mixtures import GPT_OSS, SCOUT, plain_llama4
from tests.workloads.test_worker import MODEL
from workloads.rules.engine_kinds import lacking_kinds
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.engine_versions import WITHOUT_TRANSFORMER_ENGINE
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention, Rope
from workloads.spec.layer_kinds.mlp import MLP, DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_spec import ModelSpec, MoESpec

trains = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
PLAIN = Attention(heads=4, kv_heads=2, head_dim=8, value_dim=8, rope=Rope(10_000.0))
GATED = dataclasses.replace(PLAIN, gate="element", norm="head", rope=Rope(10_000.0, rotated=0.5))
SILU, SQUARED = DenseMLP(width=40, activation="silu"), DenseMLP(width=40, activation="relu2", gated=False)
EXPERTS = RoutedMLP(
    experts=8,
    chosen=2,
    expert=DenseMLP(width=24, activation="silu"),
    shared=DenseMLP(width=20, activation="silu"),
    shared_experts=1,
    shared_gate=True,
    score="sigmoid",
    scale=2.5,
)


def layered(*parts: tuple[Attention, MLP], tied: bool = False) -> ModelSpec:
    """A small model of layers with these mixers and MLPs."""
    layers = tuple(Layer(mixer=mixer, mlp=mlp) for mixer, mlp in parts)
    return model_spec(
        LayeredModel(name="layered", hidden_size=32, vocab_size=96, tie_embeddings=tied, layers=layers, norm_eps=1e-6)
    )


def with_long_chunks() -> ModelSpec:
    """A small Llama 4 Scout whose chunks are as long as the sequence."""
    layers = []
    for layer in SCOUT.layers:
        assert isinstance(layer.mixer, Attention)
        span = Chunk(32) if isinstance(layer.mixer.span, Chunk) else layer.mixer.span
        layers.append(dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, span=span)))
    return model_spec(dataclasses.replace(SCOUT, layers=tuple(layers)))


def numbers(**fields: Any) -> ModelSpec:
    """Experts that numbers describe."""
    moe = MoESpec(num_experts=4, experts_per_token=2, expert_hidden_size=16, **fields)
    return dataclasses.replace(MODEL, num_layers=2, moe=moe)


GATES = layered((GATED, SILU), (dataclasses.replace(GATED, span=Window(5)), EXPERTS), (GATED, SILU), tied=True)
"""Output gates, norms, rotary positions of half of each head, one window, experts between dense layers, and a gated
shared expert of its own width."""
POSITIONS = layered((PLAIN, SQUARED), (dataclasses.replace(PLAIN, rope=None), SQUARED))
"""Squared ReLU, and a layer without positions."""
BIASES = layered(
    (dataclasses.replace(PLAIN, bias=True, rope=None), SILU), (dataclasses.replace(PLAIN, bias=True, rope=None), SILU)
)
"""Biases of queries, keys and values, and no positions."""
RELU_EXPERTS = layered(
    (PLAIN, dataclasses.replace(EXPERTS, expert=SQUARED, shared=SQUARED, shared_gate=False, score="softmax_of_chosen"))
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"model": GPT_OSS},
    "gpt-oss, zero 1": {"model": GPT_OSS, "dp": 2, "zero_stage": 1, "recompute": "full"},
    "gpt-oss, ep, zero 1": {"model": GPT_OSS, "dp": 2, "ep": 2, "zero_stage": 1, "routing": "learned"},
    "gpt-oss, tp and ep": {"model": GPT_OSS, "tp": 2, "ep": 2},
    "gpt-oss, pipeline": {"model": GPT_OSS, "pp": 2, "routing": "skewed", "routing_imbalance": 2},
    "gates": {"model": GATES, "routing": "learned"},
    "gates, tp and ep": {"model": GATES, "tp": 2, "ep": 2},
    "gates, divided experts": {"model": GATES, "tp": 2, "etp": 2},
    "gates, zero 1 and pipeline": {"model": GATES, "dp": 2, "pp": 2, "zero_stage": 1, "ep": 2},
    "positions": {"model": POSITIONS, "dp": 2},
    "positions, pipeline": {"model": POSITIONS, "pp": 2},
    "biases, tp": {"model": BIASES, "tp": 2},
    "biases, tp without sequence parallelism": {"model": BIASES, "tp": 2, "sequence_parallel": False},
    "ungated experts": {"model": RELU_EXPERTS, "dp": 2, "ep": 2},
    "weights on inputs": {"model": plain_llama4((0,), (0, 2)), "dp": 2, "zero_stage": 1, "routing": "learned"},
    "norms without weights, pipeline": {"model": with_long_chunks(), "pp": 2},
    "experts of numbers": {"model": numbers(num_shared_experts=1, num_dense_layers=1), "dp": 2, "ep": 2},
    "experts of numbers, divided": {"model": numbers(normalize_weights=False), "tp": 2, "etp": 2},
}


def of(engine: str = "megatron", **fields: Any) -> Experiment:
    asked = {"model": GPT_OSS, "seq_len": 32, "global_batch_size": 8, "precision": "fp32", "engine": engine}
    version = {"engine_version": WITHOUT_TRANSFORMER_ENGINE} if engine == "megatron" else {}
    return Experiment.canonical(**{**asked, **version, **fields})


@pytest.fixture(scope="module")
def ours() -> Callable[..., Told]:
    """Of one rank: those of our other layouts are the same (tests/workloads/engine/test_parity.py)."""
    return cache(lambda **fields: run(of("ultrasweep", **fields))[0])


@trains
@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 2, seconds=12))
def test_losses_and_norms_equal_ours(layout: str, ours: Callable[..., Told]) -> None:
    asked = LAYOUTS[layout]
    assert lacking_kinds(asked["model"]) == ()
    own = ours(**{name: asked[name] for name in ("model", "routing", "routing_imbalance") if name in asked})
    for told in run(of(**asked)):
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in own], rel=1e-6)
        assert [norm for _, norm in told] == pytest.approx([norm for _, norm in own], rel=1e-6)


@trains
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive(seconds=20)
@pytest.mark.parametrize("layout", ["gpt-oss", "gates, zero 1 and pipeline"])
def test_in_16_bits_losses_are_as_near_as_rounding_lets_them_be(layout: str, ours: Callable[..., Told]) -> None:
    asked = LAYOUTS[layout]
    own = ours(model=asked["model"])
    for told in run(of(precision="bf16", **asked)):
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in own], rel=3e-5)
