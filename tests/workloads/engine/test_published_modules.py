"""The engine computes the losses and gradients of transformers' own classes of today's families, in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.pool import Pool
from tests.workloads.engine.parity import train_rank, whole
from workloads.adapters.published_weights import value_of
from workloads.engine.training.data import step_batches
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import routed_layers
from workloads.spec.weights import Weight

STEPS, LENGTH = 2, 16
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,  # a vector without a gradient
}
_EPSILON = {"rms_norm_eps": 1e-6}
_GEMMA: dict[str, Any] = {
    **_EPSILON,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_WHOLE = {"rope_type": "default", "rope_theta": 500_000.0}
_DELTA: dict[str, Any] = {
    **_EPSILON,
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": _HALF,
}
_LATENT: dict[str, Any] = {
    **_EPSILON,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,  # what is rotated, which the class takes for it
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": _WHOLE,
}
_OLMO: dict[str, Any] = {
    **_EPSILON,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "rope_parameters": _WHOLE,
    "eos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 0.4,
        "query_pre_attn_scalar": 6,
    },
    "gemma3_text": {
        **_GEMMA,
        "query_pre_attn_scalar": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "gemma4_text": {
        **_GEMMA,
        "final_logit_softcapping": 0.4,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
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
    "gpt_oss": {
        **_EPSILON,
        **_EXPERTS,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "intermediate_size": 24,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
        "swiglu_limit": 0.2,  # which many numbers pass
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
    },
    "qwen3_5_moe_text": {
        **_DELTA,
        **_EXPERTS,
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_5_text": {**_DELTA, "intermediate_size": 40},
    "nemotron_h": {
        **_EXPERTS,
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 6,
        "conv_kernel": 4,
        "chunk_size": 4,
        "intermediate_size": 40,
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-6,
    },
    "llama4_text": {
        **_EPSILON,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "num_local_experts": 8,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 5,
        "attn_temperature_tuning": False,
        "no_rope_layers": [1, 1, 1, 0],
        "rope_parameters": _WHOLE,
    },
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "minimax_m2": {
        **_EPSILON,
        **_EXPERTS,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "intermediate_size": 24,
        "rotary_dim": 4,
        "rope_parameters": _HALF,
    },
    "smollm3": {
        **_EPSILON,
        "num_hidden_layers": 4,
        "intermediate_size": 40,
        "no_rope_layers": [1, 1, 1, 0],
        "rope_parameters": _WHOLE,
    },
    "glm4_moe": {
        **_EPSILON,
        **_EXPERTS,
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "rope_parameters": _HALF,
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 12,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "num_hidden_layers": 2, "routed_scaling_factor": 1.5},
}


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
    transformers = importlib.import_module("transformers")
    configuration = transformers.CONFIG_MAPPING[kind](
        **config, attn_implementation="eager", experts_implementation="eager"
    )
    return transformers.AutoModelForCausalLM.from_config(configuration)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_and_gradients_are_those_of_the_published_class(gloo_pool: Pool, kind: str) -> None:
    check_losses_and_gradients(gloo_pool, kind)


def check_losses_and_gradients(
    gloo_pool: Pool, kind: str, sizes: Mapping[str, Any] | None = None, value_of: Callable[..., Tensor] = value_of
) -> None:
    """Raises `AssertionError` where the engine and the class of a family differ. ``sizes``: of the model, by default
    those in `CONFIGS`; ``value_of``: what a parameter of the class holds."""
    pytest.importorskip("transformers")
    config = {**COMMON, **(sizes or CONFIGS[kind])}
    model = model_spec(layers_from_config(kind, {**config, "model_type": kind}))
    case = Experiment.canonical(
        model=model,
        global_batch_size=4,
        micro_batch_size=4,
        seq_len=LENGTH,
        precision="fp64",
        routing="learned" if any(routed_layers(model)) else "balanced",
    )
    (trace,) = gloo_pool.run(train_rank, 1, case, STEPS, "cpu", 1.0, 0.3)
    ours = whole(case, [trace.initial])
    with everything_in_float64():
        theirs = published_module(kind, config)
        # The bias that balances experts is moved after a step, and theirs by the user's code.
        for step in range(1 if any("correction_bias" in name for name, _ in theirs.named_buffers()) else STEPS):
            with torch.no_grad():
                for name, parameter in theirs.named_parameters():
                    parameter.copy_(value_of(kind, model, name, lambda weight, ours=ours: ours[weight.name]))
            ((tokens, targets),) = step_batches(case, step, 0, torch.device("cpu"))
            logits = theirs(input_ids=tokens.view(-1, LENGTH), use_cache=False).logits
            loss = functional.cross_entropy(logits.view(-1, model.vocab_size), targets)
            theirs.zero_grad()
            loss.backward()
            found, seen = whole(case, [trace.steps[step].gradients]), set[str]()
            torch.testing.assert_close(trace.losses[step], loss.item(), rtol=1e-12, atol=0)
            for name, parameter in theirs.named_parameters():

                def gradient_of(weight: Weight, found: Any = found, seen: set[str] = seen) -> Tensor:
                    seen.add(weight.name)
                    return found[weight.name]

                expected = parameter.grad
                gradient = value_of(kind, model, name, gradient_of, gradients=True)
                error = ((gradient - expected).abs().max() / expected.abs().max()).item()
                assert error < 1e-12, f"step {step}, {name}: {error:.1e}"
            assert seen == found.keys()
            ours = whole(case, [trace.steps[step].weights])
