"""The model of `transformers` that has our shape, with our initial values in its parameters."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from workloads.adapters.published_weights import value_of
from workloads.engine.collectives.parameters import initial_part
from workloads.rules.transformers_kinds import transformers_config
from workloads.spec.experiment import Experiment


def model_of(e: Experiment, device: torch.device) -> nn.Module:
    """The model on ``device`` in fp32, in training mode, with our seed's values."""
    fields = transformers_config(e.model)
    assert fields is not None, "refused by the rules"
    if "rope_parameters" in fields:
        fields["rope_parameters"] = unscaled(fields["rope_parameters"])
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")](
        max_position_embeddings=e.seq_len,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **fields,
    )
    made: Any = transformers.AutoModelForCausalLM
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with no_init_weights(), device:
        model: Any = made.from_config(config, attn_implementation=_attention(family, device))
    model.tie_weights()
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):  # of latents, which has 1e-6 whatever the configuration says
            module.variance_epsilon = e.model.norm_eps
    # What FSDP wraps: families with a vision part name its layers, too, which accelerate then misses here.
    model._no_split_modules = set(model._no_split_modules) & {type(module).__name__ for module in model.modules()}
    fill(model, e, device)
    return model.float().train()


def unscaled(rope: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` without scaling of positions, which has no effect on cost and which our engine does not
    compute. Families with two kinds of attention have them by kind."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: unscaled(one) for kind, one in rope.items()}
    kept: dict[str, Any] = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {"rope_type": "proportional" if rope["rope_type"] == "proportional" else "default", **kept}


def _attention(family: Any, device: torch.device) -> str:
    """torch's fused attention where the family has it: gpt-oss, whose softmax has sinks, has not."""
    if family._supports_sdpa:
        return "sdpa"
    return "flex_attention" if device.type == "cuda" and family._supports_flex_attn else "eager"


@torch.no_grad()
def fill(model: nn.Module, e: Experiment, device: torch.device) -> None:
    """Set every parameter to our seed's values."""
    kind: str = model.config.model_type  # type: ignore[union-attr, assignment]
    for name, parameter in model.named_parameters():
        parameter.copy_(value_of(kind, e.model, name, lambda weight: initial_part(weight, e.seed, device, {})))
