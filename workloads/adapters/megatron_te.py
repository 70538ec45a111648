"""Megatron-Core's layers on Transformer Engine: fused norm and product, fused attention, fp8, grouped products.

One thing differs from what its options alone give: the products accumulate weight gradients in fp32 themselves
(`accumulate_in_products`). Megatron-Core's option for that asks for apex, which only its output layer needs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig


def layers(config: TransformerConfig, virtual: int | None) -> Any:
    """The layers of one chunk, dense and routed ones."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual)


def accumulate_in_products(model: torch.nn.Module) -> None:
    """Let every product of Transformer Engine add its weight gradient to the fp32 gradient buffer."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
