"""Megatron-Core's layers on Transformer Engine: fused norm and product, fused attention, fp8, grouped products.

Two things differ from what its options alone give:

- The products accumulate weight gradients in fp32 themselves (`accumulate_in_products`). Megatron-Core's option for
  that asks for apex, which only its output layer needs.
- With forced routing the choice of experts is ours (`force_routing`): its own forced choice is random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.layers.routing import forced_choice
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

Routed = tuple[Tensor, Tensor]
"""Weights [T, E], 0 for experts that a token does not visit, and whether it visits them, bool [T, E]."""


def layers(config: TransformerConfig, virtual: int | None) -> Any:
    """The layers of one chunk, dense and routed ones."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual)


def accumulate_in_products(model: torch.nn.Module) -> None:
    """Let every product of Transformer Engine add its weight gradient to the fp32 gradient buffer."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def force_routing(model: torch.nn.Module, e: Experiment) -> None:
    """Replace the choice of every router by that of ``e.routing``, which depends on a token's position alone."""
    moe = e.model.moe
    if moe is None or e.routing == "learned":
        return
    skewed = e.routing == "skewed" and e.routing_imbalance > 1
    positions = local_positions(e.seq_len, e.cp, parallel_state.get_context_parallel_rank(), "ring")
    if e.sequence_parallel:
        positions = positions.view(e.tp, -1)[parallel_state.get_tensor_model_parallel_rank()]
    # Megatron-Core's tokens are [S, B] flattened.
    tokens = positions.repeat_interleave(e.micro_batch_size)
    choice = forced_choice(tokens, moe, e.routing_imbalance if skewed else None)
    for module in model.modules():
        if hasattr(module, "router"):
            module.router.routing = _forced(choice, moe)  # type: ignore[union-attr]


def _forced(choice: Tensor, moe: MoESpec) -> Callable[..., Routed]:
    on_device: dict[torch.device, Routed] = {}

    def routing(logits: Tensor, *_: Any, **__: Any) -> Routed:
        scores = logits.view(-1, moe.num_experts).float()
        if scores.device not in on_device:
            chosen = choice.to(scores.device)
            visited = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
            on_device[scores.device] = chosen, visited
        chosen, visited = on_device[scores.device]
        scores = scores.softmax(-1) if moe.gate == "softmax" else scores.sigmoid()
        weights = scores.gather(1, chosen)
        if moe.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * moe.weight_scale
        return torch.zeros_like(scores).scatter(1, chosen, weights).type_as(logits), visited

    return routing
