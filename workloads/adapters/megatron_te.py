"""Megatron-Core's layers on Transformer Engine: fused norm and product, fused attention, fp8, grouped products.

Two things differ from what its options alone give:

- The products accumulate weight gradients in fp32 themselves (`accumulate_in_products`). Megatron-Core's option for
  that asks for apex, which only its output layer needs.
- With forced routing the choice of experts is ours (`force_routing`): its own forced choice is random.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from workloads.adapters.forced_routing import forced_routing
from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.layers.routing import forced_choice
from workloads.spec.experiment import Experiment


def layers(config: TransformerConfig, virtual: int | None) -> Any:
    """The layers of one chunk, dense and routed ones."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual)


def accumulate_in_products(model: torch.nn.Module) -> None:
    """Let every product of Transformer Engine add its weight gradient to the fp32 gradient buffer."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


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
            module.router.routing = forced_routing(choice, moe)  # type: ignore[union-attr, assignment]
