"""transformers under accelerate as the engine of a point: losses and norms equal ours, from the same weights and
tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.sampling import sampled
from tests.workloads.engine.test_published_modules import COMMON, CONFIGS
from tests.workloads.test_worker import MODEL
from workloads.adapters.seam import engine_of
from workloads.contract.measure_spec import MeasureSpec
from workloads.measuring.processes import on_ranks
from workloads.rules.engine_support import refused
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MLASpec, MoESpec

MISSING = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: tests/workloads/adapters/packages installs them"
)
EXPERTS = MoESpec(num_experts=4, experts_per_token=2, expert_hidden_size=32)
SIGMOID = dataclasses.replace(EXPERTS, gate="sigmoid", num_shared_experts=1, num_dense_layers=1, weight_scale=2.5)
LATENT = MLASpec(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=20)
BIASED = {"balance": "bias", "balance_coefficient": 0.01}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ddp, full recomputation": {"dp": 2, "recompute": "full"},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "zero 2": {"dp": 2, "zero_stage": 2},
    "zero 3, full recomputation": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    "tied, zero 2": {"tie_embeddings": True, "dp": 2, "zero_stage": 2},
    "tied, uneven vocabulary, zero 3": {"tie_embeddings": True, "vocab_size": 127, "dp": 2, "zero_stage": 3},
    "qk_norm, head size of its own": {"qk_norm": True, "head_dim": 16, "dp": 2, "zero_stage": 2},
    "mixtral": {"moe": EXPERTS, "dp": 2, "zero_stage": 3},
    "qwen3 mixture, a dense layer": {
        "qk_norm": True,
        "moe": dataclasses.replace(EXPERTS, num_dense_layers=1, normalize_weights=False),
    },
    "glm mixture": {"qk_norm": True, "moe": dataclasses.replace(SIGMOID, **BIASED), "dp": 2, "zero_stage": 2},
    "latent attention, dense, tied": {"mla": LATENT, "num_kv_heads": 4, "tie_embeddings": True},
    "deepseek v3, zero 3, full recomputation": {
        "mla": LATENT,
        "num_kv_heads": 4,
        "moe": dataclasses.replace(SIGMOID, **BIASED),
        "dp": 2,
        "zero_stage": 3,
        "recompute": "full",
    },
    "deepseek v3, a loss, weights that are not divided": {
        "mla": LATENT,
        "num_kv_heads": 4,
        "moe": dataclasses.replace(
            SIGMOID, normalize_weights=False, balance="aux_loss", balance_coefficient=0.5, num_shared_experts=2
        ),
    },
    "deepseek v2 lite": {
        "mla": dataclasses.replace(LATENT, q_lora_rank=0),
        "num_kv_heads": 4,
        "moe": dataclasses.replace(
            SIGMOID, gate="softmax", normalize_weights=False, balance="aux_loss", balance_coefficient=0.5
        ),
        "dp": 2,
        "zero_stage": 1,
    },
    "compiled": {"compile": "block"},
    "compiled, deepseek v3": {"mla": LATENT, "num_kv_heads": 4, "moe": SIGMOID, "compile": "block"},
    "compiled, ddp": {"compile": "block", "dp": 2},
    "compiled, zero 2, full recomputation": {"compile": "block", "dp": 2, "zero_stage": 2, "recompute": "full"},
    "compiled, zero 3": {"compile": "block", "dp": 2, "zero_stage": 3},
}
KINDS = list(CONFIGS)
"""Families that lists of layers describe."""
BALANCED = {kind: {"router_aux_loss_coef": 0.7} for kind in ("gpt_oss", "qwen3_5_moe_text", "llama4_text")}
"""A loss of these families that balances experts, large enough to be seen in the norms of gradients."""
SHAPE = ("tie_embeddings", "qk_norm", "moe", "mla", "num_kv_heads", "head_dim", "vocab_size")
Told = list[tuple[float, float | None]]


def of(engine: str = "transformers", **fields: Any) -> Experiment:
    model = dataclasses.replace(MODEL, **{name: fields.pop(name) for name in SHAPE if name in fields})
    asked = {"model": model, "seq_len": 32, "global_batch_size": 8, "precision": "fp32", "routing": "learned"}
    return Experiment.canonical(**{**asked, "engine": engine, **fields})


def of_kind(kind: str, engine: str = "transformers", **fields: Any) -> Experiment:
    """A small model of a family, whose experts a loss or biases balance where the family has them."""
    read = layers_from_config(kind, {**COMMON, **CONFIGS[kind], **BALANCED.get(kind, {}), "model_type": kind})
    asked = {"model": model_spec(read), "seq_len": 32, "global_batch_size": 8, "precision": "fp32"}
    return Experiment.canonical(**{**asked, "routing": "learned", "engine": engine, **fields})


def steps(experiment: Experiment, rank: int) -> Told:
    """Losses and norms of three steps on one rank of a CPU."""
    engine = engine_of(experiment, rank, torch.device("cpu"))
    engine.build()
    measured, traffic = engine.measure(MeasureSpec(warmup_steps=1, timed_steps=2), lambda step, is_warmup: None, None)
    if experiment.engine == "transformers":
        assert traffic is None
        phases = [(step.forward_backward_s or 0.0) + (step.optimizer_s or 0.0) for step in measured.steps]
        assert phases == pytest.approx([step.step_time_s for step in measured.steps])
    return [(step.loss, step.grad_norm) for step in measured.steps]


def run(experiment: Experiment) -> list[Told]:
    """Of every rank."""
    assert refused(experiment, "cpu") == []
    return on_ranks(partial(steps, experiment), experiment.world_size, "cpu", timeout_s=240)


@pytest.fixture(scope="module")
def ours() -> Callable[..., Told]:
    """What one process of ours does with the model of a layout."""
    known: dict[str, Told] = {}

    def told(layout: dict[str, Any]) -> Told:
        alone = of("ultrasweep", **{name: layout[name] for name in SHAPE if name in layout})
        if alone.id not in known:
            known[alone.id] = run(alone)[0]
        return known[alone.id]

    return told


@pytest.mark.slow(seconds=9)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 1, seconds=9))
def test_losses_and_norms_equal_ours(ours: Callable[..., Told], layout: str) -> None:
    expected = ours(LAYOUTS[layout])
    for theirs in run(of(**LAYOUTS[layout])):
        assert [loss for loss, _ in theirs] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
        assert [norm for _, norm in theirs] == pytest.approx([norm for _, norm in expected], rel=1e-6)


@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sampled(KINDS, 2, seconds=12))
def test_losses_and_norms_of_kinds_of_layers_equal_ours(kind: str) -> None:
    # Weight decay draws their norms towards 1 and ours towards 0, where theirs are 1 + weight.
    near = 2e-5 if kind.startswith(("gemma2", "gemma3", "qwen3_5")) else 2e-6
    (expected,) = run(of_kind(kind, "ultrasweep"))
    for layout in ({}, {"dp": 2, "zero_stage": 3, "recompute": "full"}):
        for theirs in run(of_kind(kind, **layout)):
            for found, ours in zip(theirs, expected, strict=True):
                assert found == pytest.approx(ours, rel=near)


@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(300)
def test_positions_are_not_scaled() -> None:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
    fields = {**COMMON, **CONFIGS["gpt_oss"], "model_type": "gpt_oss", "rope_parameters": rope}
    model = model_spec(layers_from_config("gpt_oss", fields))
    (expected,) = run(of_kind("gpt_oss", "ultrasweep").replace(model=model))
    (theirs,) = run(of_kind("gpt_oss").replace(model=model))
    for found, ours in zip(theirs, expected, strict=True):
        assert found == pytest.approx(ours, rel=2e-6)


@pytest.mark.slow(seconds=40)
@pytest.mark.timeout(300)
@pytest.mark.exhaustive(seconds=40)
@pytest.mark.parametrize("kind", ["gpt_oss", "minimax_m2"])
def test_experts_are_balanced_in_compiled_layers_too(kind: str) -> None:
    (expected,) = run(of_kind(kind, "ultrasweep", global_batch_size=2))
    (theirs,) = run(of_kind(kind, compile="block", global_batch_size=2))
    for found, ours in zip(theirs, expected, strict=True):
        assert found == pytest.approx(ours, rel=2e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive(seconds=14)
def test_in_16_bits_losses_are_as_near_as_rounding_lets_them_be(ours: Callable[..., Told]) -> None:
    for layout in ({"dp": 2}, {"dp": 2, "zero_stage": 2}, {"tie_embeddings": True, "qk_norm": True}):
        for theirs in run(of(precision="bf16", **layout)):
            assert [loss for loss, _ in theirs] == pytest.approx([loss for loss, _ in ours(layout)], rel=1e-4)


def check_every_value_arrives(rank: int) -> None:
    """Every weight of ours is in exactly one parameter, or in one of the two halves of experts that are fused."""
    from workloads.adapters.published_weights import value_of
    from workloads.adapters.transformers_models import model_of
    from workloads.costs.shape.params import num_params

    shapes = [of(**{name: layout[name] for name in SHAPE if name in layout}) for layout in LAYOUTS.values()]
    for e in [*shapes, *map(of_kind, KINDS)]:
        asked: list[str] = []
        model: Any = model_of(e, torch.device("cpu"))
        for name, parameter in model.named_parameters():

            def zeros(weight: Any, asked: list[str] = asked) -> torch.Tensor:
                asked.append(weight.name)
                return torch.zeros(weight.shape)

            assert value_of(model.config.model_type, e.model, name, zeros).shape == parameter.shape
            assert parameter.dtype == torch.float32 and parameter.std() < 1
        assert len(asked) == len(set(asked))
        assert sum(p.numel() for p in model.parameters()) == num_params(e.model)


def check_settings(rank: int) -> None:
    """What accelerate is told, and what it has made of it."""
    from torch.distributed.fsdp import FSDPModule

    e = of(dp=2, zero_stage=3, recompute="full", precision="bf16")
    engine: Any = engine_of(e, rank, torch.device("cpu"))
    engine.build()
    plugin = engine._accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    assert engine._accelerator.is_fsdp2 and plugin.reshard_after_forward
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    sharded = [name for name, module in engine._model.named_modules() if isinstance(module, FSDPModule)]
    assert {"", "model.layers.0", "model.layers.1", "model.embed_tokens", "lm_head"} <= set(sharded)
    assert "_checkpoint_wrapped_module" in str(list(engine._model.named_modules()))
    plain = of(dp=2, zero_stage=1)
    from workloads.adapters.transformers_accelerate import fsdp_plugin

    assert not fsdp_plugin(plain).reshard_after_forward and fsdp_plugin(plain).mixed_precision_policy is None
    assert engine._accelerator.gradient_state.plugin_kwargs["sync_each_batch"]


@pytest.mark.slow(seconds=6)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("check", "ranks"), [(check_every_value_arrives, 1), (check_settings, 2)])
def test_values_and_settings(check: Callable[[int], None], ranks: int) -> None:
    """In processes of their own: accelerate keeps its state for as long as a process lives."""
    on_ranks(check, ranks, "cpu", timeout_s=240)
