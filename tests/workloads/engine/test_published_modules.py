"""The engine computes the losses and gradients of transformers' own classes of Gemma 2, 3 and 4, in float64."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.pool import Pool
from tests.workloads.engine.parity import train_rank, whole
from workloads.engine.training.data import step_batches
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.experiment import Experiment

STEPS, LENGTH = 2, 16
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,  # a vector without a gradient
}
_GEMMA4 = {"final_logit_softcapping": 0.4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 0.4, "query_pre_attn_scalar": 6},
    "gemma3_text": {
        "query_pre_attn_scalar": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "gemma4_text": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "global_head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_global_key_value_heads": 1,
        "top_k_experts": 2,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
    },
}
CLASSES = {"gemma2": "Gemma2", "gemma3_text": "Gemma3", "gemma4_text": "Gemma4"}
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "attention_norm": "input_layernorm.weight",
    "attention_out_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_out_norm": "post_feedforward_layernorm.weight",
    "shared_out_norm": "post_feedforward_layernorm_1.weight",
    "experts_out_norm": "post_feedforward_layernorm_2.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    **{f"attention.{one}": f"self_attn.{one}_proj.weight" for one in "qkvo"},
    **{f"attention.{one}_norm": f"self_attn.{one}_norm.weight" for one in "qk"},
    **{f"{part}.{one}": f"mlp.{one}_proj.weight" for part in ("ffn", "shared") for one in ("gate", "up", "down")},
    "experts.router": "router.proj.weight",
    "experts.router_norm": "router.scale",
    "experts.router_scales": "router.per_expert_scale",
    "experts.gate": "experts.gate_up_proj",
    "experts.up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj",
}
"""Names of weights in transformers, without the layer, by those of the engine."""


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """The classes compute norms, positions and softmaxes in float32, whatever their weights are: here in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def published_module(kind: str, config: dict[str, Any]) -> Any:
    module = importlib.import_module(
        f"transformers.models.{kind.removesuffix('_text')}.modeling_{kind.removesuffix('_text')}"
    )
    configuration = importlib.import_module("transformers").CONFIG_MAPPING[kind](
        **config, attn_implementation="eager", experts_implementation="eager"
    )
    return getattr(module, f"{CLASSES[kind]}ForCausalLM")(configuration)


def of_theirs(name: str, named: dict[str, Tensor]) -> Tensor:
    """A weight, or its gradient, of the engine's name."""
    layer, own = "", name
    if name.startswith("layers."):
        _, number, own = name.split(".", 2)
        layer = f"model.layers.{number}."
    found = named[layer + NAMES[own]]
    if own in ("experts.gate", "experts.up"):
        return found.chunk(2, 1)[own == "experts.up"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_and_gradients_are_those_of_the_published_class(gloo_pool: Pool, kind: str) -> None:
    pytest.importorskip("transformers")
    config = {**COMMON, **CONFIGS[kind]}
    model = model_spec(layers_from_config(kind, {**config, "model_type": kind}))
    case = Experiment.canonical(
        model=model,
        global_batch_size=4,
        micro_batch_size=4,
        seq_len=LENGTH,
        precision="fp64",
        routing="learned" if model.moe is not None else "balanced",
    )
    (trace,) = gloo_pool.run(train_rank, 1, case, STEPS, "cpu", 1.0, 0.3)
    weights = whole(case, [trace.initial])
    with everything_in_float64():
        theirs = published_module(kind, config)
        parameters = dict(theirs.named_parameters())
        for step in range(STEPS):
            with torch.no_grad():
                for name, weight in weights.items():
                    shifted = kind != "gemma4_text" and name.endswith("norm")  # a weight's norm is 1 + weight
                    of_theirs(name, parameters).copy_(weight - 1 if shifted else weight)
            ((tokens, targets),) = step_batches(case, step, 0, torch.device("cpu"))
            logits = theirs(input_ids=tokens.view(-1, LENGTH), use_cache=False).logits
            loss = functional.cross_entropy(logits.view(-1, model.vocab_size), targets)
            theirs.zero_grad()
            loss.backward()
            gradients = {name: one.grad for name, one in parameters.items()}
            found = whole(case, [trace.steps[step].gradients])
            assert found.keys() == weights.keys()
            torch.testing.assert_close(trace.losses[step], loss.item(), rtol=1e-12, atol=0)
            for name, gradient in found.items():
                expected = of_theirs(name, gradients)
                error = ((gradient - expected).abs().max() / expected.abs().max()).item()
                assert error < 1e-12, f"step {step}, {name}: {error:.1e}"
            weights = whole(case, [trace.steps[step].weights])
