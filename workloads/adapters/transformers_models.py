"""The model of `transformers` that has our shape, with our initial values in its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from workloads.engine.collectives.parameters import initial_part
from workloads.rules.transformers_support import transformers_model
from workloads.spec import weights
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight

_SHORT = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    **{f"self_attn.{name}_proj": f"attention.{name}" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"ffn.{name}" for name in ("gate", "up", "down")},
    "mlp.gate": "experts.router",
    "mlp.experts.down_proj": "experts.down",
}
"""Names of a layer's parameters in transformers, and ours (`workloads.spec.weights`)."""
_FUSED_EXPERTS = "mlp.experts.gate_up_proj"
"""The parameter of transformers that stacks two of our weights: gate and up of every expert."""


def model_of(e: Experiment, device: torch.device) -> nn.Module:
    """The model on ``device`` in fp32, in training mode, with our seed's values."""
    m, (family, settings) = e.model, transformers_model(e.model)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        max_position_embeddings=e.seq_len,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
        tie_word_embeddings=m.tie_embeddings,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        **settings,
    )
    with no_init_weights(), device:
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    model.tie_weights()
    fill(model, e, device)
    return model.float().train()


@torch.no_grad()
def fill(model: nn.Module, e: Experiment, device: torch.device) -> None:
    """Set every parameter to our seed's values."""
    for name, parameter in model.named_parameters():
        parameter.copy_(value_of(e.model, name, lambda weight: initial_part(weight, e.seed, device, {})))


def value_of(m: ModelSpec, name: str, value: Callable[[Weight], Tensor]) -> Tensor:
    """What the parameter ``name`` of transformers holds, if ``value`` returns what each of our weights holds."""
    ends = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    if name in ends:
        return value(ends[name](m))
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight)?", name)
    assert found is not None, name
    layer, short = int(found[1]), found[2]
    prefix = f"layers.{layer}"
    ours = {w.name.removeprefix(f"{prefix}."): w for w in weights.block(m, prefix, routed=weights.routed(m, layer))}
    if short == _FUSED_EXPERTS:
        return torch.cat([value(ours["experts.gate"]), value(ours["experts.up"])], dim=1)
    return value(ours[_SHORT[short]])
