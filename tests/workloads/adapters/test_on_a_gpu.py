"""Other engines on one GPU: losses and norms of layers that differ by kind, and of latent attention, equal ours.

On CPUs the same is shown for more layouts (test_transformers.py, test_megatron_kinds.py), without the kernels that
these engines choose on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from typing import Any

import pytest

from tests.workloads.adapters.test_megatron_kinds import (
    BIASES,
    GATES,
    POSITIONS,
    RELU_EXPERTS,
    numbers,
    with_long_chunks,
)
from tests.workloads.adapters.test_torchtitan_mixtures import GPT_OSS, plain_llama4
from tests.workloads.adapters.test_transformers import BIASED, LATENT, SIGMOID
from tests.workloads.adapters.three_steps import steps_on_gpu
from tests.workloads.test_worker import MODEL
from workloads.measuring.processes import on_ranks
from workloads.rules.engine_support import refused
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import LayeredModel
from workloads.spec.model_spec import ModelSpec, layers_of

TIMES = 8
"""How much wider layers are than on CPUs: heads of 64 columns, which fused attention has."""


def wide(model: ModelSpec) -> ModelSpec:
    """The same layers, eight times as wide."""
    listed = layers_of(model)
    layers = []
    for at in listed.order:
        mixer, mlp = listed.kinds[at].mixer, listed.kinds[at].mlp
        assert isinstance(mixer, Attention)
        mixer = dataclasses.replace(mixer, head_dim=TIMES * mixer.head_dim, value_dim=TIMES * mixer.value_dim)
        layers.append(dataclasses.replace(listed.kinds[at], mixer=mixer, mlp=_wider(mlp)))
    return model_spec(
        LayeredModel(
            name=model.name,
            hidden_size=TIMES * model.hidden_size,
            vocab_size=TIMES * model.vocab_size,
            tie_embeddings=model.tie_embeddings,
            layers=tuple(layers),
            norm_eps=model.norm_eps,
        )
    )


def _wider(mlp: Any) -> Any:
    if isinstance(mlp, DenseMLP):
        return dataclasses.replace(mlp, width=TIMES * mlp.width)
    assert isinstance(mlp, RoutedMLP)
    shared = None if mlp.shared is None else _wider(mlp.shared)
    return dataclasses.replace(mlp, expert=_wider(mlp.expert), shared=shared)


def on_megatron(model: ModelSpec, **fields: Any) -> dict[str, Any]:
    return {"engine": "megatron", "model": wide(model), "precision": "bf16", **fields}


def on_transformers(precision: str, **shape: Any) -> dict[str, Any]:
    mla = shape.get("mla")
    if mla is not None:
        shape["mla"] = dataclasses.replace(mla, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
    model = dataclasses.replace(
        MODEL, num_layers=3, hidden_size=256, num_kv_heads=4, head_dim=64, ffn_hidden_size=256, **shape
    )
    return {"engine": "transformers", "model": model, "precision": precision, "routing": "learned", "seq_len": 128}


LITE = dataclasses.replace(LATENT, q_lora_rank=0)
SOFTMAX = dataclasses.replace(SIGMOID, gate="softmax", normalize_weights=False)
LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron, gpt-oss": on_megatron(GPT_OSS),
    "megatron, gpt-oss, full recomputation": on_megatron(GPT_OSS, recompute="full"),
    "megatron, gates": on_megatron(GATES),
    "megatron, positions": on_megatron(POSITIONS),
    "megatron, biases": on_megatron(BIASES),
    "megatron, ungated experts": on_megatron(RELU_EXPERTS),
    "megatron, weights on inputs": on_megatron(plain_llama4((0,), (0, 2))),
    "megatron, norms without weights": on_megatron(with_long_chunks(), seq_len=32),
    "megatron, experts of numbers": on_megatron(numbers(num_shared_experts=1, num_dense_layers=1)),
    "transformers, deepseek v3": on_transformers("fp32", mla=LATENT, moe=dataclasses.replace(SIGMOID, **BIASED)),
    "transformers, deepseek v3 in 16 bits": on_transformers("bf16", mla=LATENT, moe=SIGMOID),
    "transformers, deepseek v2 lite": on_transformers("fp32", mla=LITE, moe=SOFTMAX),
    "transformers, dots.llm1": on_transformers("fp32", qk_norm=True, moe=dataclasses.replace(SIGMOID, **BIASED)),
    "transformers, dots.llm1, compiled": {
        **on_transformers("bf16", qk_norm=True, moe=SIGMOID),
        "compile": "block",
        "seq_len": 256,
    },
}
NEEDED = {"megatron": "transformer_engine", "transformers": "accelerate"}


def of(**fields: Any) -> Experiment:
    return Experiment.canonical(**{"seq_len": 256, "global_batch_size": 4, "micro_batch_size": 2, **fields})


def test_the_planner_lets_them_run() -> None:
    for layout, asked in LAYOUTS.items():
        assert refused(of(**asked)) == [], layout


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_equal_ours(layout: str) -> None:
    theirs = of(**LAYOUTS[layout])
    if importlib.util.find_spec(needed := NEEDED[theirs.engine]) is None:
        pytest.skip(f"{needed} is not installed")
    ours = of(**{**LAYOUTS[layout], "engine": "ultrasweep", "compile": "none"})
    (expected,) = on_ranks(partial(steps_on_gpu, ours), 1, "cuda", timeout_s=200)
    (found,) = on_ranks(partial(steps_on_gpu, theirs), 1, "cuda", timeout_s=200)
    near = (1e-5, 1e-4) if theirs.precision == "fp32" else (3e-4, 1e-2)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=near[0])
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=near[1])
