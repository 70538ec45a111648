"""torchtitan 0.3's Qwen3 with experts and its DeepSeek-V3 as the engine of a point: losses and norms equal ours, from
the same weights and tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.sampling import sampled
from tests.workloads.adapters.test_torchtitan import FOUR, MISSING, QK_NORM
from tests.workloads.adapters.test_torchtitan03 import GATHERED, INTERLEAVED
from tests.workloads.adapters.three_steps import Told, run
from workloads.measuring.processes import on_ranks
from workloads.spec import kind_weights, weights
from workloads.spec.engine_versions import ENGINE_VERSIONS
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec
from workloads.spec.weights import Weight

pytestmark = [
    pytest.mark.slow(seconds=12),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(MISSING) or importlib.util.find_spec("spmd_types") is None,
        reason="torchtitan 0.3 is not installed: tests/workloads/adapters/packages installs it",
    ),
]
EXPERTS = MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=32)
SIGMOID = dataclasses.replace(EXPERTS, gate="sigmoid", num_shared_experts=1, num_dense_layers=1, weight_scale=2.5)
LATENTS = MLASpec(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=20)
LATENT = dataclasses.replace(FOUR, mla=LATENTS, num_kv_heads=FOUR.num_heads, norm_eps=1e-6)
QWEN_MOE = dataclasses.replace(QK_NORM, head_dim=16, moe=EXPERTS)
V3 = dataclasses.replace(LATENT, moe=SIGMOID)
V2_LITE = dataclasses.replace(
    LATENT,
    mla=dataclasses.replace(LATENTS, q_lora_rank=0),
    moe=dataclasses.replace(SIGMOID, gate="softmax", normalize_weights=False, num_shared_experts=2),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3 with experts": {"model": QWEN_MOE},
    "qwen3 with experts, learned, zero 3, full recomputation": {
        "model": dataclasses.replace(QWEN_MOE, tie_embeddings=True),
        "routing": "learned",
        "dp": 2,
        "zero_stage": 3,
        "recompute": "full",
    },
    "heads without norms, sigmoid scores, a dense layer, ep": {
        "model": dataclasses.replace(FOUR, moe=SIGMOID),
        "dp": 2,
        "zero_stage": 3,
        "ep": 2,
    },
    "deepseek v3": {"model": V3},
    "deepseek v3, learned, ep, full recomputation": {
        "model": V3,
        "routing": "learned",
        "dp": 2,
        "zero_stage": 2,
        "ep": 2,
        "recompute": "full",
    },
    "deepseek v2 lite, replicas of shards": {
        "model": V2_LITE,
        "dp_replicate": 2,
        "dp_shard": 2,
        "zero_stage": 3,
        "routing": "learned",
    },
    "deepseek v3, cp": {"model": V3, "cp": 2, "zero_stage": 3, **GATHERED},
    "qwen3 with experts, learned, interleaved, ep": {
        "model": QWEN_MOE,
        "routing": "learned",
        "dp": 2,
        "ep": 2,
        "zero_stage": 3,
        **INTERLEAVED,
    },
    "deepseek v3, zero 1, zero bubble v": {
        "model": V3,
        "dp": 2,
        "pp": 2,
        "zero_stage": 1,
        "pp_schedule": "zero_bubble_v",
        "routing": "learned",
    },
    "latent attention, dense, tp": {"model": LATENT, "tp": 2},
    "latent attention, dense, cp": {"model": LATENT, "cp": 2, "zero_stage": 3, **GATHERED},
    "latent attention, dense, pp": {"model": LATENT, "pp": 2, "recompute": "full"},
    "latent attention, dense, tied": {
        "model": dataclasses.replace(LATENT, tie_embeddings=True),
        "dp": 2,
        "zero_stage": 2,
    },
}


def of(engine: str = "torchtitan", **fields: Any) -> Experiment:
    asked = {"seq_len": 32, "global_batch_size": 8, "precision": "fp32", "engine": engine}
    version = {"engine_version": ENGINE_VERSIONS["torchtitan"][-1]} if engine == "torchtitan" else {}
    return Experiment.canonical(**{**asked, **version, **fields})


@pytest.fixture(scope="module")
def ours() -> Callable[..., Told]:
    """Of one rank: those of our other layouts are the same (tests/workloads/engine/test_parity.py)."""
    return cache(lambda **fields: run(of("ultrasweep", **fields))[0])


@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 2, seconds=20))
def test_losses_and_norms_equal_ours(layout: str, ours: Callable[..., Told]) -> None:
    asked = LAYOUTS[layout]
    own = ours(**{field: asked[field] for field in ("model", "routing", "seq_len") if field in asked})
    for told in run(of(**asked)):
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in own], rel=1e-6)
        assert [norm for _, norm in told] == pytest.approx([norm for _, norm in own], rel=1e-6)


@pytest.mark.exhaustive(seconds=40)
def test_compiled_latent_attention_equals_ours(ours: Callable[..., Told]) -> None:
    (theirs,) = run(of(model=LATENT, compile="block"))
    for found, own in zip(theirs, ours(model=LATENT), strict=True):
        assert found == pytest.approx(own, rel=1e-6)


def check_weights(rank: int) -> None:
    """Every weight of ours is in exactly one of its parameters."""
    from workloads.adapters.mixtures.torchtitan_weights import value_of
    from workloads.adapters.torchtitan03 import Torchtitan03

    for model in (QWEN_MOE, dataclasses.replace(FOUR, moe=SIGMOID), V3, V2_LITE, LATENT):
        engine = Torchtitan03(of(model=model), rank, torch.device("cpu"))
        engine.build()
        assert engine._trainer is not None
        asked: list[str] = []

        def zeros(weight: Weight, asked: list[str] = asked) -> torch.Tensor:
            asked.append(weight.name)
            return torch.zeros(weight.shape)

        [part] = engine._trainer.model_parts
        for name, parameter in part.named_parameters():
            assert value_of(model, name, zeros).shape == parameter.shape
        assert sorted(asked) == sorted(names_of(model))


def names_of(model: ModelSpec) -> list[str]:
    ends = [weights.embedding(model), weights.final_norm(model), weights.head(model)]
    layers = [weight for layer in range(model.num_layers) for weight in kind_weights.block(model, layer)]
    return [weight.name for weight in (*ends, *layers)]


def test_every_weight_is_in_one_parameter() -> None:
    """In a process of its own: the package asks for its device when it is imported."""
    on_ranks(check_weights, 1, "cpu", timeout_s=240)
